"""Bytes both ways between two sockets, as fast as one Python loop can and with nothing piling up.

One read per turn of the lane, straight from a shared buffer into the other socket: connections take turns, and what the
slower side does not take stops the reading of the faster one. What waits for the slower side is counted: beyond the sandbox's
share, and beyond that of all, reads are small, so that any number of connections holds a bounded amount.
"""

import socket
from collections.abc import Callable
from typing import Final

from atoll.egress.broker.turns import Lane

CHUNK: Final = 256 * 1024
SMALL: Final = 4 * 1024
OWN: Final = 512 * 1024  # every sandbox's due, however much the others hold
_buffer = bytearray(CHUNK)
_view = memoryview(_buffer)

# Looks at bytes before they go on: gives back what may be sent now. It may end the relay instead.
Filter = Callable[[memoryview], bytes | memoryview]


class Buffers:
    """How many bytes wait for slow receivers, and how much to read at once; `total` is that of all sandboxes."""

    __slots__ = ("_cap", "_total", "held")

    def __init__(self, cap: int, total: "Buffers | None" = None) -> None:
        self._cap, self._total = cap, total
        self.held = 0

    def change(self, size: int) -> None:
        self.held += size
        if self._total is not None:
            self._total.change(size)

    @property
    def full(self) -> bool:
        return self.held >= self._cap or (self._total is not None and self._total.full and self.held >= OWN)


class _Half:
    """One direction: where from, where to, and what the other side has not yet taken."""

    __slots__ = ("charged", "done", "held", "pending", "reading", "sink", "source", "tally")

    def __init__(self, source: socket.socket, sink: socket.socket, tally: Callable[[int], None]) -> None:
        self.source, self.sink, self.tally = source, sink, tally
        self.pending: bytes | memoryview = b""
        self.charged = 0
        self.reading = False
        self.held = False
        self.done = False


class Relay:
    """Moves bytes until both sides have ended, one fails, or `cut` is called; then `on_end` is called once."""

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        sent: Callable[[int], None],
        received: Callable[[int], None],
        on_end: Callable[[], None],
        lane: Lane,
        buffers: Buffers,
    ) -> None:
        self._lane = lane
        self._buffers = buffers
        self._up = _Half(client, server, sent)
        self._down = _Half(server, client, received)
        self._on_end = on_end
        self._ended = False
        self.server_left_first = False
        self.on_client_data: Filter | None = None
        self.on_server_data: Filter | None = None
        self.client_appetite: Callable[[], int] | None = None

    def start(self, to_server: bytes = b"", to_client: bytes = b"") -> None:
        """Begin, with bytes that are already allowed to go."""
        for half, first in ((self._up, to_server), (self._down, to_client)):
            if first:
                self._send(half, first)
        for half in (self._up, self._down):
            if not half.pending and not self._ended:
                self._resume(half)

    @property
    def half_closed(self) -> bool:
        """Has one side ended while the other may still send?"""
        return self._up.done or self._down.done

    def push(self, data: bytes) -> None:
        """Send held-back bytes to the server, ahead of what is read next."""
        if data and not self._ended:
            self._send(self._up, data)

    def hold_client(self, hold: bool) -> None:
        """Stop or go on reading from the client."""
        self._up.held = hold
        if hold:
            self._pause(self._up)
        elif not self._up.pending and not self._ended:
            self._resume(self._up)

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        for half in (self._up, self._down):
            self._pause(half)
            if half.pending and half.sink.fileno() >= 0:
                self._lane.remove_writer(half.sink)
            self._keep(half, b"")
        self._on_end()

    def _resume(self, half: _Half) -> None:
        if not half.reading and not half.done and not half.held:
            half.reading = True
            self._lane.add_reader(half.source, self._readable, half)

    def _pause(self, half: _Half) -> None:
        if half.reading:
            half.reading = False
            self._lane.remove_reader(half.source)

    def _readable(self, half: _Half) -> None:
        try:
            size = half.source.recv_into(_buffer, self._appetite(half))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.end()
            return
        if size == 0:
            self._finish(half)
            return
        data: bytes | memoryview = _view[:size]
        look = self.on_client_data if half is self._up else self.on_server_data
        if look is not None:
            data = look(_view[:size])
            if self._ended:
                return
        if len(data):
            self._send(half, data)

    def _appetite(self, half: _Half) -> int:
        most = SMALL if self._buffers.full else CHUNK
        if half is self._up and self.client_appetite is not None:
            return min(most, self.client_appetite())
        return most

    def _keep(self, half: _Half, data: bytes | memoryview) -> None:
        """Hold what the other side has not taken. A part of a buffer keeps all of it, so it is charged whole."""
        half.pending = data
        charged = 0 if not data else half.charged if isinstance(data, memoryview) else len(data)
        if charged != half.charged:
            self._buffers.change(charged - half.charged)
            half.charged = charged

    def _send(self, half: _Half, data: bytes | memoryview) -> None:
        if half.pending:
            self._keep(half, bytes(half.pending) + bytes(data))
            return
        try:
            size = half.sink.send(data)
        except (BlockingIOError, InterruptedError):
            size = 0
        except OSError:
            self.end()
            return
        half.tally(size)
        if size < len(data):
            self._keep(half, bytes(data[size:]))
            self._pause(half)
            self._lane.add_writer(half.sink, self._writable, half)

    def _writable(self, half: _Half) -> None:
        try:
            size = half.sink.send(half.pending)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.end()
            return
        half.tally(size)
        self._keep(half, memoryview(half.pending)[size:])
        if not half.pending:
            self._lane.remove_writer(half.sink)
            if half.done:
                self._shut(half)
            else:
                self._resume(half)

    def _finish(self, half: _Half) -> None:
        """The source has ended: pass that on, and end when the other direction has ended too."""
        self._pause(half)
        half.done = True
        if half is self._down and not self._up.done:
            self.server_left_first = True
        if half is self._down and self._up.held:
            self.end()  # the server left before saying whether the client may go on
        elif not half.pending:
            self._shut(half)

    def _shut(self, half: _Half) -> None:
        try:
            half.sink.shutdown(socket.SHUT_WR)
        except OSError:
            self.end()
            return
        if self._up.done and self._down.done and not self._up.pending and not self._down.pending:
            self.end()
