"""The records in one file: SQLite in WAL mode, one writer. The database of a daemon on one machine.

The file and its log have blocks of their own beyond what they use (`reserve.py`), so that a full disk does not keep an ending
from being written.
"""

import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll import errors
from atoll.core.store.database import StoreFailed, Taken, Values
from atoll.core.store.reserve import FULL, Ballast, allocate
from atoll.core.store.schema import SQLITE

log = logging.getLogger("atoll.store")

FILE_ROOM, LOG_ROOM = (
    8 << 20,
    12 << 20,
)  # blocks kept beyond the file's end, and for its log (which SQLite folds at 4 MB)


def _failed(error: sqlite3.Error) -> StoreFailed:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    full = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
    damaged = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    hint = "free space below ATOLL_HOME" if full else "see daemon.log"
    return StoreFailed(error, hint=hint, full=full, damaged=damaged)


class _Connection(sqlite3.Connection):
    """Raises what SQLite cannot do as an error of ours; what it found wrong with a statement's values stays as it is."""

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*statement)
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            raise _failed(error) from error


def _connect(path: Path) -> _Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=_Connection)
    path.chmod(0o600)
    db.row_factory = sqlite3.Row
    for setting in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000"):
        db.execute(f"PRAGMA {setting}")
    return db


class SqliteConnection:
    """Carries out the statements of `Database` on one connection to a file."""

    low = False

    def __init__(self, path: Path) -> None:
        self.connection = _connect(path)

    def top_up(self) -> bool:
        return True

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:  # a full disk may have ended it already
                self.connection.execute("ROLLBACK")
            raise

    def rows(self, query: str, *values: Any) -> Sequence[Values]:
        try:
            return self.connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:  # a damaged file shows itself with any row
            raise _failed(error) from error

    def row(self, query: str, *values: Any) -> Values | None:
        try:
            found: Values | None = self.connection.execute(query, values).fetchone()
        except sqlite3.DatabaseError as error:
            raise _failed(error) from error
        return found

    def change(self, query: str, *values: Any) -> int:
        try:
            return self.connection.execute(query, values).rowcount
        except sqlite3.IntegrityError as error:
            raise Taken(str(error)) from None

    def number(self, query: str, *values: Any) -> int:
        ((found,),) = self.connection.execute(query, values).fetchall()
        return int(found)


class SqliteDatabase(SqliteConnection):
    """Implements `Database` with a file that has room of its own, and brings its tables up to date."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ballast = Ballast(path.parent)
        # Held for life: SQLite's locks would go with any descriptor of the file that this process closes.
        self._room = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.low = False
        try:
            self.connection = self._open(path)
        except StoreFailed as failed:
            if not failed.full or not self._ballast.give_up():
                raise
            self.connection = self._open(path)
        self.top_up()

    def _open(self, path: Path) -> _Connection:
        db = _connect(path)
        self._migrate(db, path)
        db.execute("BEGIN IMMEDIATE")  # opens the log, for which there may be no room
        db.execute("INSERT OR REPLACE INTO meta VALUES('opened', ?)", (str(time.time()),))
        db.execute("COMMIT")
        return db

    def top_up(self) -> bool:
        try:
            self._keep_room()
        except OSError as error:
            if error.errno not in FULL:
                return True  # a file system that cannot promise blocks
            self.low = True
            return False
        if self.low:
            log.info("there is room again")
        self.low = False
        self._ballast.keep()
        return True

    def _keep_room(self) -> None:
        allocate(self._room, os.fstat(self._room).st_size + FILE_ROOM)
        log_file = os.open(f"{self._path}-wal", os.O_RDWR | os.O_CLOEXEC)  # SQLite has no locks on this one
        try:
            allocate(log_file, LOG_ROOM)
        finally:
            os.close(log_file)

    @staticmethod
    def _migrate(db: sqlite3.Connection, path: Path) -> None:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > len(SQLITE):
            raise errors.FailedPrecondition(
                f"{path} was written by a newer atoll (schema {version}, this one knows {len(SQLITE)})",
                hint="use the newer atoll, or another ATOLL_HOME",
            )
        if 0 < version < len(SQLITE):
            _keep_copy(db, path, version)
        for number in range(version, len(SQLITE)):
            db.executescript(f"BEGIN; {SQLITE[number]}; PRAGMA user_version={number + 1}; COMMIT;")

    def close(self) -> None:
        super().close()
        os.close(self._room)


def _keep_copy(db: sqlite3.Connection, path: Path, version: int) -> None:
    """Write the store as an older atoll left it to a file beside it, for who wants to go back. Without room there is none."""
    copy = path.with_name(f"{path.name}.schema-{version}")
    copy.unlink(missing_ok=True)
    try:
        os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        db.execute("VACUUM INTO ?", (str(copy),))
    except (OSError, StoreFailed) as error:
        log.warning("no copy of the store was kept before its schema changed: %s", error)
        copy.unlink(missing_ok=True)
    else:
        log.info("the store as schema %d had it is in %s", version, copy)
