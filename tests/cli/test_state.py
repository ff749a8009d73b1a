"""The automatic sandbox of a tenant: one of many creates, a dead creator blocks nobody (D28)."""

import json
import multiprocessing
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

from atoll.cli.session import reference, run_id, split_run_id, tenant_of
from atoll.cli.state import State, forget_everywhere
from atoll.errors import InvalidArgument, Unavailable


def compete(data: str, made: str, results: "multiprocessing.Queue[str]") -> None:
    def create() -> str:
        with open(made, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        return f"sess-{os.getpid()}"

    results.put(State(data, "default").obtain(create, lambda late: None)[0])


def test_of_twenty_at_once_one_creates(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[str] = spawn.Queue()
    made = os.fspath(tmp_path / "made")
    workers = [spawn.Process(target=compete, args=(os.fspath(tmp_path / "data"), made, results)) for _ in range(20)]
    for worker in workers:
        worker.start()
    found = {results.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(60)
    assert len(found) == 1
    assert len(Path(made).read_text().split()) == 1


def test_the_file_has_k8es_shape(tmp_path: Path) -> None:
    data = os.fspath(tmp_path)
    State(data, "my-project").obtain(lambda: "sess-abc", lambda late: None)
    path = tmp_path / "my-project" / "state.json"
    entry = json.loads(path.read_text())
    assert entry["session_id"] == "sess-abc" and entry["phase"] == "active" and entry["tenant_id"] == "my-project"
    assert time.strptime(entry["created_at"], "%Y-%m-%dT%H:%M:%SZ")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(p.name for p in path.parent.iterdir()) == ["state.json", "state.lock"]


def write(tmp_path: Path, **entry: object) -> Path:
    path = tmp_path / "default" / "state.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps({"session_id": "", "tenant_id": "default", "created_at": "2026-01-01T00:00:00Z", **entry})
    )
    return path


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_dead_creator_is_taken_over(tmp_path: Path) -> None:
    write(tmp_path, phase="creating", pid=dead_pid())
    assert State(os.fspath(tmp_path), "default").obtain(lambda: "sess-new", lambda late: None) == ("sess-new", True)


def test_a_creator_of_two_minutes_is_taken_over(tmp_path: Path) -> None:
    path = write(tmp_path, phase="creating", pid=1)
    os.utime(path, (time.time() - 121, time.time() - 121))
    assert State(os.fspath(tmp_path), "default").obtain(lambda: "sess-new", lambda late: None)[0] == "sess-new"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"phase":"active"}', '{"phase":"creating","pid":"x"}'])
def test_a_broken_file_blocks_nobody(tmp_path: Path, content: str) -> None:
    write(tmp_path, phase="creating").write_text(content)
    assert State(os.fspath(tmp_path), "default").obtain(lambda: "sess-new", lambda late: None)[0] == "sess-new"


def test_a_failed_creation_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> str:
        raise Unavailable("no")

    state = State(os.fspath(tmp_path), "default")
    with pytest.raises(Unavailable):
        state.obtain(fail, lambda late: None)
    assert not (tmp_path / "default" / "state.json").exists()
    assert state.obtain(lambda: "sess-b", lambda late: None) == ("sess-b", True)


def test_a_creator_that_was_taken_over_throws_its_own_away(tmp_path: Path) -> None:
    discarded: list[str] = []

    def slow() -> str:
        write(tmp_path, phase="active", session_id="sess-theirs")
        return "sess-mine"

    state = State(os.fspath(tmp_path), "default")
    assert state.obtain(slow, discarded.append) == ("sess-theirs", False)
    assert discarded == ["sess-mine"]


def test_destroy_clears_every_entry_that_names_it(tmp_path: Path) -> None:
    data = os.fspath(tmp_path)
    for tenant in ("a", "b"):
        State(data, tenant).obtain(lambda: "sess-x", lambda late: None)
    State(data, "c").obtain(lambda: "sess-y", lambda late: None)
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
