"""A store of another version: an older one is brought up to date and kept, a newer one is refused with words."""

import sqlite3
import stat
from pathlib import Path

import pytest

from atoll import errors
from atoll.core.store import schema
from atoll.core.store.sqlite import SqliteDatabase

FIRST = 1


def old_store(path: Path) -> None:
    """A store as the first schema had it, with one thing in it."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.executescript(f"BEGIN; {schema.SQLITE[0]}; PRAGMA user_version={FIRST}; COMMIT;")
    db.execute("CREATE TABLE mark(word TEXT)")
    db.execute("INSERT INTO mark VALUES('kept')")
    db.close()


def version_of(path: Path) -> int:
    with sqlite3.connect(path) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_an_older_store_is_brought_up_to_date_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    old_store(path)
    SqliteDatabase(path).close()
    assert version_of(path) == len(schema.SQLITE) > FIRST
    copy = path.with_name(f"state.db.schema-{FIRST}")
    assert version_of(copy) == FIRST and stat.S_IMODE(copy.stat().st_mode) == 0o600
    with sqlite3.connect(copy) as db:
        assert db.execute("SELECT word FROM mark").fetchall() == [("kept",)]
    SqliteDatabase(path).close()
    assert sorted(one.name for one in tmp_path.glob("state.db.schema-*")) == [copy.name]  # once


def test_a_newer_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    old_store(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=999")
    with pytest.raises(errors.FailedPrecondition, match="written by a newer atoll") as refused:
        SqliteDatabase(path)
    assert "newer atoll" in refused.value.hint and version_of(path) == 999
