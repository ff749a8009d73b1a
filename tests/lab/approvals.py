"""Work that a rule holds, and the approval it waits for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from atoll.core import Core
from atoll.model import ApprovalInfo
from lab.principals import BOSS


@contextlib.asynccontextmanager
async def held(core: Core, work: Coroutine[Any, Any, Any]) -> AsyncIterator[tuple[ApprovalInfo, "asyncio.Task[Any]"]]:
    """The approval that the work waits for; what runs without one fails here."""
    task = asyncio.ensure_future(work)
    try:
        async with asyncio.timeout(60):
            while not (waiting := await core.approvals.pending(BOSS)):
                assert not task.done(), f"nobody was asked: {task.exception() or task.result()}"
                await asyncio.sleep(0.01)
        yield waiting[0], task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
