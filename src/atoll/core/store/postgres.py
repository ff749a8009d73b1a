"""The records in PostgreSQL, which several gateways share.

A transaction holds one lock of the whole database, as SQLite's does: so a count that was checked still holds when the row is
written, and the numbers of events are seen in their order. A server that is away costs a caller at most `CONNECT_SECONDS`,
and for `PAUSE` afterwards nothing: calls are then refused at once. A read is repeated on a new connection; a write is not,
because it may have been carried out.

One gateway serves from a database at a time. It holds a lock for as long as its connection lives; the others wait for it.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from atoll import errors
from atoll.core.store.database import StoreFailed, Taken, Values
from atoll.core.store.schema import POSTGRES

if TYPE_CHECKING:
    from psycopg import Connection, Cursor

log = logging.getLogger("atoll.store")

CONNECT_SECONDS = 3
STATEMENT_MS = 10_000
PAUSE = 1.0
_LOCK = 0x61746F6C6C  # of transactions
_SERVING = 0x61746F6C6D  # of the gateway that serves
_FULL = "53100"  # disk_full
_OPTIONS: dict[str, Any] = {
    "connect_timeout": CONNECT_SECONDS,
    "application_name": "atoll",
    "options": f"-c statement_timeout={STATEMENT_MS} -c lock_timeout={STATEMENT_MS}",
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


class PostgresDatabase:
    """Implements `Database`. `words` is a connection string of libpq.

    With `on_replaced` this is the connection of a gateway that serves: it waits until no other does, and calls
    `on_replaced` once if another one has begun to serve while the connection was lost.
    """

    low = False  # room is the server's matter

    def __init__(self, words: str, on_replaced: Callable[[], None] | None = None) -> None:
        try:
            import psycopg
        except ImportError:
            raise errors.Unsupported(
                "the PostgreSQL client is not installed", hint="pip install 'atoll[kubernetes]'"
            ) from None
        self._psycopg = psycopg
        self._words = words
        self._connection: Connection[dict[str, Any]] | None = None
        self._inside = False  # a transaction
        self._away_until = 0.0
        self._on_replaced = on_replaced
        if on_replaced is not None:
            self._wait_for_place()
        with self.transaction():
            self._migrate()

    def top_up(self) -> bool:
        return True

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._run("BEGIN", repeat=True)
        self._inside = True
        try:
            self._run(f"SELECT pg_advisory_xact_lock({_LOCK})")
            yield
            self._run("COMMIT")
        except BaseException:
            self._roll_back()
            raise
        finally:
            self._inside = False

    def rows(self, query: str, *values: Any) -> Sequence[Values]:
        return self._run(query, *values, repeat=not self._inside).fetchall()

    def row(self, query: str, *values: Any) -> Values | None:
        return self._run(query, *values, repeat=not self._inside).fetchone()

    def change(self, query: str, *values: Any) -> int:
        return self._run(query, *values).rowcount

    def number(self, query: str, *values: Any) -> int:
        if not self._inside:
            with self.transaction():
                return self.number(query, *values)
        found = self._run(query, *values).fetchone() or {}
        return int(next(iter(found.values())))

    def _run(self, query: str, *values: Any, repeat: bool = False) -> "Cursor[dict[str, Any]]":
        """Carry out a statement. With `repeat` once more if the connection turns out to be gone."""
        psycopg, known = self._psycopg, self._connection is not None
        connection = self._connected()
        try:
            return connection.execute(_placed(query), values or None)
        except psycopg.errors.UniqueViolation as error:
            raise Taken(str(error)) from None
        except psycopg.DataError as error:
            raise errors.InvalidArgument(f"the store cannot hold this: {error}") from None
        except psycopg.Error as error:
            gone = connection.closed or connection.broken
            if gone:
                self._drop()
            if gone and repeat and known:
                return self._run(query, *values)
            raise StoreFailed(str(error).strip(), full=error.sqlstate == _FULL, hint=_HINT) from None

    def _connected(self) -> "Connection[dict[str, Any]]":
        if self._connection is not None:
            return self._connection
        if self._inside:
            raise StoreFailed("the connection to PostgreSQL was lost in a transaction", hint=_HINT)
        if time.monotonic() < self._away_until:
            raise StoreFailed("PostgreSQL cannot be reached", hint=_HINT)
        from psycopg.rows import dict_row

        try:
            connection = self._psycopg.connect(self._words, autocommit=True, row_factory=dict_row, **_OPTIONS)
            if self._on_replaced is not None and not _take_place(connection):
                connection.close()
                self._replaced()
        except self._psycopg.Error as error:
            self._away_until = time.monotonic() + PAUSE
            raise StoreFailed(f"PostgreSQL cannot be reached: {str(error).strip()}", hint=_HINT) from None
        self._connection = connection
        return connection

    def _wait_for_place(self) -> None:
        """Connect as soon as no other gateway serves."""
        replaced, self._on_replaced = self._on_replaced, lambda: None
        told = False
        while self._connection is None:
            try:
                self._connected()
            except StoreFailed as failed:
                if not told:
                    log.warning("waiting: %s", failed.message)
                told = True
                time.sleep(PAUSE)
        self._on_replaced = replaced

    def _replaced(self) -> None:
        assert self._on_replaced is not None
        self._on_replaced()
        raise StoreFailed("another gateway serves from this database", hint="ask that one")

    def _roll_back(self) -> None:
        """End a transaction that failed; a connection that does not even do that is given up."""
        if self._connection is None:
            return
        try:
            self._connection.execute("ROLLBACK")
        except self._psycopg.Error as error:
            log.warning("the connection to PostgreSQL is given up: %s", error)
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _migrate(self) -> None:
        self._run("CREATE TABLE IF NOT EXISTS atoll_schema(version INTEGER NOT NULL)")
        found = self.row("SELECT version FROM atoll_schema")
        version = 0 if found is None else int(found["version"])
        if version > len(POSTGRES):
            raise errors.FailedPrecondition(
                f"the database was written by a newer atoll (schema {version}, this one knows {len(POSTGRES)})",
                hint="use the newer atoll, or another database",
            )
        for step in POSTGRES[version:]:
            self._run(step)
        if found is None:
            self.change("INSERT INTO atoll_schema VALUES(?)", len(POSTGRES))
        elif version < len(POSTGRES):
            self.change("UPDATE atoll_schema SET version = ?", len(POSTGRES))


def _take_place(connection: "Connection[dict[str, Any]]") -> bool:
    """Return whether no other gateway serves; none will until this connection ends."""
    found = connection.execute(f"SELECT pg_try_advisory_lock({_SERVING}) AS mine".encode()).fetchone()
    return bool(found and found["mine"])


_HINT = "see that PostgreSQL runs and takes connections"


@lru_cache(maxsize=512)
def _placed(query: str) -> bytes:
    """Return a statement with its values marked as PostgreSQL's driver wants them."""
    return query.replace("?", "%s").encode()
