"""Leftovers of a command that has ended: processes that still hold its output, and what they print."""

import asyncio
import time
from typing import NamedTuple

from atoll import errors
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.model import ExecResult

LOOK_S = 0.05
PIECE = 512 * 1024


class Leftover(NamedTuple):
    """`held`: something still holds the output. The rest is what came since the command's end, of each stream."""

    held: bool
    stdout: bytes = b""
    stderr: bytes = b""


class Leftovers(Part):
    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    @verb("commands.leftover")
    async def wait(self, who: Principal, ref: str, done: ExecResult, seconds: float) -> Leftover:
        """Wait until nothing holds the command's output any more, at most so long; return what was printed meanwhile."""
        until = time.monotonic() + seconds
        with self._sandboxes.reach(who, ref).use() as client:
            try:
                held = (await client.request("poll", id=done.command_id)).get("held") is True
                if not held:
                    return Leftover(False)
                while held and time.monotonic() < until:
                    await asyncio.sleep(LOOK_S)
                    held = (await client.request("poll", id=done.command_id)).get("held") is True
                found = []
                for channel, start in ((1, done.stdout_bytes), (2, done.stderr_bytes)):
                    rest = await client.request("output", id=done.command_id, ch=channel, offset=start, max=PIECE)
                    data = rest.get("data")
                    found.append(data if isinstance(data, bytes) else b"")
            except errors.NotFound:  # a program that was never started has no record
                return Leftover(False)
        return Leftover(held, *found)
