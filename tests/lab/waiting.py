"""Waits for what must happen, however slow the machine is. Nothing here measures time."""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

PATIENCE = float(os.environ.get("ATOLL_TEST_PATIENCE", "90"))


def until(condition: Callable[[], Any], what: str = "it happens") -> Any:
    """Poll with a generous deadline; the condition's first true value."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.02)
    return value


async def eventually(condition: Callable[[], Any], what: str = "it happens") -> Any:
    """As `until`, while the loop goes on."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never came true: {what}"
        await asyncio.sleep(0.01)
    return value
