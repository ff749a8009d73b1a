"""Ends what nobody uses and what has lived long enough. Busy sandboxes are never idle; deadlines are in the store.

It also writes what could not be written before, and keeps the store's room. Nothing that fails here ends it: without a store it
goes by the deadlines of the living sandboxes it knows.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from atoll.core.sandboxes.state import Live
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.database import StoreFailed
from atoll.core.store.typed import SandboxRow

log = logging.getLogger("atoll.reaper")

AT_MOST = 30.0  # the longest sleep, so that a clock that was set is noticed
RETRY = 10.0
PURGE = 300.0  # seconds between two looks at what ended sandboxes left behind
SETTLE_AGAIN = 2.0  # seconds between two tries to write what waits for room


class Reaper:
    """One task for all sandboxes: sleeps until the nearest deadline, or until one has moved."""

    def __init__(self, sandboxes: Sandboxes, settle: Callable[[], None] = lambda: None) -> None:
        self._sandboxes = sandboxes
        self._settle = settle  # writes what else waits for room
        self._task: asyncio.Task[None] | None = None
        self._failed: dict[str, float] = {}
        self._purged = time.monotonic()  # recovery has just done it

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            self._sandboxes.changed.clear()
            try:
                pause = await self.reap()
            except Exception:
                log.exception("the deadlines could not be looked at; again in %.0f s", RETRY)
                pause = RETRY
            try:
                async with asyncio.timeout(pause):
                    await self._sandboxes.changed.wait()
            except TimeoutError:
                pass

    async def reap(self) -> float:
        """End all that is due; how long until the next one is."""
        now, nearest = time.time(), time.time() + AT_MOST
        for live in list(self._sandboxes.live.values()):
            with suppress(StoreFailed):
                self._sandboxes.flush(live)
            due, kind = _due(live)
            if due > now:
                nearest = min(nearest, due)
                continue
            if self._failed.get(live.id, 0) > now:
                nearest = min(nearest, self._failed[live.id])
                continue
            await self._end(live.id, kind)
        for row in self._resting():
            if row["state"] == "stopped" and row["expires_at"] is not None and row["expires_at"] <= now:
                await self._end(row["id"], "expired")
            elif row["state"] == "ending" and (row["owner"], row["id"]) not in self._sandboxes.live:
                await self._end(row["id"], row["end_kind"] or "lost")
        if time.monotonic() - self._purged > PURGE:
            self._purged = time.monotonic()
            with suppress(StoreFailed):
                self._sandboxes.history.purge()
        if not self._write_late():
            nearest = min(nearest, time.time() + SETTLE_AGAIN)
        return max(0.05, nearest - time.time())

    def _resting(self) -> list[SandboxRow]:
        try:
            return [row for row in self._sandboxes.store.living() if not self._sandboxes.unwritten.of(row["id"])]
        except StoreFailed as failed:
            log.error("the store cannot be read, so stopped sandboxes stay: %s", failed)
            return []

    def _write_late(self) -> bool:
        """Write what waits for room; False when some of it still does."""
        store, unwritten = self._sandboxes.store, self._sandboxes.unwritten
        store.flush()
        unwritten.settle()
        self._settle()
        return store.top_up() and not unwritten.ids()

    async def _end(self, sandbox: str, kind: str) -> None:
        try:
            await self._sandboxes.retire(sandbox, kind, "")
            self._failed.pop(sandbox, None)
        except Exception as error:
            self._failed[sandbox] = time.time() + RETRY
            log.error("sandbox %s should have ended (%s) and did not: %s", sandbox, kind, error)


def _due(live: Live) -> tuple[float, str]:
    """When it has to end, and why."""
    ends: list[tuple[float, str]] = [(float("inf"), "")]
    if live.expires_at is not None:
        ends.append((live.expires_at, "expired"))
    if live.idle_timeout is not None and live.state == "running":
        since = time.time() if live.busy else live.last_active  # what is busy now can be idle that much later at best
        ends.append((since + live.idle_timeout, "idle"))
    return min(ends)
