"""The guest protocol's frames, without any I/O: encoders, and a reader that takes bytes in whatever pieces they come.

The reader treats its peer as hostile. It holds at most one control frame (1 MiB) and never a DATA frame: the bytes of
DATA are handed on piece by piece as they arrive, so memory does not depend on what the peer sends.
"""

import gc
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

HELLO, REQUEST, RESULT, EVENT, DATA, EOF, CREDIT, CANCEL, PING, PONG, BYE = range(11)

STDIN, STDOUT, STDERR = 0, 1, 2

HEAD_BYTES = 9
MAX_DATA = 256 * 1024
MAX_CONTROL = 1024 * 1024
MAX_REQUEST = 4 * 1024 * 1024  # arguments and environment may have 2 MiB, as Linux allows
MAX_HELLO = 4096
MAX_PING = 64
MAX_DEPTH = 32
LARGE = 64 * 1024
MAX_CREDIT = (1 << 32) - 1

_LIMIT = {
    HELLO: MAX_HELLO,
    REQUEST: MAX_CONTROL,  # as read; the agent sends none
    RESULT: MAX_CONTROL,
    EVENT: MAX_CONTROL,
    DATA: MAX_DATA + 1,
    EOF: 1,
    CREDIT: 5,
    CANCEL: 0,
    PING: MAX_PING,
    PONG: MAX_PING,
    BYE: MAX_CONTROL,
}
_LEAST = {DATA: 1, EOF: 1, CREDIT: 5}
_ON_STREAM_0 = frozenset((HELLO, PING, PONG, BYE))

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


class WireError(Exception):
    """The peer broke the protocol; the connection cannot be used any longer."""


Message = dict[str, Any]  # the map of a control frame: a peer may have put anything into it


class Frame(NamedTuple):
    """One frame, or for DATA one piece of it. `channel` is -1 where the kind has none."""

    kind: int
    stream: int
    channel: int
    payload: bytes


def head(length: int, stream: int, kind: int) -> bytes:
    return length.to_bytes(4, "big") + stream.to_bytes(4, "big") + bytes((kind,))


def control(kind: int, stream: int, message: Mapping[str, object]) -> bytes:
    """A frame with a MessagePack map: HELLO, REQUEST, RESULT, EVENT or BYE."""
    payload = _pack(message)
    limit = MAX_REQUEST if kind == REQUEST else _LIMIT[kind]
    if len(payload) > limit:
        raise WireError(f"message of {len(payload)} bytes is over the limit of {limit}")
    return head(len(payload), stream, kind) + payload


def data_head(stream: int, channel: int, length: int) -> bytes:
    """Return the head of `length` bytes of DATA; the bytes themselves are written after it, uncopied."""
    if not 0 < length <= MAX_DATA:
        raise WireError(f"DATA of {length} bytes")
    return head(length + 1, stream, DATA) + bytes((channel,))


def eof(stream: int, channel: int) -> bytes:
    return head(1, stream, EOF) + bytes((channel,))


def credit(stream: int, channel: int, amount: int) -> bytes:
    return head(5, stream, CREDIT) + bytes((channel,)) + amount.to_bytes(4, "big")


def cancel(stream: int) -> bytes:
    return head(0, stream, CANCEL)


def pong(payload: bytes) -> bytes:
    return head(len(payload), 0, PONG) + payload


def credit_amount(payload: bytes) -> int:
    return int.from_bytes(payload, "big")


def text(value: bytes | str) -> str | bytes:
    """A name or argument as the protocol writes it: str when it is UTF-8, else bin. Surrogates stand for raw bytes."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    try:
        value.encode()
        return value
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogateescape")


def name(value: Any) -> str:
    """The reverse of `text`: str or bin from the peer as a str with surrogates; anything else is refused."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    raise WireError("a name must be a string")


def message(payload: bytes) -> Message:
    """The map of a control frame. Python's collector would look again and again at what a large one becomes: it rests then."""
    if len(payload) <= LARGE or not gc.isenabled():
        return _message(payload)
    gc.disable()
    try:
        return _message(payload)
    finally:
        gc.enable()


def _message(payload: bytes) -> Message:
    """The decoder itself refuses what is nested too deeply for it to recurse."""
    try:
        value = _unpack(payload)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise WireError(f"message cannot be decoded: {error}") from None
    if not isinstance(value, dict):
        raise WireError("message is not a map")
    for key in value:
        if not isinstance(key, str):
            raise WireError("message has a key that is not a string")
    if _is_deep(value):
        raise WireError("message is nested too deeply")
    return value


def _is_deep(value: Message) -> bool:
    """Whether containers nest deeper than `MAX_DEPTH`. One level after the other, so that a flat message costs one look."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True


class FrameReader:
    """Takes bytes, gives frames. After a WireError it must be thrown away."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._body = bytearray()
        self._kind = -1
        self._stream = 0
        self._channel = -1
        self._left = 0  # bytes of the present payload still to come
        self.consumed = 0  # of the last piece

    @property
    def between_frames(self) -> bool:
        return self._kind < 0 and not self._head

    def feed(self, piece: bytes | bytearray | memoryview, most: int = MAX_CREDIT) -> list[Frame]:
        """The frames this piece completes, at most so many; for DATA also the part of a frame it contains.

        `consumed` then says how much of the piece they took; the rest has to be fed again.
        """
        frames: list[Frame] = []
        view = memoryview(piece)
        at, end = 0, len(view)
        self.consumed = end
        while True:
            if len(frames) >= most:
                self.consumed = at
                return frames
            if self._kind < 0:
                if at >= end:
                    return frames
                take = min(HEAD_BYTES - len(self._head), end - at)
                self._head += view[at : at + take]
                at += take
                if len(self._head) < HEAD_BYTES:
                    return frames
                self._open()
            if self._kind == DATA:
                if at >= end:
                    return frames
                if self._channel < 0:
                    self._channel = view[at]
                    if self._channel > STDERR:
                        raise WireError(f"unknown channel {self._channel}")
                    at += 1
                    self._left -= 1
                take = min(self._left, end - at)
                if take:
                    frames.append(Frame(DATA, self._stream, self._channel, bytes(view[at : at + take])))
                    at += take
                    self._left -= take
                if not self._left:
                    self._kind = -1
                elif at >= end:
                    return frames
            else:
                take = min(self._left, end - at)
                self._body += view[at : at + take]
                at += take
                self._left -= take
                if self._left:
                    return frames
                frames.append(self._close())

    def _open(self) -> None:
        raw = self._head
        length, stream, kind = int.from_bytes(raw[:4], "big"), int.from_bytes(raw[4:8], "big"), raw[8]
        raw.clear()
        limit = _LIMIT.get(kind)
        if limit is None:
            raise WireError(f"unknown frame kind {kind}")
        if length > limit or length < _LEAST.get(kind, 0):
            raise WireError(f"frame of kind {kind} with a payload of {length} bytes")
        if (stream == 0) != (kind in _ON_STREAM_0):
            raise WireError(f"frame of kind {kind} on stream {stream}")
        self._kind, self._stream, self._left, self._channel = kind, stream, length, -1

    def _close(self) -> Frame:
        payload, kind = bytes(self._body), self._kind
        self._body = bytearray()
        self._kind = -1
        if kind in (EOF, CREDIT):
            if payload[0] > STDERR:
                raise WireError(f"unknown channel {payload[0]}")
            return Frame(kind, self._stream, payload[0], payload[1:])
        return Frame(kind, self._stream, -1, payload)
