"""The file that remembers a tenant's automatic sandbox: its shape, and that nothing in it blocks anybody (D28)."""

import json
import os
import stat
import time
from pathlib import Path

import pytest

from atoll.cli.session import reference, run_id, split_run_id, tenant_of
from atoll.cli.state import State, forget_everywhere
from atoll.errors import InvalidArgument


def test_the_file_has_k8es_shape(tmp_path: Path) -> None:
    data = os.fspath(tmp_path)
    State(data, "my-project").remember("sess-abc")
    path = tmp_path / "my-project" / "state.json"
    entry = json.loads(path.read_text())
    assert entry["session_id"] == "sess-abc" and entry["phase"] == "active" and entry["tenant_id"] == "my-project"
    assert time.strptime(entry["created_at"], "%Y-%m-%dT%H:%M:%SZ")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(p.name for p in path.parent.iterdir()) == ["state.json", "state.lock"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"phase":"active"}', '{"phase":"creating","pid":1,"session_id":""}']
)
def test_a_broken_file_or_a_creator_that_died_blocks_nobody(tmp_path: Path, content: str) -> None:
    path = tmp_path / "default" / "state.json"
    path.parent.mkdir()
    path.write_text(content)
    state = State(os.fspath(tmp_path), "default")
    assert state.current() is None
    state.remember("sess-new")
    assert state.current() == "sess-new"


def test_a_machines_default_is_its_own_and_a_tenants_is_everybodys(tmp_path: Path) -> None:
    here, there = (State(os.fspath(tmp_path / name), "default") for name in ("a", "b"))
    assert here.holder != there.holder and len(here.holder) == 16
    assert State(os.fspath(tmp_path / "a"), "team").holder == ""


def test_destroy_clears_every_entry_that_names_it(tmp_path: Path) -> None:
    data = os.fspath(tmp_path)
    for tenant in ("a", "b"):
        State(data, tenant).remember("sess-x")
    State(data, "c").remember("sess-y")
    forget_everywhere(data, "sess-x")
    assert [State(data, tenant).current() for tenant in "abc"] == [None, None, "sess-y"]


@pytest.mark.parametrize("name", ["..", "../..", "a/b", "", ".hidden", "-x", "a" * 64, "a\0b", "a b", "a..b"])
def test_tenant_names_cannot_be_paths(name: str) -> None:
    class Given:
        tenant = name or None

    if not name:
        assert tenant_of(Given()) == "default"  # type: ignore[arg-type]
        return
    with pytest.raises(InvalidArgument):
        tenant_of(Given())  # type: ignore[arg-type]


def test_ids_come_back_as_they_went() -> None:
    core = "abcdefghij234567klmn"
    assert reference(f"sess-{core}") == core
    assert reference("sess-own-choice") == "sess-own-choice" and reference("build") == "build"
    assert split_run_id(run_id(core, "cxyz")) == (core, "cxyz")
    for bad in ("", "x", "-bg-", "sess-x-bg-"):
        with pytest.raises(InvalidArgument):
            split_run_id(bad)
