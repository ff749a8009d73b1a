"""The first bytes of a TLS client, read as attacker input: which server does it really ask for?

`HelloReader` takes the bytes as they arrive and says "more" until the ClientHello is complete, however it is split over TCP
segments. Its work is in proportion to the bytes, and what it holds is bounded. A hello that is not exactly well-formed, names
no server or more than one, or hides the name (ECH, ESNI) is refused: what we cannot read we cannot allow.
"""

from dataclasses import dataclass
from typing import Final

from atoll.egress.names import BadName, from_wire

MAX_HELLO: Final = 32768
MAX_BUFFER: Final = MAX_HELLO + 4096
MAX_EARLY: Final = 65536  # rejected early data; servers offer 16 KiB as a rule
MAX_PIECES: Final = 256  # reads until the hello is whole; 32 KiB in segments of 536 bytes are 62
MIN_RECORD: Final = 64  # bytes of every record but the last; TLS libraries send 512 and more
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


class HelloReader:
    """Reads one ClientHello as it arrives: each byte is looked at once, in however many pieces it comes.

    `again` reads the second hello after a HelloRetryRequest: one ChangeCipherSpec and rejected early data may precede it.
    """

    def __init__(self, *, again: bool = False) -> None:
        self.data = bytearray()
        self._again = again
        self._at = 0
        self._body = bytearray()
        self._need = -1
        self._changes = 0
        self._pieces = 0

    def feed(self, data: bytes | bytearray | memoryview) -> Hello | None:
        """The hello once it is complete, None while it is not, HelloError when it is refused."""
        self.data += data
        self._pieces += 1
        if self._pieces > MAX_PIECES:
            raise HelloError("ClientHello in too many pieces")
        while (found := self._record()) is not True:
            if found is None:
                if len(self.data) > (MAX_EARLY if self._again else 0) + MAX_BUFFER:
                    raise HelloError("ClientHello too large")
                return None
        name, alpn = _parse(bytes(self._body[4:]))
        return Hello(name, alpn, self._at)

    def _record(self) -> bool | None:
        """Consume one record: True when it ends the hello, None when it has not arrived whole."""
        data, at = self.data, self._at
        have = len(data) - at
        if have < 5:
            self._check_prefix(have)
            return None
        kind, size = data[at], (data[at + 3] << 8) | data[at + 4]
        whole = have - 5 >= size
        if self._again and not self._body and kind in (_CHANGE_CIPHER, _APPLICATION):
            self._check_preface(kind, size, whole)
            return self._advance(size) if whole else None
        if kind != _HANDSHAKE or data[at + 1] != 3:
            raise HelloError("not TLS")
        if not 0 < size <= 16384:
            raise HelloError("malformed TLS record")
        # The first bytes of a record are judged before the rest of it has come.
        first = (self._body[:4] + data[at + 5 : at + 5 + min(size, 4)])[:4]
        if first[:1] and first[0] != 1:
            raise HelloError("not a ClientHello")
        if len(first) == 4:
            self._need = 4 + int.from_bytes(first[1:4], "big")
        if self._need > MAX_HELLO:
            raise HelloError("ClientHello too large")
        ending = len(self._body) + size
        # The hello has to end with its record: nothing may hide behind it in the same one.
        if 0 <= self._need < ending:
            raise HelloError("data after the ClientHello in its record")
        if size < MIN_RECORD and ending != self._need and (whole or self._need >= 0):
            raise HelloError("ClientHello in records that are too small")
        if not whole:
            return None
        self._body += data[at + 5 : at + 5 + size]
        self._advance(size)
        return len(self._body) == self._need

    def _advance(self, size: int) -> bool:
        self._at += 5 + size
        return False

    def _check_prefix(self, have: int) -> None:
        allowed = (_HANDSHAKE, _CHANGE_CIPHER, _APPLICATION) if self._again else (_HANDSHAKE,)
        data, at = self.data, self._at
        if (have > 0 and data[at] not in allowed) or (have > 1 and data[at + 1] != 3):
            raise HelloError("not TLS")

    def _check_preface(self, kind: int, size: int, whole: bool) -> None:
        """Early data that the server has rejected, and one ChangeCipherSpec: bounded, since they are held back."""
        self._changes += whole and kind == _CHANGE_CIPHER
        if self._changes > 1 or not 0 < size <= 16640 or self.data[self._at + 1] != 3:
            raise HelloError("malformed TLS record")
        if self._at + 5 + size > MAX_EARLY:
            raise HelloError("too much early data before the second ClientHello")


def read_hello(data: bytes | bytearray, *, again: bool = False) -> Hello | None:
    """The hello at the start of `data`, None while it is incomplete, HelloError when it is refused."""
    return HelloReader(again=again).feed(data)


def is_retry(data: bytes | bytearray) -> bool:
    """Do the server's first SERVER_PREFIX bytes ask for a second ClientHello?"""
    return data[0] == _HANDSHAKE and data[5] == 2 and bytes(data[11:43]) == _RETRY_RANDOM


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
