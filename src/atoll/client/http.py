"""HTTP/1.1 for a client, without any I/O: bytes in, bytes out. Both drivers stand on this.

`encode_request` makes the bytes of a request. `ResponseParser` is fed what arrived and gives the head, then the body;
`FrameParser` cuts the body of a frame stream into frames. What a peer may send is bounded: a head of 64 KiB, frames of
16 MiB. A parser never raises anything but `ProtocolError` and, for an answer that stops in the middle, `Cut`.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_HEAD = 65_536
MAX_FRAME = 16 * 1024 * 1024
FRAMES = "application/x-atoll-frames"

KEEPALIVE, STDOUT, STDERR, EVENT, RESULT, ERROR = range(6)

_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/")


class ProtocolError(Exception):
    """The peer does not speak HTTP as we know it."""


class Cut(Exception):
    """The connection ended before the answer did."""


def quote(value: str | bytes | os.PathLike[str] | os.PathLike[bytes] | int | float) -> str:
    """Percent-encode a query value or path part; file names keep their bytes (surrogateescape)."""
    if isinstance(value, (int, float)):
        value = str(value)
    raw = os.fspath(value)
    data = raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogateescape")
    return "".join([chr(b) if b in _SAFE else f"%{b:02X}" for b in data])


def with_query(path: str, query: Mapping[str, object]) -> str:
    """`path?a=1&b=2`; entries that are None are left out, booleans become 1 and 0."""
    parts = []
    for key, value in query.items():
        if value is None:
            continue
        text = ("1" if value else "0") if isinstance(value, bool) else value
        if not isinstance(text, (str, bytes, int, float, os.PathLike)):
            raise TypeError(f"{key}: {type(value).__name__} cannot go into a query")
        parts.append(f"{key}={quote(text)}")
    return path + ("?" + "&".join(parts) if parts else "")


def encode_request(
    method: str,
    target: str,
    headers: Iterable[tuple[str, str]] = (),
    body: bytes | None = None,
    *,
    chunked: bool = False,
    host: str = "atoll",
) -> bytes:
    """The request's bytes; with `chunked`, only its head: the body follows as `encode_chunk`s and `LAST_CHUNK`."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    for name, value in headers:
        if "\r" in value or "\n" in value or "\0" in value:
            raise ValueError(f"header {name} may not hold line breaks")
        lines.append(f"{name}: {value}")
    if chunked:
        lines.append("Transfer-Encoding: chunked")
    elif body is not None or method not in ("GET", "HEAD", "DELETE"):
        lines.append(f"Content-Length: {len(body or b'')}")
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    return head + body if body else head


def encode_chunk(data: bytes | bytearray | memoryview) -> bytes:
    """One piece of a chunked body; nothing for no data, because an empty chunk would end the body."""
    return b"".join((b"%x\r\n" % len(data), data, b"\r\n")) if data else b""


LAST_CHUNK = b"0\r\n\r\n"


class Head:
    """Status line and headers; names in lower case, the first of a repeated header wins."""

    __slots__ = ("headers", "status")

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers


class ResponseParser:
    """Feed it bytes; read `head` once it is there, `take()` for body bytes, `done` when the answer is whole."""

    def __init__(self, *, bodiless: bool = False) -> None:
        self.head: Head | None = None
        self.done = False
        self.keep_alive = True
        self.received = 0
        self._bodiless = bodiless
        self._buffer = bytearray()
        self._body: list[bytes] = []
        self._left = 0  # bytes of the sized body or of the current chunk still to come
        self._state = "head"

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        self.received += len(data)
        if self._state == "sized" and not self._buffer:  # the common case for big bodies: no copy through the buffer
            self._sized(bytes(data))
            return
        self._buffer += data
        while self._step():
            pass

    def take(self) -> bytes:
        """The body bytes that arrived since the last call."""
        if not self._body:
            return b""
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body

    def eof(self) -> None:
        """The peer closed: fine for a body without a length, otherwise `Cut`."""
        self.keep_alive = False
        if self._state == "close":
            self.done = True
        if not self.done:
            raise Cut("the answer was cut off" if self.received else "no answer")

    @property
    def surplus(self) -> bytes:
        """Return the bytes after the end of the answer (a switched protocol's first bytes)."""
        return bytes(self._buffer) if self.done else b""

    def _step(self) -> bool:
        state = self._state
        if state == "head":
            return self._take_head()
        if state == "sized":
            data = bytes(self._buffer)
            self._buffer.clear()
            self._sized(data)
            return False
        if state == "close":
            if self._buffer:
                self._body.append(bytes(self._buffer))
                self._buffer.clear()
            return False
        if state in ("size", "trailer"):
            return self._take_line()
        if state == "chunk":
            return self._take_chunk()
        return False

    def _take_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise ProtocolError("response head too large")
            return False
        if end > MAX_HEAD:
            raise ProtocolError("response head too large")
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        first = lines[0].split(" ", 2)
        version, code = first[0], first[1] if len(first) > 1 else ""
        if version not in ("HTTP/1.1", "HTTP/1.0") or len(code) != 3 or not (code.isascii() and code.isdigit()):
            raise ProtocolError("not an HTTP answer")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise ProtocolError("malformed header line")
            headers.setdefault(name.lower(), value.strip())
        status = int(code)
        if 100 <= status < 200 and status != 101:
            return True  # an interim answer; the real one follows
        self.head = Head(status, headers)
        self.keep_alive = version == "HTTP/1.1" and "close" not in headers.get("connection", "").lower()
        self._choose_body(status, headers)
        return not self.done

    def _choose_body(self, status: int, headers: dict[str, str]) -> None:
        if self._bodiless or status in (101, 204, 304):
            self._finish()
        elif "transfer-encoding" in headers:
            if headers["transfer-encoding"].lower() != "chunked" or "content-length" in headers:
                raise ProtocolError("ambiguous body length")
            self._state = "size"
        elif "content-length" in headers:
            length = headers["content-length"]
            if not (length.isascii() and length.isdigit()) or len(length) > 18:
                raise ProtocolError("malformed Content-Length")
            self._left = int(length)
            self._state = "sized"
            if not self._left:
                self._finish()
        else:
            self._state, self.keep_alive = "close", False

    def _sized(self, data: bytes) -> None:
        if len(data) > self._left:
            self._buffer += data[self._left :]
            data = data[: self._left]
        if data:
            self._body.append(data)
            self._left -= len(data)
        if not self._left:
            self._finish()

    def _take_line(self) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > 4096:
                raise ProtocolError("chunk line too long")
            return False
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        if self._state == "trailer":
            if not line:
                self._finish()
                return False
            return True
        digits = line.split(b";", 1)[0].strip()
        if not digits or len(digits) > 15 or any(c not in b"0123456789abcdefABCDEF" for c in digits):
            raise ProtocolError("malformed chunk size")
        self._left = int(digits, 16)
        self._state = "chunk" if self._left else "trailer"
        return True

    def _take_chunk(self) -> bool:
        if self._left:
            piece = bytes(self._buffer[: self._left])
            if not piece:
                return False
            del self._buffer[: len(piece)]
            self._body.append(piece)
            self._left -= len(piece)
        if self._left or len(self._buffer) < 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise ProtocolError("chunk without its end")
        del self._buffer[:2]
        self._state = "size"
        return True

    def _finish(self) -> None:
        self.done = True
        self._state = "done"


class FrameParser:
    """Cuts a frame stream (`u8 kind | u32 length | payload`) into (kind, payload) pairs, keepalives left out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        buffer = self._buffer
        buffer += data
        frames = []
        start = 0
        while len(buffer) - start >= 5:
            length = int.from_bytes(buffer[start + 1 : start + 5], "big")
            if length > MAX_FRAME:
                raise ProtocolError("frame too large")
            end = start + 5 + length
            if len(buffer) < end:
                break
            kind = buffer[start]
            if kind > ERROR:
                raise ProtocolError("unknown frame kind")
            if kind != KEEPALIVE:
                frames.append((kind, bytes(buffer[start + 5 : end])))
            start = end
        if start:
            del buffer[:start]
        return frames
