"""Watchers that are polled: changes of a directory, kept until they are asked for."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from atoll import errors
from atoll.core import Core
from atoll.core.access.principals import new_id
from atoll.surfaces.e2b.envd.connect import RpcError

MOST_EVENTS = 10_000
MOST_WATCHERS = 100  # of one sandbox
SETTLE = 0.04  # seconds without a change after which those of calls that have been answered are all here
SETTLE_AT_MOST = 0.5

Event = dict[str, Any]


@dataclass
class Watcher:
    sandbox: str
    events: deque[Event] = field(default_factory=deque)
    lost: bool = False  # more came than are kept
    over: errors.AtollError | None = None
    task: "asyncio.Task[None] | None" = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Watchers:
    """All polled watchers of one door."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._all: dict[str, Watcher] = {}

    async def add(self, sandbox: str, changes: AsyncIterator[Event]) -> str:
        """Return the id of a watcher of these changes, whose first item only says that nothing can be missed any more."""
        living = {live.id for live in self._core.sandboxes.live.values()}
        for gone in [name for name, one in self._all.items() if one.sandbox not in living]:
            self._remove(gone)
        if sum(1 for one in self._all.values() if one.sandbox == sandbox) >= MOST_WATCHERS:
            raise RpcError("resource_exhausted", f"a sandbox has at most {MOST_WATCHERS} watchers")
        watcher = Watcher(sandbox)
        name = new_id()
        self._all[name] = watcher
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watcher.task = asyncio.create_task(_collect(watcher, changes, ready))
        try:
            await ready
        except BaseException:
            self._remove(name)
            raise
        return name

    async def take(self, sandbox: str, name: str) -> list[Event]:
        """Return what has changed since the last time."""
        watcher = self._find(sandbox, name)
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_AT_MOST):
                await _quiet(watcher)
        found = list(watcher.events)
        watcher.events.clear()
        if watcher.lost:
            watcher.lost = False
            raise RpcError("resource_exhausted", "more changed than is kept: some changes were lost")
        if not found and watcher.over is not None:
            raise watcher.over
        return found

    def remove(self, sandbox: str, name: str) -> None:
        self._find(sandbox, name)
        self._remove(name)

    def end(self, sandbox: str) -> None:
        """Forget the watchers of a sandbox."""
        for name in [name for name, one in self._all.items() if one.sandbox == sandbox]:
            self._remove(name)

    def close(self) -> None:
        for name in list(self._all):
            self._remove(name)

    def _find(self, sandbox: str, name: str) -> Watcher:
        found = self._all.get(name)
        if found is None or found.sandbox != sandbox:
            raise RpcError("not_found", f"no watcher {name!r:.80}")
        return found

    def _remove(self, name: str) -> None:
        watcher = self._all.pop(name)
        if watcher.task is not None:
            watcher.task.cancel()


async def _collect(watcher: Watcher, changes: AsyncIterator[Event], ready: "asyncio.Future[None]") -> None:
    try:
        async for event in changes:
            if not ready.done():
                ready.set_result(None)
            elif len(watcher.events) >= MOST_EVENTS:
                watcher.lost = True
            else:
                watcher.events.append(event)
            watcher.news.set()
        watcher.over = RpcError("not_found", "the watched directory is gone")
    except errors.AtollError as error:
        watcher.over = error
        if not ready.done():
            ready.set_exception(error)
    finally:
        if not ready.done():
            ready.cancel()
        await changes.aclose()  # type: ignore[attr-defined]  # only generators come here


async def _quiet(watcher: Watcher) -> None:
    """Wait until nothing new has come for a moment."""
    while True:
        watcher.news.clear()
        try:
            async with asyncio.timeout(SETTLE):
                await watcher.news.wait()
        except TimeoutError:
            return
