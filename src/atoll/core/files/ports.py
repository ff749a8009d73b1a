"""A TCP port inside a sandbox, reached through its agent. The host never dials an address the guest names."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atoll import errors
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.guest import ConnectionLost, wire
from atoll.guest.connection import Bytes, Stream


class Tunnel:
    """Bytes both ways. Iterate to receive; the end of iteration is the far side's half close or close."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def send(self, data: Bytes) -> None:
        """BrokenPipeError when the connection is over."""
        try:
            await self._stream.send(data)
        except ConnectionLost:
            raise BrokenPipeError("the channel to the sandbox was lost") from None

    def send_eof(self) -> None:
        self._stream.send_eof()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for item in self._stream:
                if item.kind == wire.DATA:
                    yield item.data
                elif item.kind == wire.EOF:
                    return
        except (ConnectionLost, errors.AtollError):
            return


class Ports(Part):
    """Forwarding to ports inside."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    @verb("ports.connect")
    @asynccontextmanager
    async def connect(self, who: Principal, ref: str, port: int, host: str = "127.0.0.1") -> AsyncIterator[Tunnel]:
        """A connection to a port inside; FailedPrecondition when nothing listens there."""
        if not 1 <= port <= 65535:
            raise errors.InvalidArgument("a port is a number from 1 to 65535")
        live = self._sandboxes.reach(who, ref)
        with live.use() as client:
            where = None if host == "127.0.0.1" else host  # unsaid it is either loopback address
            stream = await client.open("forward", (wire.STDOUT,), port=port, host=where)
            try:
                async for item in stream:
                    if item.kind == wire.EVENT:
                        break
                yield Tunnel(stream)
            except ConnectionLost as lost:
                raise client.over or errors.Unavailable(str(lost)) from None
            finally:
                stream.cancel()
