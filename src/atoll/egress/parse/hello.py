"""The first bytes of a TLS client, read as attacker input: which server does it really ask for?

`read_hello` takes what has arrived so far and says "more" until the ClientHello is complete, however it is split over
TLS records and TCP segments. A hello that is not exactly well-formed, names no server or more than one, or hides the
name (ECH, ESNI) is refused: what we cannot read we cannot allow.
"""

from dataclasses import dataclass
from typing import Final

from atoll.egress.names import BadName, from_wire

MAX_HELLO: Final = 32768
MAX_BUFFER: Final = MAX_HELLO + 4096
_HANDSHAKE: Final = 22
_CHANGE_CIPHER: Final = 20
_APPLICATION: Final = 23
_SERVER_NAME: Final = 0
_ALPN: Final = 16
# encrypted_client_hello, its draft numbers, and the older encrypted_server_name.
_HIDDEN: Final = frozenset({0xFE0D, 0xFE0C, 0xFE0B, 0xFE0A, 0xFE09, 0xFE08, 0xFF02, 0xFF03, 0xFFCE})
# The random of a ServerHello that really is a HelloRetryRequest (RFC 8446, 4.1.3).
_RETRY_RANDOM: Final = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
SERVER_PREFIX: Final = 43


class HelloError(ValueError):
    """The bytes are no acceptable ClientHello; the text is the reason shown to people."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A complete ClientHello: the name it asks for, its protocols, and how many bytes of the stream it took."""

    name: str
    alpn: tuple[str, ...]
    size: int


def read_hello(data: bytes | bytearray, *, again: bool = False) -> Hello | None:
    """The hello at the start of `data`, None while it is incomplete, HelloError when it is refused.

    `again` reads the second hello after a HelloRetryRequest: one ChangeCipherSpec and rejected early data may precede it.
    """
    body = bytearray()
    need = -1
    at = 0
    changes = 0
    while True:
        if len(data) - at < 5:
            _check_prefix(data, at, again)
            _check_size(data)
            return None
        kind = data[at]
        size = (data[at + 3] << 8) | data[at + 4]
        if again and not body and kind in (_CHANGE_CIPHER, _APPLICATION):
            changes += kind == _CHANGE_CIPHER
            if changes > 1 or not 0 < size <= 16640 or data[at + 1] != 3:
                raise HelloError("malformed TLS record")
            if len(data) - at - 5 < size:
                return None
            at += 5 + size
            continue
        if kind != _HANDSHAKE or data[at + 1] != 3:
            raise HelloError("not TLS")
        if not 0 < size <= 16384:
            raise HelloError("malformed TLS record")
        body += data[at + 5 : at + 5 + size]
        if need < 0 and len(body) >= 4:
            need = 4 + int.from_bytes(body[1:4], "big")
        if body[:1] and body[0] != 1:
            raise HelloError("not a ClientHello")
        if need > MAX_HELLO:
            raise HelloError("ClientHello too large")
        if 0 <= need <= len(body):
            # The hello has to end with its record: nothing may hide behind it in the same one.
            if len(body) != need or len(data) - at - 5 < size:
                raise HelloError("data after the ClientHello in its record")
            name, alpn = _parse(bytes(body[4:need]))
            return Hello(name, alpn, at + 5 + size)
        if len(data) - at - 5 < size:
            _check_size(data)
            return None
        at += 5 + size


def is_retry(data: bytes | bytearray) -> bool:
    """Do the server's first SERVER_PREFIX bytes ask for a second ClientHello?"""
    return data[0] == _HANDSHAKE and data[5] == 2 and bytes(data[11:43]) == _RETRY_RANDOM


def _check_size(data: bytes | bytearray) -> None:
    if len(data) > MAX_BUFFER:
        raise HelloError("ClientHello too large")


def _check_prefix(data: bytes | bytearray, at: int, again: bool) -> None:
    allowed = (_HANDSHAKE, _CHANGE_CIPHER, _APPLICATION) if again else (_HANDSHAKE,)
    if (len(data) > at and data[at] not in allowed) or (len(data) > at + 1 and data[at + 1] != 3):
        raise HelloError("not TLS")


class _Fields:
    """A cursor over length-prefixed fields."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.data):
            raise HelloError("malformed ClientHello")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, prefix: int) -> bytes:
        return self.take(self.number(prefix))

    @property
    def empty(self) -> bool:
        return self.at == len(self.data)


def _parse(body: bytes) -> tuple[str, tuple[str, ...]]:
    fields = _Fields(body)
    if fields.take(1) != b"\x03":
        raise HelloError("malformed ClientHello")
    fields.take(33)
    if len(fields.vector(1)) > 32:
        raise HelloError("malformed ClientHello")
    ciphers = fields.vector(2)
    if not ciphers or len(ciphers) % 2 or not fields.vector(1):
        raise HelloError("malformed ClientHello")
    if fields.empty:
        raise HelloError("no server name in the ClientHello")
    extensions = _Fields(fields.vector(2))
    if not fields.empty:
        raise HelloError("malformed ClientHello")
    seen: set[int] = set()
    name: str | None = None
    alpn: tuple[str, ...] = ()
    while not extensions.empty:
        kind, data = extensions.number(2), extensions.vector(2)
        if kind in seen:
            raise HelloError("repeated extension in the ClientHello")
        seen.add(kind)
        if kind in _HIDDEN:
            raise HelloError("encrypted ClientHello (ECH) hides the host: switch ECH and its GREASE off in the client")
        if kind == _SERVER_NAME:
            name = _server_name(data)
        elif kind == _ALPN:
            alpn = _protocols(data)
    if name is None:
        raise HelloError("no server name in the ClientHello")
    return name, alpn


def _server_name(data: bytes) -> str:
    outer = _Fields(data)
    names = _Fields(outer.vector(2))
    if not outer.empty or names.number(1) != 0:
        raise HelloError("malformed server name")
    raw = names.vector(2)
    if not names.empty:
        raise HelloError("more than one server name")
    try:
        return from_wire(raw)
    except BadName:
        raise HelloError("malformed server name") from None


def _protocols(data: bytes) -> tuple[str, ...]:
    outer = _Fields(data)
    names = _Fields(outer.vector(2))
    if not outer.empty:
        raise HelloError("malformed ALPN")
    found = []
    while not names.empty:
        found.append(names.vector(1).decode("ascii", "replace"))
    return tuple(found)
