"""Sandboxes with a kernel of their own sleep while nothing runs in them (`sandboxes.doze_after_s`).

gVisor's kernel wakes every few milliseconds also when all its tasks wait: two to three per cent of a core for each idle
sandbox. One that nobody uses and in which no program runs is frozen; whatever is next asked of its agent wakes it first.
Nobody can tell, since nothing inside could have noticed the time. A daemon that leaves freezes those in which nothing runs, and the
next one wakes all it adopts. One whose lifetime ends meanwhile is ended then.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from atoll import errors
from atoll.backends.contract import Box
from atoll.core.sandboxes.state import FIRST_LOOK_PAUSE, Live

log = logging.getLogger("atoll.doze")

LOOK = 10.0  # how often sandboxes are looked at
LEAVE = 5.0  # so long a daemon that stops waits for an agent's answer
MOST_PAUSE = 60.0  # between two looks at a sandbox whose programs go on by themselves


async def rouse(box: Box) -> None:
    """Wake one of whom nobody knows whether it sleeps: a spare, or one that a daemon before us left."""
    if box.capabilities.freezes_idle:
        with suppress(errors.Unsupported):
            await box.thaw()


class Doze:
    """One task for all sandboxes."""

    def __init__(self, sandboxes: Callable[[], Iterable[Live]], after: float) -> None:
        self._sandboxes = sandboxes
        self._after = after
        self._task: asyncio.Task[None] | None = None
        self._able = after > 0  # and until a freeze shows that this host cannot

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Freeze every sandbox in which nothing runs: until the next daemon comes nobody can use it. One that does not answer in
        time stays awake."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        if self._able:
            idle = [live for live in self._sandboxes() if self._can_sleep(live)]
            await asyncio.gather(*(self._leave(live) for live in idle))

    async def _leave(self, live: Live) -> None:
        try:
            async with asyncio.timeout(LEAVE):
                await self._lay_down(live)
        except (errors.AtollError, OSError, TimeoutError) as error:
            log.warning("sandbox %s stays awake: %s", live.id, error or "its agent did not answer in time")

    async def _run(self) -> None:
        while self._able:
            await asyncio.sleep(min(LOOK, self._after))
            for live in list(self._sandboxes()):
                if self._is_due(live):
                    try:
                        await self._lay_down(live)
                    except errors.Unsupported:
                        self._able = False
                    except (errors.AtollError, OSError) as error:
                        log.warning("sandbox %s does not sleep: %s", live.id, error)

    def _can_sleep(self, live: Live) -> bool:
        awake = live.state == "running" and live.client.before is None
        return awake and not live.busy and live.box.capabilities.freezes_idle

    def _is_due(self, live: Live) -> bool:
        now = time.time()
        quiet = now - live.last_active >= self._after and now >= live.look_again
        return quiet and self._can_sleep(live)

    async def _lay_down(self, live: Live) -> None:
        asked = live.client.opened
        usage = await live.client.request("usage")
        if usage.get("procs") != 0:
            live.look_again = time.time() + live.look_pause
            live.look_pause = min(2 * live.look_pause, MOST_PAUSE)
            return
        live.look_pause = FIRST_LOOK_PAUSE
        if live.client.opened != asked + 1 or live.busy or live.state != "running":
            return  # somebody came meanwhile
        lock = asyncio.Lock()

        async def wake() -> None:
            async with lock:
                if live.client.before is wake:
                    await live.box.thaw()
                    live.client.before = None

        async with lock:
            live.client.before = wake
            try:
                await live.box.freeze()
            except BaseException:
                with suppress(errors.AtollError, OSError):
                    await live.box.thaw()
                live.client.before = None
                raise
