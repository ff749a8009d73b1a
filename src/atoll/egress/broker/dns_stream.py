"""DNS over TCP: one connection of a sandbox to the resolver, a few questions long, in the sandbox's lane."""

import asyncio
import logging
import socket
import struct
from collections.abc import Coroutine
from typing import Any, Final

from atoll.egress.broker.resolver import Resolver
from atoll.egress.broker.sandbox import Member
from atoll.egress.parse.dns import MAX_MESSAGE

_MAX_QUERIES: Final = 32
_MAX_READS: Final = 256
_SECONDS: Final = 30.0
_log = logging.getLogger(__name__)


class DnsStream:
    """Answers one question after the other. A stream that is slow, cut into bits or too long is closed."""

    def __init__(self, member: Member, client: socket.socket, resolver: Resolver) -> None:
        self._member, self._client, self._resolver = member, client, resolver
        self._data = bytearray()
        self._queries = self._reads = 0
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        member.streams.add(self)

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_SECONDS, self.end)
        self._member.lane.add_reader(self._client, self._readable)

    def end(self) -> None:
        """Close it. Again is no error."""
        if self not in self._member.streams:
            return
        self._member.streams.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._member.lane.forget(self._client)
        self._client.close()

    def _readable(self) -> None:
        try:
            got = self._client.recv(4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            got = b""
        self._reads += 1
        self._data += got
        if not got or self._reads > _MAX_READS:
            self.end()
        else:
            self._next()

    def _next(self) -> None:
        """Answer the question that has arrived whole, if there is one; nothing is read meanwhile."""
        data = self._data
        if len(data) < 2 or self._task is not None or self not in self._member.streams:
            return
        size = data[0] << 8 | data[1]
        if size > MAX_MESSAGE or self._queries >= _MAX_QUERIES:
            self.end()
            return
        if len(data) < 2 + size:
            return
        packet = bytes(data[2 : 2 + size])
        del data[: 2 + size]
        self._queries += 1
        answer = self._resolver.answer(self._member, packet)
        if isinstance(answer, Coroutine):
            self._member.lane.remove_reader(self._client)
            self._task = self._member.lane.spawn(self._answer_later(answer))
        else:
            self._send(answer)

    async def _answer_later(self, work: Coroutine[Any, Any, bytes]) -> None:
        try:
            answer = await work
        except Exception:
            _log.exception("DNS stream")
            self.end()
            return
        self._task = None
        self._member.lane.add_reader(self._client, self._readable)
        self._send(answer)

    def _send(self, answer: bytes | None) -> None:
        """Send an answer. The few that fit in a socket are sent at once; who does not read them has had enough."""
        if answer is None:
            self.end()
            return
        try:
            whole = struct.pack("!H", len(answer)) + answer
            if self._client.send(whole) != len(whole):
                self.end()
        except OSError:
            self.end()
        else:
            self._member.lane.submit(self._next)
