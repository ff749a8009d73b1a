"""The daemon's durable state: sandboxes, their commands and events, approvals. Every statement of it is here, once.

A `Database` carries the statements out: `sqlite.py` on one machine, `postgres.py` where several gateways share the
records. Both understand what is written here, with `?` for a value.

Calls are synchronous: each is one short statement. Every lookup of something that belongs to somebody takes the owner in
the query itself. What a database refuses is a `StoreFailed`; whoever ends something goes on after that.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

from atoll import errors
from atoll.core.store.columns import Row, decoded, packed, shown
from atoll.core.store.database import Database, StoreFailed, Taken
from atoll.core.store.typed import ApprovalRow, CommandRow, EventRow, NewCommand, SandboxRow

log = logging.getLogger("atoll.store")

LIVE = ("creating", "running", "paused", "stopping", "stopped", "ending")
MAX_EVENTS = 10_000
WRITE_BEHIND = 0.02
MAX_LATE = 20_000  # late writes that wait for a store that cannot be written
KEEP_ENDED = 7 * 86400.0
MAX_ENDED = 2000  # sandboxes of one owner that have ended and are still known; the oldest beyond go


class Store:
    """The daemon's memory. Rows come out as plain dicts with `spec`, `record`, `exit` and `data` decoded."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._since_prune = 0
        self._later: list[Callable[[], object]] = []

    @property
    def low(self) -> bool:
        """Return whether only the room that is kept for endings is left."""
        return self._db.low

    def top_up(self) -> bool:
        """Keep room for what has to be written when the disk is full; False when there is none to be had."""
        return self._db.top_up()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._db.close()

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

    def transaction(self) -> AbstractContextManager[None]:
        """All or nothing, and nobody else's transaction meanwhile. Must not contain an `await`."""
        return self._db.transaction()

    def _rows(self, query: str, *values: Any) -> list[Any]:
        return [decoded(row) for row in self._db.rows(query, *values)]

    def _row(self, query: str, *values: Any) -> Row | None:
        row = self._db.row(query, *values)
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
                self._db.change(f"INSERT INTO sandbox({columns}) VALUES({marks})", *values)
            except Taken:
                raise errors.AlreadyExists(
                    f"there is a sandbox called {row['name']!r} already",
                    hint="take another name, or remove that one first",
                ) from None
            for alias in aliases:
                self._take_alias(row["owner"], alias, row["id"])
            self._db.change("INSERT INTO journal VALUES(?, 'creating', ?)", row["id"], time.time())

    def _take_alias(self, owner: str, alias: str, sandbox: str) -> None:
        taken = self._row(
            "SELECT s.state FROM alias a JOIN sandbox s ON s.id = a.sandbox_id WHERE a.owner = ? AND a.alias = ?",
            owner,
            alias,
        )
        if taken is not None and taken["state"] != "ended":
            raise errors.AlreadyExists(f"there is a sandbox called {alias!r} already")
        self._db.change(
            """INSERT INTO alias(owner, alias, sandbox_id) VALUES(?, ?, ?)
               ON CONFLICT(owner, alias) DO UPDATE SET sandbox_id = excluded.sandbox_id""",
            owner,
            alias,
            sandbox,
        )

    def update_sandbox(self, sandbox: str, **values: Any) -> None:
        names = ", ".join(f"{key} = ?" for key in values)
        plain = [packed(v) if isinstance(v, dict) else v for v in values.values()]
        self._db.change(f"UPDATE sandbox SET {names} WHERE id = ?", *plain, sandbox)

    def finish_create(self, sandbox: str, **values: Any) -> None:
        with self.transaction():
            self.update_sandbox(sandbox, **values)
            self._db.change("DELETE FROM journal WHERE id = ?", sandbox)

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
                self._db.change(f"DELETE FROM {table} WHERE {column} = ?", sandbox)

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
            self._db.change("DELETE FROM alias WHERE sandbox_id = ?", sandbox)
            self._db.change("DELETE FROM journal WHERE id = ?", sandbox)
            self._db.change(
                "UPDATE command SET status = 'lost', ended_at = ? WHERE sandbox_id = ? AND status = 'running'",
                now,
                sandbox,
            )

    def find_sandbox(self, owner: str, ref: str) -> SandboxRow | None:
        """By id, by the name of a living one, or by alias; only what `owner` owns. One question each: in one, every sandbox of
        the owner would be looked at."""
        return (
            self._sandbox("SELECT * FROM sandbox WHERE id = ? AND owner = ?", ref, owner)
            or self._sandbox("SELECT * FROM sandbox WHERE owner = ? AND name = ? AND state != 'ended'", owner, ref)
            or self._sandbox(
                """SELECT s.* FROM alias a JOIN sandbox s ON s.id = a.sandbox_id AND s.owner = a.owner
                   WHERE a.owner = ? AND a.alias = ?""",
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
        found = self._db.rows(query + " ORDER BY created_at, id LIMIT 10000", *values)
        seen: dict[bytes, Any] = {}
        return [cast("SandboxRow", decoded({**row, "record": shown(row["record"], seen)})) for row in found]

    def children(self, sandbox: str) -> list[SandboxRow]:
        """Its sub-agents that have not ended."""
        return self._rows("SELECT * FROM sandbox WHERE parent_id = ? AND state != 'ended'", sandbox)

    def living(self) -> list[SandboxRow]:
        """Return the sandboxes of every owner, for the reconciliation at start."""
        return self._rows("SELECT * FROM sandbox WHERE state != 'ended'")

    def count_live(self) -> int:
        found = self._db.row("SELECT count(*) AS count FROM sandbox WHERE state != 'ended'")
        return 0 if found is None else int(found["count"])

    def count_by_state(self) -> dict[str, int]:
        """How many sandboxes are in each state; those that have ended are not counted."""
        rows = self._db.rows("SELECT state, count(*) AS count FROM sandbox WHERE state != 'ended' GROUP BY state")
        return {str(row["state"]): int(row["count"]) for row in rows}

    def purge(self) -> list[str]:
        """Forget what ended long ago, and of each owner all but the newest that ended; the ids, so that their files can go too."""
        ids = [
            row["id"]
            for row in self._rows(
                """SELECT id FROM (SELECT id, ended_at, row_number() OVER (PARTITION BY owner ORDER BY ended_at DESC) AS age
                   FROM sandbox WHERE state = 'ended') AS aged WHERE ended_at < ? OR age > ?""",
                time.time() - KEEP_ENDED,
                MAX_ENDED,
            )
        ]
        for sandbox in ids:
            with self.transaction():
                for table, column in (("command", "sandbox_id"), ("event", "sandbox_id"), ("sandbox", "id")):
                    self._db.change(f"DELETE FROM {table} WHERE {column} = ?", sandbox)
        return ids

    def ended(self) -> list[tuple[str, str]]:
        """The owner and id of every sandbox that has ended and is still known, the newest first."""
        found = self._rows("SELECT owner, id FROM sandbox WHERE state = 'ended' ORDER BY ended_at DESC")
        return [(row["owner"], row["id"]) for row in found]

    # Commands

    def add_command(self, sandbox: str, command: str, row: NewCommand) -> None:
        try:
            self._db.change(
                "INSERT INTO command VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, 'running', NULL)",
                sandbox,
                command,
                packed(row["argv"]),
                row["language"],
                int(row["background"]),
                row["body"],
                packed(row["spec"]),
                None,
                row["started_at"],
            )
        except Taken:
            raise errors.AlreadyExists(f"there is a command {command!r} already") from None
        self._since_prune += 1
        if self._since_prune > 500:
            self._since_prune = 0
            self._prune_commands(sandbox)

    def _prune_commands(self, sandbox: str) -> None:
        """Finished foreground commands beyond the newest few thousand."""
        self._db.change(
            """DELETE FROM command WHERE sandbox_id = ? AND status != 'running' AND started_at <
               (SELECT started_at FROM command WHERE sandbox_id = ? ORDER BY started_at DESC LIMIT 1 OFFSET 5000)""",
            sandbox,
            sandbox,
        )

    def update_command(self, sandbox: str, command: str, **values: Any) -> None:
        names = ", ".join(f"{key} = ?" for key in values)
        plain = [packed(v) if isinstance(v, dict) else v for v in values.values()]
        self._db.change(f"UPDATE command SET {names} WHERE sandbox_id = ? AND id = ?", *plain, sandbox, command)

    def drop_command(self, sandbox: str, command: str) -> None:
        self._db.change("DELETE FROM command WHERE sandbox_id = ? AND id = ?", sandbox, command)

    def knows_command(self, sandbox: str, command: str) -> bool:
        """Late writes only change commands that are there already, so this need not wait for them."""
        return self._db.row("SELECT 1 FROM command WHERE sandbox_id = ? AND id = ?", sandbox, command) is not None

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
        seq = self._db.number(
            "INSERT INTO event(sandbox_id, owner, at, kind, data) VALUES(?, ?, ?, ?, ?) RETURNING seq",
            sandbox,
            owner,
            at,
            kind,
            packed(data),
        )
        if seq % 1000 == 0:
            self._db.change(
                """DELETE FROM event WHERE sandbox_id = ? AND seq <=
                   (SELECT seq FROM event WHERE sandbox_id = ? ORDER BY seq DESC LIMIT 1 OFFSET ?)""",
                sandbox,
                sandbox,
                MAX_EVENTS,
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
        self._db.change(f"INSERT INTO approval({', '.join(row)}) VALUES({marks})", *values)

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
        query = f"UPDATE approval SET {names} WHERE id = ? AND status = ?"
        return self._db.change(query, *values.values(), approval, before) == 1

    def drop_approvals(self, before: float) -> None:
        self._db.change("DELETE FROM approval WHERE requested_at < ?", before)

    # Small things

    def meta(self, key: str) -> str | None:
        row = self._row("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else str(row["value"])

    def set_meta(self, key: str, value: str) -> None:
        self._db.change(
            "INSERT INTO meta(key, value) VALUES(?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value",
            key,
            value,
        )
