"""How a living sandbox is kept, stops and ends. `Sandboxes` has the verbs; this is what they and the clock rest on.

A state is written before the effect it names, so that whatever moment the daemon dies in, the next one knows what to
finish (`recovery.py`). An ending does not wait for that: what the store cannot take now is written later (`unwritten.py`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from atoll import accounts, errors
from atoll.backends.contract import Backend, Box, Ended, Record
from atoll.core.commands.history import History
from atoll.core.sandboxes.state import Live, gone
from atoll.core.store.database import StoreFailed
from atoll.core.store.records import Store
from atoll.core.store.space import Space
from atoll.core.store.typed import SandboxChange, SandboxRecord, SandboxRow
from atoll.core.store.unwritten import Unwritten
from atoll.core.tasks import Tasks

log = logging.getLogger("atoll.sandboxes")

NEVER_MS = 10 * 365 * 86400 * 1000
REMOVE_AGAIN = (1.0, 10.0, 60.0)  # seconds; after that it is the next daemon's sweep that finds it


class Lifecycle:
    """`live` holds the sandboxes with a box, by owner and id."""

    def __init__(self, store: Store, backend: Backend, history: History) -> None:
        self.store = store
        self.backend = backend
        self.history = history
        self.live: dict[tuple[str, str], Live] = {}
        self.changed = asyncio.Event()  # for the reaper: some deadline may have moved
        self.space: Space  # made by `Sandboxes`, which knows the settings
        self.forget_outputs: Callable[[str], None] = lambda sandbox: None
        self.tasks = Tasks()
        self.keep_s, self.keep_bytes = 0.0, 0  # for sandboxes that are kept while nobody uses them
        self.accounts = accounts.Accounts()
        self.unwritten = Unwritten()

    # Alive

    def adopt(self, row: SandboxRow, box: Box) -> Live:
        """Take over a box made by a daemon before us."""
        live = Live(row, box)
        self.enter(live)
        return live

    def enter(self, live: Live) -> None:
        """It is alive: known by its id, watched, and beside its parent or sub-agents."""
        self.live[live.owner, live.id] = live
        for other in self.live.values():
            if other.id == live.parent_id:
                live.parent = other
                other.children.add(live)
            elif other.parent_id == live.id:
                other.parent = live
                live.children.add(other)
        live.watcher = self.tasks.spawn(self._watch(live))
        self.changed.set()

    def flush(self, live: Live) -> None:
        """Write down when it was last used."""
        if live.last_active > live.stored_active:
            live.stored_active = live.last_active
            self.store.update_sandbox(live.id, last_active=live.last_active)

    def set_state(self, live: Live, state: str, **values: Any) -> None:
        self.store.update_sandbox(live.id, state=state, **values)
        live.state = state
        self.changed.set()

    # Ending

    def row(self, sandbox: str) -> SandboxRow | None:
        """The record of a sandbox as it is; where the store cannot be read, what the living sandbox itself tells."""
        try:
            row = self.store.sandbox(sandbox)
        except StoreFailed:
            row = next((live.row() for live in self.live.values() if live.id == sandbox), None)
            if row is None:
                raise
        return None if row is None else {**row, **self.unwritten.of(sandbox)}

    def _enter_state(self, live: Live, state: str, **values: Any) -> None:
        """As `set_state`, for a state on the way to an end."""
        self.unwritten.write(
            live.id, lambda: self.store.update_sandbox(live.id, state=state, **values), state=state, **values
        )
        live.state = state
        self.changed.set()

    async def end(self, sandbox: str, kind: str, detail: str, by: str) -> None:
        """Destroy a sandbox in any state and record why. Idempotent; what fails stays `ending` and is tried again."""
        row = self.row(sandbox)
        if row is None or row["state"] == "ended":
            return
        live = self.live.get((row["owner"], sandbox))
        if live is None:
            await self._end_children(sandbox, by)
            await self._bury(row, kind, detail, by)
            return
        async with live.changing:
            if live.state == "ended":
                return
            live.ending = live.ending or (kind, detail, by)
            self._enter_state(live, "ending", end_kind=live.ending[0], end_detail=live.ending[1], end_by=live.ending[2])
            await live.client.close(gone(sandbox, *live.ending))
            await self._end_children(sandbox, by)
            await live.box.kill()
            await self._over(row, *live.ending)
            live.state = "ended"
            self._forget(live)
            self.tasks.spawn(self._remove(live.box.record))

    async def rest(self, live: Live, kind: str, detail: str, by: str) -> None:
        """End its processes and keep its disk. Where disks are not kept, time and faults end it, and nobody can stop it."""
        if not live.box.capabilities.keeps_disk:
            if kind == "stopped":
                live.box.capabilities.check(live.box.facts.runtime, kept=True)
            return await self.end(live.id, kind, detail, by)
        async with live.changing:
            if live.state in ("ended", "ending", "stopped"):
                return
            live.ending = live.ending or (kind, detail, by)
            row = self.row(live.id)
            assert row is not None
            kept: SandboxRecord = await self._kept(live) if live.spec.keep else {}
            self._enter_state(live, "stopping", end_kind=kind, end_detail=detail, end_by=by)
            await live.client.close(gone(live.id, kind, detail, by))
            await self._end_children(live.id, by)
            await self.backend.destroy(live.box.record, keep_disk=True)
            live.state = "stopped"
            now = time.time()
            values: SandboxChange = {"state": "stopped", "last_active": now}
            if live.spec.keep:
                values["expires_at"] = now + self.keep_s if self.keep_s else None
            elif kind == "expired":
                values["expires_at"] = None

            def stopped() -> None:
                before = self.store.sandbox(live.id)
                record = {**(before["record"] if before is not None else {}), "box": live.box.record, **kept}
                self.store.update_sandbox(live.id, record=record, **values)
                self.history.record(live.id, live.owner, "stopped", reason=kind, detail=detail, by=by)

            self.unwritten.write(live.id, stopped, **values)
            self._forget(live)
        if live.spec.keep:
            with suppress(StoreFailed):
                await self._keep_budget(live.owner)

    async def _kept(self, live: Live) -> SandboxRecord:
        """Return what is noted of a sandbox whose disk is kept: its size, and what is left of its lifetime."""
        try:
            size = (await live.box.usage()).disk_bytes or 0
        except (errors.AtollError, OSError):
            size = 0
        left = None if live.expires_at is None else max(1.0, live.expires_at - time.time())
        return {"kept_bytes": size, "left_s": left}

    async def _keep_budget(self, owner: str) -> None:
        """End the owner's oldest kept sandboxes until their disks fit into the budget."""
        rows = [
            row
            for row in self.store.living()
            if row["owner"] == owner and row["state"] == "stopped" and row["spec"].get("keep")
        ]
        rows.sort(key=lambda row: float(row["last_active"]))
        total = sum(int(row["record"].get("kept_bytes") or 0) for row in rows)
        for row in rows:
            if not self.keep_bytes or total <= self.keep_bytes:
                return
            total -= int(row["record"].get("kept_bytes") or 0)
            await self.end(row["id"], "evicted", "kept disks were over the owner's budget", "atoll")

    async def retire(self, sandbox: str, kind: str, detail: str) -> None:
        """The end that time or a fault brings: a persistent sandbox keeps its disk, and so does one that ran out of memory, until
        its lifetime is over. Any other is destroyed."""
        row = self.row(sandbox)
        if row is None or row["state"] == "ended" or (row["state"] == "stopped" and kind != "expired"):
            return
        live = self.live.get((row["owner"], sandbox))
        if live is not None and kind == "expired" and live.state == "running" and live.spec.at_expiry != "destroy":
            await self._outlive(live, detail)
        elif live is not None and (live.spec.persistent or kind == "oom") and kind != "expired":
            await self.rest(live, kind, detail, "atoll")
        else:
            await self.end(sandbox, kind, detail, "atoll")

    async def _outlive(self, live: Live, detail: str) -> None:
        """Pause or stop a sandbox whose lifetime is over and which asked for that. It has no end any more."""
        if live.spec.at_expiry == "pause":
            try:
                await live.client.request("configure", deadline_ms=NEVER_MS)
                return await self.freeze(live, "atoll")
            except errors.Unsupported as error:
                log.warning("sandbox %s is stopped because it cannot be paused: %s", live.id, error)
        await self.rest(live, "expired", detail, "atoll")

    async def freeze(self, live: Live, by: str) -> None:
        """Freeze everything in it; memory stays. One that is to be paused at its end has none while it is frozen."""
        async with live.changing:
            if live.state == "paused":
                return
            if live.state != "running":
                raise errors.FailedPrecondition(f"the sandbox is {live.state}, not running")
            ends = live.expires_at
            self._set_end(live, "paused", None if live.spec.at_expiry == "pause" else ends)
            try:
                await self.tasks.whole(live.box.freeze())
            except errors.Unsupported:
                self._set_end(live, "running", ends)
                raise
            self.history.record(live.id, live.owner, "paused", by=by)

    def _set_end(self, live: Live, state: str, ends: float | None) -> None:
        self.set_state(live, state, expires_at=ends)
        live.expires_at = ends

    async def leave(self, row: SandboxRow, box: Record | None) -> None:
        """Put a stopped sandbox that was only visited back to rest."""
        live = self.live.pop((row["owner"], row["id"]), None)
        if live is not None:
            live.ending = ("stopped", "", "atoll")
            await self._cut(live)
        await self.backend.destroy(box or {"id": row["id"]}, keep_disk=box is not None)
        record = {**row["record"], "box": box} if box is not None else row["record"]
        self.store.update_sandbox(row["id"], state="stopped", record=record)

    async def undo(self, sandbox: str, error: BaseException) -> None:
        """A create that failed: nothing may be left, not even when this too is interrupted."""
        live = next((live for (_, name), live in self.live.items() if name == sandbox), None)
        if live is not None:
            live.state = "ended"
            self.live.pop((live.owner, sandbox), None)
            await self._cut(live)
        log.warning("creating %s failed: %s: %s", sandbox, type(error).__name__, error)
        try:
            await self.backend.destroy({"id": sandbox})
        except Exception:
            log.exception("what creating %s left could not be removed; it is tried again later", sandbox)
            with suppress(StoreFailed):
                self.store.update_sandbox(sandbox, state="ending", end_kind="failed", end_detail="", end_by="atoll")
            return
        self.accounts.end(accounts.sandbox(sandbox))
        self.store.forget_sandbox(sandbox)
        self.history.forget(sandbox)

    async def _bury(self, row: SandboxRow, kind: str, detail: str, by: str) -> None:
        """The end of one of which nobody knows what is left."""
        if row["state"] != "ending":
            ending = {"state": "ending", "end_kind": kind, "end_detail": detail, "end_by": by}
            self.unwritten.write(row["id"], lambda: self.store.update_sandbox(row["id"], **ending), **ending)
        await self.backend.destroy(row["record"].get("box") or {"id": row["id"]})
        await self._over(row, kind, detail, by)

    async def _over(self, row: SandboxRow, kind: str, detail: str, by: str) -> None:
        """No process and no link is left: it is said to have ended."""
        sandbox, now = row["id"], time.time()

        def ended() -> None:
            self.store.end_sandbox(sandbox, kind, detail, by, now)
            self.history.record(sandbox, row["owner"], "ended", reason=kind, detail=detail, by=by)

        self.forget_outputs(sandbox)
        self.space.forget(sandbox)
        self.accounts.end(accounts.sandbox(sandbox))
        said = {"state": "ended", "end_kind": kind, "end_detail": detail, "end_by": by, "ended_at": now}
        self.unwritten.write(sandbox, ended, **said)
        self.changed.set()

    async def _remove(self, record: Record) -> None:
        """Take away what a dead sandbox occupied: mounts, groups, disk. Nobody has to wait for that."""
        for pause in (*REMOVE_AGAIN, None):
            try:
                return await self.backend.destroy(record)
            except (errors.AtollError, OSError) as error:
                log.error("what sandbox %s occupied could not be removed: %s", record["id"], error)
            if pause is not None:
                await asyncio.sleep(pause)

    async def _end_children(self, sandbox: str, by: str) -> None:
        """Sub-agents do not outlive the sandbox whose workspace they share."""
        try:
            children = [child["id"] for child in self.store.children(sandbox)]
        except StoreFailed:
            children = [live.id for live in self.live.values() if live.parent_id == sandbox]
        for child in children:
            await self.end(child, "destroyed", "its parent ended", by)

    def _forget(self, live: Live) -> None:
        self.live.pop((live.owner, live.id), None)
        if live.parent is not None:
            live.parent.children.discard(live)
        if live.watcher is not None and live.watcher is not asyncio.current_task():
            live.watcher.cancel()

    async def _cut(self, live: Live) -> None:
        await live.client.close()
        if live.watcher is not None:
            live.watcher.cancel()

    async def _watch(self, live: Live) -> None:
        """Wait for a box to end by itself, and record why."""
        ended = await live.box.wait()
        if live.state in ("ended", "ending", "stopping", "stopped") or live.ending is not None:
            return
        kind = _reason(live, ended)
        log.info("sandbox %s ended by itself: %s %s", live.id, kind, ended.detail)
        await live.client.close(gone(live.id, kind, ended.detail, "atoll"))
        await self.retire(live.id, kind, ended.detail)


def _reason(live: Live, ended: Ended) -> str:
    if ended.kind == "oom":
        return "oom"
    if live.expires_at is not None and time.time() >= live.expires_at:
        return "expired"
    return "lost" if ended.kind in ("lost", "unknown") else "crashed"
