"""Ends what nobody uses and what has lived long enough. Busy sandboxes are never idle; deadlines are in the store."""

import asyncio
import logging
import time

from atoll import errors
from atoll.core.sandboxes.state import Live
from atoll.core.sandboxes.verbs import Sandboxes

log = logging.getLogger("atoll.reaper")

AT_MOST = 30.0  # the longest sleep, so that a clock that was set is noticed
RETRY = 10.0


class Reaper:
    """One task for all sandboxes: sleeps until the nearest deadline, or until one has moved."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._task: asyncio.Task[None] | None = None
        self._failed: dict[str, float] = {}

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            self._sandboxes.changed.clear()
            pause = await self.reap()
            try:
                async with asyncio.timeout(pause):
                    await self._sandboxes.changed.wait()
            except TimeoutError:
                pass

    async def reap(self) -> float:
        """End all that is due; how long until the next one is."""
        now, nearest = time.time(), time.time() + AT_MOST
        for live in list(self._sandboxes.live.values()):
            self._sandboxes.flush(live)
            due, kind = _due(live)
            if due > now:
                nearest = min(nearest, due)
                continue
            if self._failed.get(live.id, 0) > now:
                nearest = min(nearest, self._failed[live.id])
                continue
            await self._end(live.id, kind)
        for row in self._sandboxes.store.living():
            if row["state"] == "stopped" and row["expires_at"] is not None and row["expires_at"] <= now:
                await self._end(row["id"], "expired")
            elif row["state"] == "ending" and (row["owner"], row["id"]) not in self._sandboxes.live:
                await self._end(row["id"], row["end_kind"] or "lost")
        return max(0.05, nearest - time.time())

    async def _end(self, sandbox: str, kind: str) -> None:
        try:
            await self._sandboxes.retire(sandbox, kind, "")
            self._failed.pop(sandbox, None)
        except (errors.AtollError, OSError) as error:
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
