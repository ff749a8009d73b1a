"""Work that goes on when its caller goes away: none of it is forgotten, and what fails unexpectedly is logged."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from atoll import errors

log = logging.getLogger("atoll.tasks")

T = TypeVar("T")


class Tasks:
    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def whole(self, work: Awaitable[T]) -> T:
        """Do it to the end even if the caller goes away."""

        async def run() -> T:
            return await work

        return await asyncio.shield(self.spawn(run()))

    async def settle(self, timeout: float) -> None:
        """Wait for what is under way, so long at most."""
        pending = [task for task in self._running if not task.done()]
        if pending:
            await asyncio.wait(pending, timeout=timeout)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, errors.AtollError):
            log.error("%s failed", task.get_coro(), exc_info=error)
