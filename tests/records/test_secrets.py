"""Secrets are sealed on disk, bound to their owner, and never listed with values; callers at the same time lose nothing."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from atoll.core.access import secrets
from atoll.core.access.secrets import Secrets
from atoll.errors import Exhausted, FailedPrecondition, Internal, InvalidArgument, NotFound


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


WRITER = """
import sys
from pathlib import Path
from atoll.core.access.secrets import Secrets
store = Secrets(Path(sys.argv[1]))
for number in range(10): store.set(sys.argv[2], "db", f"k{number}", sys.argv[2] * 200)
"""


def test_callers_at_the_same_time_lose_and_damage_nothing(tmp_path: Path) -> None:
    """Threads of one daemon, as its verbs run, and another process; readers meanwhile. The key is made by the first of all."""
    store, failed = Secrets(tmp_path), list[BaseException]()

    def work(owner: str) -> None:
        try:
            for number in range(10):
                store.set(owner, "db", f"k{number}", owner * 200)
                assert store.resolve(owner, "db", f"k{number}") == owner * 200
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(f"key:{number}",)) for number in range(6)]
    other = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), "key:other"])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert other.wait() == 0 and not failed, failed
    for owner in (*(f"key:{number}" for number in range(6)), "key:other"):
        assert store.list(owner) == {"db": sorted(f"k{number}" for number in range(10))}
        assert all(store.resolve(owner, "db", f"k{number}") == owner * 200 for number in range(10))
    assert sorted(os.listdir(tmp_path)) == ["secrets.json", "secrets.key", "secrets.lock"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Secrets(tmp_path)
    store.set("uid:0", "db", "a", "1")

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(secrets, "_write", full)
    with pytest.raises(OSError, match="No space"):
        store.set("uid:0", "db", "b", "2")
    assert store.list("uid:0") == {"db": ["a"]} and store.resolve("uid:0", "db", "a") == "1"
    assert sorted(os.listdir(tmp_path)) == ["secrets.json", "secrets.key", "secrets.lock"]


def test_an_owner_keeps_a_bounded_number_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Secrets(tmp_path)
    for number in range(11):
        store.set("key:a", "big", f"k{number}", "x" * (64 << 10))
    with pytest.raises(Exhausted, match="1024 KiB"):
        store.set("key:a", "big", "k11", "x" * (64 << 10))
    monkeypatch.setattr(secrets, "MAX_KEYS", 12)
    store.set("key:a", "small", "k", "v")
    with pytest.raises(Exhausted):
        store.set("key:a", "small", "one-more", "v")
    store.set("key:a", "big", "k1", "v")
    store.set("key:b", "db", "k", "v")
    assert len(store.list("key:a")["big"]) == 11 and store.list("key:b") == {"db": ["k"]}
