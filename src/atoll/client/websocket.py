"""The client's half of WebSocket (RFC 6455), without I/O: used for the raw bytes of a forwarded port.

Frames go out with an all-zero mask. Masking protects HTTP proxies from scripts in browsers; there is neither on a Unix
socket or inside TLS, and a zero mask costs no pass over the data.
"""

from __future__ import annotations

import binascii
import os

from ..errors import AtollError, Unauthenticated, Unavailable
from .http import Head, ProtocolError

MAX_MESSAGE = 16 * 1024 * 1024
BINARY, CLOSE, PING, PONG = 2, 8, 9, 10
NORMAL, POLICY = 1000, 1008
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def handshake() -> tuple[str, tuple[tuple[str, str], ...]]:
    """A fresh key and the request headers that carry it."""
    key = binascii.b2a_base64(os.urandom(16), newline=False).decode("ascii")
    headers = (
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", key),
    )
    return key, headers


def check(key: str, head: Head) -> None:
    """Raise unless the answer accepts this very handshake."""
    import hashlib

    digest = hashlib.sha1(key.encode("ascii") + _MAGIC, usedforsecurity=False).digest()
    wanted = binascii.b2a_base64(digest, newline=False).decode("ascii")
    if head.status != 101 or head.headers.get("sec-websocket-accept") != wanted:
        raise ProtocolError("the upgrade to WebSocket was not accepted")


def encode(opcode: int, data: bytes) -> bytes:
    size = len(data)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 65_536:
        length = bytes([0x80 | 126]) + size.to_bytes(2, "big")
    else:
        length = bytes([0x80 | 127]) + size.to_bytes(8, "big")
    return b"".join((bytes([0x80 | opcode]), length, b"\0\0\0\0", data))


def closing_error(payload: bytes) -> AtollError | None:
    """Return the meaning of a close frame's payload; None for a good end."""
    code, why = int.from_bytes(payload[:2], "big"), payload[2:].decode("utf-8", "replace")
    if code in (0, NORMAL):
        return None
    if code == POLICY:
        return Unauthenticated(why or "this connection was taken away")
    return Unavailable(f"the connection to the port was ended by the daemon: {why or code}")


class Decoder:
    """Feed it bytes; get (opcode, payload) pairs. Pieces of a fragmented message come as they are, as BINARY."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        self._buffer += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _next(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        opcode, size, start = buffer[0] & 0x0F, buffer[1] & 0x7F, 2
        if buffer[1] & 0x80 or buffer[0] & 0x70:
            raise ProtocolError("a frame no server may send")
        if size >= 126:
            width = 2 if size == 126 else 8
            if len(buffer) < 2 + width:
                return None
            size, start = int.from_bytes(buffer[2 : 2 + width], "big"), 2 + width
        if size > MAX_MESSAGE or (opcode >= 8 and size > 125):
            raise ProtocolError("WebSocket frame too large")
        if len(buffer) < start + size:
            return None
        payload = bytes(buffer[start : start + size])
        del buffer[: start + size]
        return (BINARY if opcode in (0, 1) else opcode), payload
