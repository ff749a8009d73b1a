"""One connection to a guest agent: its streams, their credit, and the bytes on the wire.

A connection is used once. When it breaks, every open stream ends with ConnectionLost; `client.py` decides what then.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import NamedTuple, cast

from atoll import errors
from atoll.guest import wire
from atoll.guest.refusals import ConnectionLost, refusal
from atoll.guest.wire import Message
from atoll.loop_turns import bulk_turns

WINDOW = 1024 * 1024
PROCESS_WINDOW = 512 * 1024  # never more than the process's ring, which is asked to be this
MAX_PENDING_EVENTS = 8 * 1024 * 1024
ENOUGH_EVENTS = 64 * 1024  # bytes of a list's events that wait, above which the agent is not read until they are taken
TURN = 256 * 1024  # bytes that are taken from an agent before those who wait for them run, and others have their turn
MORE = 64 * 1024  # bytes after which one that has had its turn waits for the next
ROW = 32  # items that a stream gives its reader before the loop has its turn
FRAMES = 512  # that are taken from one piece before others have their turn
LONG = 0.01  # seconds of work for one piece after which others have their turn
PAUSE = 0.002  # seconds for which a flood of frames then waits, longer the more agents flood
MAX_PAUSE = 1.0
# Read buffer of every connection: filled and emptied within one callback of the loop. A view, because TLS transports fill
# slices of what they are given, and a slice of anything else is a copy.
SCRATCH = memoryview(bytearray(256 * 1024))

MAX_UNSENT = 4 * 1024 * 1024
COALESCE = 1024  # smaller pieces are joined, so that one-byte frames cannot make the queue large

_flooding: "set[Connection]" = set()  # agents whose frames wait

Bytes = bytes | bytearray | memoryview


class Item(NamedTuple):
    """An item of a stream: DATA or EOF of a channel, or an EVENT's map (with channel -1)."""

    kind: int
    channel: int
    data: bytes
    event: Message
    cost: int


class Stream:
    """One operation. Iterating gives items as they come; at the end `result` holds the map under `ok`, or the error
    of the guest is raised."""

    def __init__(self, connection: "Connection", number: int, windows: tuple[int, ...], window: int) -> None:
        self._connection = connection
        self.number = number
        self._regrant = window // 4
        self._items: deque[Item] = deque()
        self._row = 0  # items given since the reader last waited
        self._waiter: asyncio.Future[None] | None = None
        self._allowed = dict.fromkeys(windows, window)  # what the agent may still send
        self._taken = dict.fromkeys(windows, 0)  # consumed, not yet granted again
        self._ended: set[int] = set()
        self._event_bytes = 0
        self._send_credit = 0
        self._credit_waiter: asyncio.Future[None] | None = None
        self._sent_eof = False
        self.result: Message | None = None
        self._error: BaseException | None = None
        self._abandoned = False
        self.tells_eof = True  # whether the end of a channel is an item of its own
        self.slow_down = (
            False  # whether the agent is not read while many events wait; for who takes them without a client
        )

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Item:
        if self._row >= ROW and self._items:
            self._row = 0
            await asyncio.sleep(0)  # else a reader takes all that has gathered in one turn of the loop
        while not self._items:
            self._row = 0
            if self._error is not None:
                raise self._error
            if self.result is not None:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        self._row += 1
        if item.kind == wire.DATA:
            self._consumed(item.channel, len(item.data))
        elif item.kind == wire.EVENT:
            self._event_bytes -= item.cost
            if self._event_bytes <= ENOUGH_EVENTS // 2:
                self._connection.release(self)
        return item

    async def finish(self) -> Message:
        """Drop what still comes and give the result."""
        async for _ in self:
            pass
        assert self.result is not None
        return self.result

    async def send(self, data: Bytes) -> None:
        """DATA on channel 0, as credit and the socket allow."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            while self._send_credit <= 0:
                self._raise_if_over()
                self._credit_waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._credit_waiter
                finally:
                    self._credit_waiter = None
            self._raise_if_over()
            size = min(self._send_credit, wire.MAX_DATA, len(view) - at)
            self._send_credit -= size
            self._connection.write_lines((wire.data_head(self.number, wire.STDIN, size), view[at : at + size]))
            at += size
            await self._connection.drained()

    def send_eof(self) -> None:
        if not self._sent_eof and not self.over:
            self._sent_eof = True
            self._connection.write(wire.eof(self.number, wire.STDIN))

    @property
    def over(self) -> bool:
        return self.result is not None or self._error is not None

    def cancel(self) -> None:
        """End the operation. What it still sends is dropped; the stream closes when the agent's RESULT comes."""
        self._connection.release(self)
        if self.over or self._abandoned:
            return
        self._abandoned = True
        self._items.clear()
        self._connection.write(wire.cancel(self.number))

    def fail(self, error: BaseException) -> None:
        if not self.over:
            self._error = error
        self._wake()

    # Reports of the connection

    def on_data(self, channel: int, data: bytes) -> None:
        left = self._allowed.get(channel, 0) - len(data)
        if left < 0:
            raise wire.WireError(f"DATA without credit on channel {channel}")
        self._allowed[channel] = left
        if self._abandoned:
            return
        last = self._items[-1] if self._items else None
        if last is not None and last.kind == wire.DATA and last.channel == channel and len(last.data) < COALESCE:
            self._items[-1] = last._replace(data=last.data + data)
        else:
            self._items.append(Item(wire.DATA, channel, data, {}, 0))
        self._wake()

    def on_eof(self, channel: int) -> None:
        if channel in self._allowed and not self._abandoned:
            self._allowed[channel] = 0
            if channel not in self._ended:
                self._ended.add(channel)
                if not self.tells_eof:
                    return
                self._items.append(Item(wire.EOF, channel, b"", {}, 0))
                self._wake()

    def on_event(self, payload: bytes) -> None:
        if self._abandoned:
            return
        cost = len(payload) + 256
        self._event_bytes += cost
        if self._event_bytes > MAX_PENDING_EVENTS:
            self.cancel()
            self.fail(errors.Exhausted("events came faster than they were read"))
            return
        self._items.append(Item(wire.EVENT, -1, b"", wire.message(payload), cost))
        if self.slow_down and self._event_bytes > ENOUGH_EVENTS:
            self._connection.hold(self)
        self._wake()

    def on_credit(self, amount: int) -> None:
        self._send_credit = min(self._send_credit + amount, wire.MAX_CREDIT)
        if self._credit_waiter is not None and not self._credit_waiter.done():
            self._credit_waiter.set_result(None)

    def on_result(self, payload: bytes) -> None:
        answer = wire.message(payload)
        ok = answer.get("ok")
        if isinstance(ok, dict):
            if self._error is None:
                self.result = ok
        elif self._error is None:
            self._error = refusal(answer.get("err"))
        self._wake()

    # Inside

    def _consumed(self, channel: int, size: int) -> None:
        self._taken[channel] += size
        if self._taken[channel] >= self._regrant and not (self.over or self._abandoned or channel in self._ended):
            amount, self._taken[channel] = self._taken[channel], 0
            self._allowed[channel] += amount
            self._connection.write(wire.credit(self.number, channel, amount))

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self.result is not None:
            raise BrokenPipeError("the operation has ended")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.over and self._credit_waiter is not None and not self._credit_waiter.done():
            self._credit_waiter.set_result(None)


class Connection(asyncio.BufferedProtocol):
    """The protocol of one agent socket. `hello` must succeed before anything else is sent or believed.

    What an agent sends in bulk is read a part in each turn of the loop, one agent's in a turn: `whose` names the owner, and
    owners have their turns one after the other. Little is read at once, whatever others send.
    """

    def __init__(self, whose: Callable[[], str] | None = None) -> None:
        self._whose = whose or (lambda: f"agent {id(self)}")
        self._reader = wire.FrameReader()
        self._transport: asyncio.Transport | None = None
        self.dialled_by: object = None  # newer Pythons close a socket whose stream writer is forgotten
        self._streams: dict[int, Stream] = {}
        self._next = 1
        self._writable: asyncio.Future[None] | None = None
        self._hello: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unseen = 0  # bytes taken in since the last pause
        self._rest = b""  # what came and has to wait for its turn
        self._lost = False  # its socket has ended; what it said before may still wait
        self._queued = False  # waits for its turn to read on
        self._full: set[Stream] = set()  # streams with as many events as may wait
        self.greeted = False
        self.bye: str | None = None
        self.why = "the connection to the guest agent was lost"

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.set_write_buffer_limits(high=WINDOW)

    def get_buffer(self, sizehint: int) -> memoryview:
        return SCRATCH

    def buffer_updated(self, nbytes: int) -> None:
        self.feed(SCRATCH[:nbytes])
        self._unseen += nbytes
        if self._unseen >= TURN and self not in _flooding:
            self._let_others()

    def _let_others(self) -> None:
        """Let readers run, and other agents be read, before more is read: a loop may hand over megabytes without a pause."""
        self._unseen = 0
        if self._transport is not None and not self._transport.is_closing() and not self.closed.done():
            self._transport.pause_reading()
            if not self._queued:
                self._queued = True
                bulk_turns().call(self._whose(), self._read_on)

    def _read_on(self) -> None:
        self._queued = False
        self._unseen = TURN - MORE
        self._go_on()

    def _hold_back(self, rest: bytes, took: float) -> None:
        """More came than one agent may have handled in a turn: the rest waits, and the agent with it. All that flood share
        what one alone would get."""
        self._rest = rest
        self._unseen = 0
        if self._lost:
            return
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        _flooding.add(self)
        pause = min(max(PAUSE, took) * len(_flooding), MAX_PAUSE)
        asyncio.get_running_loop().call_later(pause, self._go_on_with_rest)

    def _go_on_with_rest(self) -> None:
        _flooding.discard(self)
        if self._lost:
            return
        rest, self._rest = self._rest, b""
        if not self.closed.done():
            if rest:
                self.feed(rest)
            self._go_on()

    def _go_on(self) -> None:
        if self._full or self._queued or self in _flooding:
            return
        if self._transport is not None and not self._transport.is_closing() and not self.closed.done():
            self._transport.resume_reading()

    def hold(self, stream: Stream) -> None:
        """Read nothing more until this stream's events were taken."""
        if not self._full and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._full.add(stream)

    def release(self, stream: Stream) -> None:
        """Read on, unless another stream holds it."""
        if stream in self._full:
            self._full.discard(stream)
            self._go_on()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: BaseException | None) -> None:
        self._lost = True
        self._hear_out(self.why if exc is None else f"{self.why}: {exc}")

    def _hear_out(self, why: str) -> None:
        """Take its last words, no more than one piece holds, a part in each turn of the loop, and then say that it is lost."""
        rest, self._rest = self._rest, b""
        if rest and not self.closed.done():
            self.feed(rest)
        if self._rest and not self.closed.done():
            bulk_turns().call(self._whose(), lambda: self._hear_out(why))
            return
        _flooding.discard(self)
        self._broken(why)

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None:
            waiter, self._writable = self._writable, None
            if not waiter.done():
                waiter.set_result(None)

    # Ours

    def feed(self, piece: bytes | memoryview) -> None:
        begun = perf_counter()
        try:
            for frame in self._reader.feed(piece, FRAMES):
                self._take(frame)
            took = perf_counter() - begun
            if self._reader.consumed < len(piece) or took > LONG:
                self._hold_back(bytes(piece[self._reader.consumed :]), took)
        except wire.WireError as error:
            self.close(f"the guest agent broke the protocol: {error}")

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self.closed.done():
            self._transport.write(data)

    def write_lines(self, pieces: tuple[Bytes, ...]) -> None:
        if self._transport is not None and not self.closed.done():
            self._transport.writelines(pieces)

    async def drained(self) -> None:
        if self._writable is not None:
            await asyncio.shield(self._writable)

    async def hello(self) -> Message:
        return await asyncio.shield(self._hello)

    def open(self, request: Mapping[str, object], windows: tuple[int, ...] = (), window: int = WINDOW) -> Stream:
        """Send a REQUEST and the first credit for the channels it will answer on, in one write."""
        if self.closed.done():
            raise ConnectionLost(self.why)
        if self._next > 0xFFFFFFFF:
            self.close("stream numbers are used up")
            raise ConnectionLost(self.why)
        stream = Stream(self, self._next, windows, window)
        frames = wire.control(wire.REQUEST, stream.number, request)
        for channel in windows:
            frames += wire.credit(stream.number, channel, window)
        self._streams[stream.number] = stream
        self._next += 1
        self.write(frames)
        return stream

    def close(self, why: str = "closed") -> None:
        if not self.closed.done():
            self.why = why
        if self._transport is not None:
            self._transport.abort()
        self._broken(self.why)

    def _broken(self, why: str) -> None:
        if self.closed.done():
            return
        self.closed.set_result(None)
        lost = ConnectionLost(why)
        if not self._hello.done():
            self._hello.set_exception(lost)
            self._hello.exception()  # nobody may be waiting
        for stream in self._streams.values():
            stream.fail(lost)
        self._streams.clear()
        self.resume_writing()

    def _take(self, frame: wire.Frame) -> None:
        kind, number, channel, payload = frame
        if not self.greeted:
            if kind != wire.HELLO or self._hello.done():
                raise wire.WireError("a frame before HELLO")
            self._hello.set_result(wire.message(payload))
            return
        if kind == wire.DATA:
            if (stream := self._streams.get(number)) is not None:
                stream.on_data(channel, payload)
        elif kind == wire.RESULT:
            if (stream := self._streams.get(number)) is not None:
                stream.on_result(payload)
                del self._streams[number]
        elif kind == wire.EVENT:
            if (stream := self._streams.get(number)) is not None:
                stream.on_event(payload)
        elif kind == wire.CREDIT:
            if (stream := self._streams.get(number)) is not None and channel == wire.STDIN:
                stream.on_credit(wire.credit_amount(payload))
        elif kind == wire.EOF:
            if (stream := self._streams.get(number)) is not None:
                stream.on_eof(channel)
        elif kind == wire.PING:
            if self._transport is not None and self._transport.get_write_buffer_size() > MAX_UNSENT:
                raise wire.WireError("PING without reading the answers")
            self.write(wire.pong(payload))
        elif kind == wire.BYE:
            reason = wire.message(payload).get("reason")
            self.bye = reason[:200] if isinstance(reason, str) else ""
        elif kind != wire.PONG:
            raise wire.WireError(f"frame of kind {kind} is not the agent's to send")
