"""Timeouts for slow readers over TCP: an answer that nobody takes ends its call, and then its connection.

HTTP/2 sends no more than the reader has made room for, and not even the status of a call that is over, so a reader that
makes none would hold what it asked for as long as its connection lives. The local user's own socket has no such clock, as
in `..pace`: a viewer that is not scrolled is no attack on oneself.
"""

from __future__ import annotations

import asyncio

import grpc

from atoll.errors import Timeout

from . import doors

SMALL = 64 * 1024  # what HTTP/2 lets through without asking the reader
SLOWEST = 64 * 1024  # bytes a second at which a large answer in one message has to be taken


class Reader:
    """The reader of one call's answers."""

    def __init__(self, entrance: doors.Doors, context: grpc.aio.ServicerContext) -> None:
        self._doors = entrance
        self._context = context

    async def take(self, data: bytes) -> None:
        """One message of a stream. The wait for room is inside, where it can be ended."""
        if self._is_local:
            await self._context.write(data)
            return
        try:
            async with asyncio.timeout(doors.STALL_SECONDS):
                await self._context.write(data)
        except TimeoutError:
            self.expect_end()
            raise Timeout(f"nobody took the answer for {doors.STALL_SECONDS:g} s") from None

    def take_last(self, data: bytes) -> bytes:
        """The only message of a call, which gRPC sends when the call is over for us."""
        if len(data) > SMALL and not self._is_local:
            self.expect_end(len(data) / SLOWEST)
        return data

    def expect_end(self, more: float = 0.0) -> None:
        """The call is over: unless the reader takes the rest in time, its connection is over too."""
        address = self._context.peer()
        timer = asyncio.get_running_loop().call_later(doors.STALL_SECONDS + more, self._doors.drop, address)
        self._context.add_done_callback(lambda _: timer.cancel())

    @property
    def _is_local(self) -> bool:
        peer = self._doors.who(self._context.peer())
        return peer is not None and peer.address == "unix"
