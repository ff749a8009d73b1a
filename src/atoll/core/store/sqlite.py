"""The daemon's durable state: SQLite in WAL mode, one writer, schema changes forward only.

Calls are synchronous: each is one short statement on a local file, cheaper than a hop to a thread. Every lookup of
something that belongs to somebody takes the owner in the query itself.

The file and its log have blocks of their own beyond what they use (`reserve.py`), so that a full disk does not keep an ending
from being written. What SQLite refuses is a `StoreFailed`; whoever ends something goes on after that.
"""

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from atoll import errors
from atoll.core.store.columns import Row, decoded, packed, shown
from atoll.core.store.reserve import FULL, Ballast, allocate
from atoll.core.store.typed import ApprovalRow, CommandRow, EventRow, NewCommand, SandboxRow

log = logging.getLogger("atoll.store")

LIVE = ("creating", "running", "paused", "stopping", "stopped", "ending")
MAX_EVENTS = 10_000
WRITE_BEHIND = 0.02
MAX_LATE = 20_000  # late writes that wait for a store that cannot be written
KEEP_ENDED = 7 * 86400.0
MAX_ENDED = 2000  # sandboxes of one owner that have ended and are still known; the oldest beyond go
FILE_ROOM, LOG_ROOM = (
    8 << 20,
    12 << 20,
)  # blocks kept beyond the file's end, and for its log (which SQLite folds at 4 MB)

_MIGRATIONS = (
    """
    CREATE TABLE sandbox(
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT, state TEXT NOT NULL, runtime TEXT NOT NULL,
        image TEXT NOT NULL, spec TEXT NOT NULL, record TEXT NOT NULL, created_at REAL NOT NULL, expires_at REAL,
        idle_timeout REAL, last_active REAL NOT NULL, ended_at REAL, end_kind TEXT, end_detail TEXT, end_by TEXT,
        parent_id TEXT, workspace TEXT);
    CREATE UNIQUE INDEX sandbox_name ON sandbox(owner, name) WHERE state != 'ended';
    CREATE INDEX sandbox_owner ON sandbox(owner, created_at);
    CREATE INDEX sandbox_ended ON sandbox(ended_at);
    CREATE TABLE alias(owner TEXT, alias TEXT, sandbox_id TEXT NOT NULL, PRIMARY KEY(owner, alias));
    CREATE INDEX alias_sandbox ON alias(sandbox_id);
    CREATE TABLE command(
        sandbox_id TEXT, id TEXT, argv TEXT NOT NULL, language TEXT, background INTEGER NOT NULL, body TEXT NOT NULL,
        spec TEXT NOT NULL, pid INTEGER, started_at REAL NOT NULL, ended_at REAL, status TEXT NOT NULL, exit TEXT,
        PRIMARY KEY(sandbox_id, id)) WITHOUT ROWID;
    CREATE TABLE event(
        seq INTEGER PRIMARY KEY AUTOINCREMENT, sandbox_id TEXT, owner TEXT, at REAL, kind TEXT, data TEXT);
    CREATE INDEX event_sandbox ON event(sandbox_id, seq);
    CREATE INDEX event_owner ON event(owner, seq);
    CREATE TABLE journal(id TEXT, step TEXT, at REAL);
    CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT);
    """,
    """
    CREATE TABLE approval(
        id TEXT PRIMARY KEY, sandbox_id TEXT NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL, action TEXT NOT NULL,
        digest TEXT NOT NULL, status TEXT NOT NULL, requested_at REAL NOT NULL, expires_at REAL NOT NULL,
        sessions TEXT NOT NULL, decided_at REAL, decided_by TEXT, reason TEXT);
    CREATE INDEX approval_sandbox ON approval(sandbox_id);
    """,
    "CREATE INDEX sandbox_parent ON sandbox(parent_id) WHERE parent_id IS NOT NULL",
    """
    ALTER TABLE sandbox ADD COLUMN request_id TEXT;
    ALTER TABLE sandbox ADD COLUMN request_hash TEXT;
    CREATE UNIQUE INDEX sandbox_request ON sandbox(owner, request_id) WHERE request_id IS NOT NULL;
    """,
)


class StoreFailed(errors.Unavailable):
    """The store cannot be read or written now. `full`: for want of space; `damaged`: its file is no database, or a broken one."""

    def __init__(self, error: sqlite3.Error) -> None:
        self.damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        self.full = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
        hint = "free space below ATOLL_HOME" if self.full else "see daemon.log"
        super().__init__(f"the store cannot be used: {error}", hint=hint)


class _Connection(sqlite3.Connection):
    """Raises what SQLite cannot do as an error of ours; what it found wrong with a statement's values stays as it is."""

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*statement)
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            raise StoreFailed(error) from error


class Store:
    """The daemon's memory. Rows come out as plain dicts with `spec`, `record`, `exit` and `data` decoded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ballast = Ballast(path.parent)
        # Held for life: SQLite's locks would go with any descriptor of the file that this process closes.
        self._room = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.low = False  # there is no room but the reserve
        try:
            self._db = self._open(path)
        except StoreFailed as failed:
            if not failed.full or not self._ballast.give_up():
                raise
            self._db = self._open(path)
        self.top_up()
        self._since_prune = 0
        self._later: list[Callable[[], object]] = []

    def _open(self, path: Path) -> _Connection:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=_Connection)
        path.chmod(0o600)
        db.row_factory = sqlite3.Row
        for setting in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000"):
            db.execute(f"PRAGMA {setting}")
        self._migrate(db, path)
        db.execute("BEGIN IMMEDIATE")  # opens the log, for which there may be no room
        db.execute("INSERT OR REPLACE INTO meta VALUES('opened', ?)", (str(time.time()),))
        db.execute("COMMIT")
        return db

    def top_up(self) -> bool:
        """Keep room for what has to be written when the disk is full; False when there is none to be had."""
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
        if version > len(_MIGRATIONS):
            raise errors.FailedPrecondition(
                f"{path} was written by a newer atoll (schema {version}, this one knows {len(_MIGRATIONS)})",
                hint="use the newer atoll, or another ATOLL_HOME",
            )
        if 0 < version < len(_MIGRATIONS):
            _keep_copy(db, path, version)
        for number in range(version, len(_MIGRATIONS)):
            db.executescript(f"BEGIN; {_MIGRATIONS[number]}; PRAGMA user_version={number + 1}; COMMIT;")

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._db.close()
            os.close(self._room)

    def later(self, write: Callable[[], object]) -> None:
        """A write that an answer need not wait for: whatever is lost of these with a killed daemon, recovery finds out."""
        if not self._later:
            asyncio.get_running_loop().call_later(WRITE_BEHIND, self.flush)
        self._later.append(write)

    def flush(self) -> None:
        """Do the late writes now; every question about commands and events comes after this."""
        if self._later:
            writes, self._later = self._later, []
            try:
                with self.transaction():
                    for write in writes:
                        write()
            except StoreFailed as failed:  # what was answered is not forgotten: it is written with the next that can be
                self._later = [*writes[-MAX_LATE:], *self._later]
                log.error("%d records wait for the store: %s", len(writes), failed)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing. Must not contain an `await`."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk may have ended it already
                self._db.execute("ROLLBACK")
            raise

    def _rows(self, query: str, *values: Any) -> list[Any]:
        try:
            return [decoded(row) for row in self._db.execute(query, values)]
        except sqlite3.DatabaseError as error:  # a damaged file shows itself with any row
            raise StoreFailed(error) from error

    def _row(self, query: str, *values: Any) -> Row | None:
        row = self._db.execute(query, values).fetchone()
        return None if row is None else decoded(row)

    def _sandbox(self, query: str, *values: Any) -> SandboxRow | None:
        return cast("SandboxRow | None", self._row(query, *values))

    # Sandboxes

    def add_sandbox(self, row: SandboxRow, aliases: list[str], limit: int) -> None:
        """Reserve a place and the names, and open the journal, in one step: not one more than `limit` at any time."""
        with self.transaction():
            if self.count_live() >= limit:
                raise errors.Exhausted(f"there are {limit} sandboxes already", hint="destroy some, or raise max_count")
            columns = ", ".join(row)
            marks = ", ".join("?" * len(row))
            values = [packed(v) if isinstance(v, dict) else v for v in row.values()]
            try:
                self._db.execute(f"INSERT INTO sandbox({columns}) VALUES({marks})", values)
            except sqlite3.IntegrityError:
                raise errors.AlreadyExists(
                    f"there is a sandbox called {row['name']!r} already",
                    hint="take another name, or remove that one first",
                ) from None
            for alias in aliases:
                self._take_alias(row["owner"], alias, row["id"])
            self._db.execute("INSERT INTO journal VALUES(?, 'creating', ?)", (row["id"], time.time()))

    def _take_alias(self, owner: str, alias: str, sandbox: str) -> None:
        taken = self._row(
            "SELECT s.state FROM alias a JOIN sandbox s ON s.id = a.sandbox_id WHERE a.owner = ? AND a.alias = ?",
            owner,
            alias,
        )
        if taken is not None and taken["state"] != "ended":
            raise errors.AlreadyExists(f"there is a sandbox called {alias!r} already")
        self._db.execute("INSERT OR REPLACE INTO alias VALUES(?, ?, ?)", (owner, alias, sandbox))

    def update_sandbox(self, sandbox: str, **values: Any) -> None:
        names = ", ".join(f"{key} = ?" for key in values)
        plain = [packed(v) if isinstance(v, dict) else v for v in values.values()]
        self._db.execute(f"UPDATE sandbox SET {names} WHERE id = ?", (*plain, sandbox))

    def finish_create(self, sandbox: str, **values: Any) -> None:
        with self.transaction():
            self.update_sandbox(sandbox, **values)
            self._db.execute("DELETE FROM journal WHERE id = ?", (sandbox,))

    def forget_sandbox(self, sandbox: str) -> None:
        """A create that failed leaves no row."""
        self.flush()
        with self.transaction():
            for table, column in (
                ("sandbox", "id"),
                ("alias", "sandbox_id"),
                ("journal", "id"),
                ("command", "sandbox_id"),
            ):
                self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (sandbox,))

    def end_sandbox(self, sandbox: str, kind: str, detail: str, by: str, at: float | None = None) -> None:
        """The last word. Environment values go: they may be secrets and nobody needs them any more."""
        self.flush()
        row = self._row("SELECT spec, record FROM sandbox WHERE id = ?", sandbox)
        if row is None:
            return
        record = {key: row["record"][key] for key in ("limits", "policy") if key in row["record"]}
        spec = {**row["spec"], "env": dict.fromkeys(row["spec"].get("env") or {}, "")}
        now = at or time.time()
        with self.transaction():
            self.update_sandbox(
                sandbox,
                state="ended",
                spec=spec,
                record=record,
                ended_at=now,
                end_kind=kind,
                end_detail=detail,
                end_by=by,
            )
            self._db.execute("DELETE FROM alias WHERE sandbox_id = ?", (sandbox,))
            self._db.execute("DELETE FROM journal WHERE id = ?", (sandbox,))
            self._db.execute(
                "UPDATE command SET status = 'lost', ended_at = ? WHERE sandbox_id = ? AND status = 'running'",
                (now, sandbox),
            )

    def find_sandbox(self, owner: str, ref: str) -> SandboxRow | None:
        """By id, by the name of a living one, or by alias; only what `owner` owns. One question each: in one, every sandbox of
        the owner would be looked at."""
        return (
            self._sandbox("SELECT * FROM sandbox WHERE id = ?2 AND owner = ?1", owner, ref)
            or self._sandbox("SELECT * FROM sandbox WHERE owner = ?1 AND name = ?2 AND state != 'ended'", owner, ref)
            or self._sandbox(
                """SELECT s.* FROM alias a JOIN sandbox s ON s.id = a.sandbox_id AND s.owner = a.owner
                   WHERE a.owner = ?1 AND a.alias = ?2""",
                owner,
                ref,
            )
        )

    def sandbox(self, sandbox: str) -> SandboxRow | None:
        return self._sandbox("SELECT * FROM sandbox WHERE id = ?", sandbox)

    def requested_sandbox(self, owner: str, request: str) -> SandboxRow | None:
        """The sandbox that a create with this request id made, as long as its row is kept: a week beyond its end."""
        return self._sandbox("SELECT * FROM sandbox WHERE owner = ? AND request_id = ?", owner, request)

    def list_sandboxes(self, owner: str, states: tuple[str, ...], name: str | None) -> list[SandboxRow]:
        """Rows whose records hold what is shown of them and no more; parts that are equal are the same object."""
        marks = ", ".join("?" * len(states))
        query = f"SELECT * FROM sandbox WHERE owner = ? AND state IN ({marks})"
        values: list[Any] = [owner, *states]
        if name is not None:
            query, values = query + " AND name = ?", [*values, name]
        found = self._db.execute(query + " ORDER BY created_at, id LIMIT 10000", values)
        seen: dict[bytes, Any] = {}
        return [cast("SandboxRow", decoded({**row, "record": shown(row["record"], seen)})) for row in found]

    def children(self, sandbox: str) -> list[SandboxRow]:
        """Its sub-agents that have not ended."""
        return self._rows("SELECT * FROM sandbox WHERE parent_id = ? AND state != 'ended'", sandbox)

    def living(self) -> list[SandboxRow]:
        """Return the sandboxes of every owner, for the reconciliation at start."""
        return self._rows("SELECT * FROM sandbox WHERE state != 'ended'")

    def count_live(self) -> int:
        (count,) = self._db.execute("SELECT count(*) FROM sandbox WHERE state != 'ended'").fetchone()
        return int(count)

    def count_by_state(self) -> dict[str, int]:
        """How many sandboxes are in each state; those that have ended are not counted."""
        rows = self._db.execute("SELECT state, count(*) FROM sandbox WHERE state != 'ended' GROUP BY state")
        return {str(state): int(count) for state, count in rows}

    def purge(self) -> list[str]:
        """Forget what ended long ago, and of each owner all but the newest that ended; the ids, so that their files can go too."""
        ids = [
            row["id"]
            for row in self._rows(
                """SELECT id FROM (SELECT id, ended_at, row_number() OVER (PARTITION BY owner ORDER BY ended_at DESC) AS age
                   FROM sandbox WHERE state = 'ended') WHERE ended_at < ? OR age > ?""",
                time.time() - KEEP_ENDED,
                MAX_ENDED,
            )
        ]
        for sandbox in ids:
            with self.transaction():
                for table, column in (("command", "sandbox_id"), ("event", "sandbox_id"), ("sandbox", "id")):
                    self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (sandbox,))
        return ids

    def ended(self) -> list[tuple[str, str]]:
        """The owner and id of every sandbox that has ended and is still known, the newest first."""
        found = self._rows("SELECT owner, id FROM sandbox WHERE state = 'ended' ORDER BY ended_at DESC")
        return [(row["owner"], row["id"]) for row in found]

    # Commands

    def add_command(self, sandbox: str, command: str, row: NewCommand) -> None:
        try:
            self._db.execute(
                "INSERT INTO command VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, 'running', NULL)",
                (
                    sandbox,
                    command,
                    packed(row["argv"]),
                    row["language"],
                    int(row["background"]),
                    row["body"],
                    packed(row["spec"]),
                    None,
                    row["started_at"],
                ),
            )
        except sqlite3.IntegrityError:
            raise errors.AlreadyExists(f"there is a command {command!r} already") from None
        self._since_prune += 1
        if self._since_prune > 500:
            self._since_prune = 0
            self._prune_commands(sandbox)

    def _prune_commands(self, sandbox: str) -> None:
        """Finished foreground commands beyond the newest few thousand."""
        self._db.execute(
            """DELETE FROM command WHERE sandbox_id = ?1 AND status != 'running' AND started_at <
               (SELECT started_at FROM command WHERE sandbox_id = ?1 ORDER BY started_at DESC LIMIT 1 OFFSET 5000)""",
            (sandbox,),
        )

    def update_command(self, sandbox: str, command: str, **values: Any) -> None:
        names = ", ".join(f"{key} = ?" for key in values)
        plain = [packed(v) if isinstance(v, dict) else v for v in values.values()]
        self._db.execute(f"UPDATE command SET {names} WHERE sandbox_id = ? AND id = ?", (*plain, sandbox, command))

    def drop_command(self, sandbox: str, command: str) -> None:
        self._db.execute("DELETE FROM command WHERE sandbox_id = ? AND id = ?", (sandbox, command))

    def knows_command(self, sandbox: str, command: str) -> bool:
        """Late writes only change commands that are there already, so this need not wait for them."""
        found = self._db.execute("SELECT 1 FROM command WHERE sandbox_id = ? AND id = ?", (sandbox, command))
        return found.fetchone() is not None

    def command(self, sandbox: str, command: str) -> CommandRow | None:
        self.flush()
        found = self._row("SELECT * FROM command WHERE sandbox_id = ? AND id = ?", sandbox, command)
        return cast("CommandRow | None", found)

    def commands(self, sandbox: str, limit: int = 1000) -> list[CommandRow]:
        self.flush()
        newest = self._rows(
            "SELECT * FROM command WHERE sandbox_id = ? ORDER BY started_at DESC LIMIT ?", sandbox, limit
        )
        return newest[::-1]

    def running_commands(self, sandbox: str) -> list[CommandRow]:
        self.flush()
        return self._rows("SELECT * FROM command WHERE sandbox_id = ? AND status = 'running'", sandbox)

    # Events

    def add_event(self, sandbox: str, owner: str, kind: str, data: Mapping[str, object], at: float) -> int:
        cursor = self._db.execute(
            "INSERT INTO event(sandbox_id, owner, at, kind, data) VALUES(?, ?, ?, ?, ?)",
            (sandbox, owner, at, kind, packed(data)),
        )
        seq = int(cursor.lastrowid or 0)
        if seq % 1000 == 0:
            self._db.execute(
                """DELETE FROM event WHERE sandbox_id = ?1 AND seq <=
                   (SELECT seq FROM event WHERE sandbox_id = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)""",
                (sandbox, MAX_EVENTS),
            )
        return seq

    def events(
        self, owner: str, sandbox: str | None, *, limit: int, after: int | None, kind: str | None = None
    ) -> list[EventRow]:
        """The newest `limit`, oldest first; or with `after` the first `limit` beyond that number."""
        self.flush()
        where, values = "owner = ?", [owner]
        if sandbox is not None:
            where, values = where + " AND sandbox_id = ?", [*values, sandbox]
        if kind is not None:
            where, values = where + " AND kind = ?", [*values, kind]
        if after is not None:
            return self._rows(
                f"SELECT * FROM event WHERE {where} AND seq > ? ORDER BY seq LIMIT ?", *values, after, limit
            )
        return self._rows(f"SELECT * FROM event WHERE {where} ORDER BY seq DESC LIMIT ?", *values, limit)[::-1]

    # Approvals

    def add_approval(self, row: ApprovalRow) -> None:
        values = [packed(v) if isinstance(v, list) else v for v in row.values()]
        marks = ", ".join("?" * len(row))
        self._db.execute(f"INSERT INTO approval({', '.join(row)}) VALUES({marks})", values)

    def approval(self, approval: str) -> ApprovalRow | None:
        return cast("ApprovalRow | None", self._row("SELECT * FROM approval WHERE id = ?", approval))

    def approvals(self, sandbox: str | None, owner: str | None = None) -> list[ApprovalRow]:
        """The undecided ones of a sandbox or an owner, oldest first."""
        where = "status = 'pending'"
        values: list[Any] = []
        for column, value in (("sandbox_id", sandbox), ("owner", owner)):
            if value is not None:
                where, values = f"{where} AND {column} = ?", [*values, value]
        return self._rows(f"SELECT * FROM approval WHERE {where} ORDER BY requested_at LIMIT 10000", *values)

    def move_approval(self, approval: str, before: str, **values: Any) -> bool:
        """Change it if it still has that status; whether it had."""
        names = ", ".join(f"{key} = ?" for key in values)
        cursor = self._db.execute(
            f"UPDATE approval SET {names} WHERE id = ? AND status = ?", (*values.values(), approval, before)
        )
        return cursor.rowcount == 1

    def drop_approvals(self, before: float) -> None:
        self._db.execute("DELETE FROM approval WHERE requested_at < ?", (before,))

    # Small things

    def meta(self, key: str) -> str | None:
        row = self._row("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else str(row["value"])

    def set_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, value))


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
