"""Timeouts for slow callers over TCP: a body that hardly comes, and an answer that nobody takes.

The local user's own socket has no such clock: a pager that is not scrolled, or a pipe that waits for its producer, is no
attack on oneself.
"""

import asyncio

from atoll import errors
from atoll.server.request_limits import BoundedHeads

BODY_SECONDS = 60.0
BODY_BYTES = 1024  # at least so many in that time, unless it is us who do not read
STALL_SECONDS = 10.0
TOO_SLOW = errors.InvalidArgument("the request's body did not come in time")


class BoundedReader(asyncio.Protocol):
    """Cuts a connection whose peer takes nothing of the answer for `STALL_SECONDS`, or its own `stall_seconds`."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    stall_seconds: float | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _waiting = 0  # bytes of the answer nobody has taken

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _await_reader(self) -> None:
        self._waiting = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.stall_seconds or STALL_SECONDS, self._look_at_reader)

    def _look_at_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._waiting:
            self._await_reader()
        else:
            self.transport.abort()


class BoundedPace(BoundedReader, BoundedHeads):
    """`BoundedHeads`, and clocks for the rest. They start only when a request or answer is not whole at once."""

    transport: asyncio.Transport
    _in_body = False
    _body_bytes = 0
    _body_timer: asyncio.TimerHandle | None = None

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_body = True

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_body:
            self._body_bytes += len(data)
            if self._body_timer is None:
                self._await_body()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().connection_lost(exc)

    def _await_body(self) -> None:
        self._body_bytes = 0
        self._body_timer = self.loop.call_later(BODY_SECONDS, self._look_at_body)

    def _look_at_body(self) -> None:
        if self._body_bytes >= BODY_BYTES or self.flow.read_paused:
            self._await_body()
        elif self.cycle is None or self.cycle.response_started:
            self.transport.abort()
        else:
            self.refuse(b"408 Request Timeout", TOO_SLOW)
