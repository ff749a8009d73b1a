"""Secrets are sealed on disk, bound to their owner, and never listed with values."""

import json
from pathlib import Path

import pytest

from atoll.core.access.secrets import Secrets
from atoll.errors import FailedPrecondition, Internal, InvalidArgument, NotFound


def test_a_value_comes_back_and_is_not_on_disk(tmp_path: Path) -> None:
    store = Secrets(tmp_path)
    store.set("uid:0", "db", "password", "hunter2-canary")
    assert Secrets(tmp_path).resolve("uid:0", "db", "password") == "hunter2-canary"
    assert b"hunter2" not in (tmp_path / "secrets.json").read_bytes()
    assert (tmp_path / "secrets.key").stat().st_mode & 0o777 == 0o600
    assert store.list("uid:0") == {"db": ["password"]}


def test_another_owner_has_none_of_it(tmp_path: Path) -> None:
    store = Secrets(tmp_path)
    store.set("uid:0", "db", "password", "v")
    assert store.list("uid:1") == {}
    with pytest.raises(FailedPrecondition):
        store.resolve("uid:1", "db", "password")


def test_a_row_moved_to_another_owner_does_not_open(tmp_path: Path) -> None:
    store = Secrets(tmp_path)
    store.set("uid:0", "db", "password", "v")
    rows = json.loads((tmp_path / "secrets.json").read_text())
    (tmp_path / "secrets.json").write_text(json.dumps({"uid:1": rows["uid:0"]}))
    with pytest.raises(Internal):
        store.resolve("uid:1", "db", "password")


def test_bad_names_and_values(tmp_path: Path) -> None:
    store = Secrets(tmp_path)
    for name in ("", "../x", "a/b", "x" * 64, ".hidden", "a\0"):
        with pytest.raises(InvalidArgument):
            store.set("uid:0", name, "k", "v")
    with pytest.raises(InvalidArgument):
        store.set("uid:0", "n", "k", "a\0b")


def test_remove(tmp_path: Path) -> None:
    store = Secrets(tmp_path)
    store.set("uid:0", "db", "a", "1")
    store.set("uid:0", "db", "b", "2")
    store.remove("uid:0", "db", "a")
    assert store.list("uid:0") == {"db": ["b"]}
    store.remove("uid:0", "db")
    with pytest.raises(NotFound):
        store.remove("uid:0", "db")
