"""How many bytes of unfinished messages a gRPC client has sent: counted from HTTP/2's frames as they pass by.

gRPC hands a message over when its last byte has come, and holds the others until then. Nothing in here decides; `doors.py`
charges what is counted to whoever sent it. Only the frames' heads and each message's five-byte head are read.
"""

from __future__ import annotations

_PREFACE = 24  # bytes before the first frame
_HEAD = 9  # of a frame
_PREFIX = 5  # of a message: a flag and four bytes of length
_DATA, _RST_STREAM, _GOAWAY = 0, 3, 7
_ENHANCE_YOUR_CALM = (11).to_bytes(4, "big")  # gRPC's clients make RESOURCE_EXHAUSTED of it
_END_STREAM, _PADDED = 1, 8
OVERHEAD = 1024  # what one stream with an unfinished message costs besides its bytes


class _Stream:
    """One stream's message under way."""

    __slots__ = ("left", "prefix", "taken")

    def __init__(self) -> None:
        self.prefix = b""
        self.left = 0  # bytes of the message still to come
        self.taken = OVERHEAD


class Edges:
    """Follows the frames that one side sends: whether they end with a whole one, so that another frame may follow."""

    def __init__(self, skip: int = 0) -> None:
        self._skip = skip  # bytes that are not looked at
        self._head = b""
        self._stream = 0  # whose DATA is looked at; 0: none

    @property
    def whole(self) -> bool:
        return not self._skip and not self._head

    def feed(self, data: bytes) -> None:
        """Follow the frames in these bytes, which came in whatever pieces."""
        at, end = 0, len(data)
        while at < end:
            if self._skip:
                take = min(self._skip, end - at)
                self._skip -= take
            elif self._stream:
                take = self._read_data(data, at, end)
            else:
                take = min(_HEAD - len(self._head), end - at)
                self._head += data[at : at + take]
                if len(self._head) == _HEAD:
                    head, self._head = self._head, b""
                    self._open_frame(head, int.from_bytes(head[:3], "big"))
            at += take

    def _open_frame(self, head: bytes, length: int) -> None:
        self._skip = length

    def _read_data(self, data: bytes, at: int, end: int) -> int:
        """Return how many of the bytes from `at` on belong to the present DATA frame and were read."""
        raise NotImplementedError


class Unfinished(Edges):
    """A client's unfinished messages: `held` counts the bytes a server holds for messages that are not whole yet."""

    def __init__(self) -> None:
        super().__init__(_PREFACE)
        self.held = 0
        self._left = 0  # of the present DATA frame, without its padding
        self._padding = 0  # -1: the next byte says how much
        self._ends = False
        self._streams: dict[int, _Stream] = {}

    def refusals(self) -> bytes:
        """The frames that tell a client that the calls under way here are too much, and to open no more of them."""
        ends = [_frame(_RST_STREAM, number, _ENHANCE_YOUR_CALM) for number in self._streams]
        last = max(self._streams, default=0).to_bytes(4, "big")
        return b"".join(ends) + _frame(_GOAWAY, 0, last + _ENHANCE_YOUR_CALM)

    def _read_data(self, data: bytes, at: int, end: int) -> int:
        if self._padding < 0:
            take = 1
            self._padding = min(data[at], self._left - 1)
            self._left -= 1 + self._padding
        else:
            take = min(self._left, end - at)
            self._count(data, at, take)
            self._left -= take
        self._close_frame()
        return take

    def _open_frame(self, head: bytes, length: int) -> None:
        kind, flags = head[3], head[4]
        stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
        if kind != _DATA or not stream:
            self._skip = length
            if kind == _RST_STREAM:
                self._forget(stream)
            return
        self._stream, self._left, self._ends = stream, length, bool(flags & _END_STREAM)
        self._padding = -1 if flags & _PADDED and length else 0
        self._close_frame()

    def _close_frame(self) -> None:
        """Go on to the next frame if this one has no more data."""
        if self._padding >= 0 and not self._left:
            if self._ends:
                self._forget(self._stream)
            self._stream, self._skip = 0, self._padding

    def _count(self, data: bytes, at: int, size: int) -> None:
        stream = self._streams.get(self._stream)
        while size > 0:
            if stream is None:
                stream = self._streams[self._stream] = _Stream()
                self.held += OVERHEAD
            if len(stream.prefix) < _PREFIX:
                part = data[at : at + min(_PREFIX - len(stream.prefix), size)]
                stream.prefix += part
                at, size = at + len(part), size - len(part)
                if len(stream.prefix) == _PREFIX:
                    stream.left = int.from_bytes(stream.prefix[1:], "big")
            take = min(stream.left, size)
            stream.left -= take
            stream.taken += take
            self.held += take
            at, size = at + take, size - take
            if len(stream.prefix) == _PREFIX and not stream.left:
                self._forget(self._stream)
                stream = None

    def _forget(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            self.held -= stream.taken


def _frame(kind: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + stream.to_bytes(4, "big") + payload
