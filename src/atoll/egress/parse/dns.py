"""DNS packets, read as attacker input: only what a resolver for A records needs, and AAAA where it asks upstream.

Queries come from sandboxes, answers from upstream servers that a sandbox's accomplice may run. Every length is checked
against the packet, compression pointers may only point backwards, and anything else raises DnsError.
"""

import socket
import struct
from dataclasses import dataclass
from typing import Final

A: Final = 1
CNAME: Final = 5
AAAA: Final = 28
OPT: Final = 41
IN: Final = 1
NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = range(6)
MAX_MESSAGE: Final = 4096
_MAX_RECORDS: Final = 128
_MAX_POINTERS: Final = 32
_HEADER = struct.Struct("!6H")
_RECORD = struct.Struct("!HHIH")


class DnsError(ValueError):
    """The packet is not a message this resolver reads."""


@dataclass(frozen=True, slots=True)
class Query:
    """One question; `name` keeps its case as sent, without the trailing dot."""

    id: int
    name: bytes
    kind: int
    klass: int
    recursion: bool
    opcode: int
    question: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """Upstream's answer for one name: addresses with a lifetime, or a code."""

    code: int
    addresses: tuple[str, ...] = ()
    ttl: int = 0
    truncated: bool = False


def parse_query(packet: bytes) -> Query:
    """The single question of a query, or DnsError."""
    if not 17 <= len(packet) <= MAX_MESSAGE:
        raise DnsError("length")
    ident, flags, questions, answers, authority, extra = _HEADER.unpack_from(packet)
    if flags & 0x8000:
        raise DnsError("a response")
    if questions != 1 or answers or authority or extra > 2:
        raise DnsError("section counts")
    name, end = _plain_name(packet, 12)
    if end + 4 > len(packet):
        raise DnsError("short question")
    kind, klass = struct.unpack_from("!HH", packet, end)
    return Query(ident, name, kind, klass, bool(flags & 0x0100), (flags >> 11) & 15, packet[12 : end + 4])


def build_response(query: Query, code: int, addresses: tuple[str, ...] = (), ttl: int = 0) -> bytes:
    """An answer to `query` with A records for its own name."""
    flags = 0x8080 | (query.opcode << 11) | (0x0100 if query.recursion else 0) | code
    parts = [_HEADER.pack(query.id, flags, 1, len(addresses), 0, 0), query.question]
    for address in addresses:
        packed = bytes(int(octet) for octet in address.split("."))
        parts.append(b"\xc0\x0c" + _RECORD.pack(A, IN, ttl, 4) + packed)
    return b"".join(parts)


def build_error(packet: bytes, code: int) -> bytes | None:
    """A bare error for a packet that could not be read; None when even its id is missing, or it is a response."""
    if len(packet) < 12 or packet[2] & 0x80:
        return None
    return packet[:2] + struct.pack("!H", 0x8080 | code) + bytes(8)


def build_query(ident: int, name: bytes, kind: int = A) -> bytes:
    """A recursive query for the addresses of a name already known to be canonical (its case may be random)."""
    labels = b"".join(bytes((len(label),)) + label for label in name.split(b"."))
    # EDNS with a 1232-byte buffer: larger answers come back truncated and are asked again over TCP.
    edns = b"\x00" + struct.pack("!HHIH", OPT, 1232, 0, 0)
    return _HEADER.pack(ident, 0x0100, 1, 0, 0, 1) + labels + b"\x00" + struct.pack("!HH", kind, IN) + edns


def parse_answer(packet: bytes, ident: int, name: bytes, wanted: int = A) -> Answer:
    """The A (or AAAA) records for `name` in a response, CNAMEs followed; DnsError unless it answers exactly that question."""
    if len(packet) < 12:
        raise DnsError("length")
    got, flags, questions, answers, _, _ = _HEADER.unpack_from(packet)
    if got != ident or not flags & 0x8000 or questions != 1:
        raise DnsError("not the answer")
    asked, at = _plain_name(packet, 12)
    if asked != name or packet[at : at + 4] != struct.pack("!HH", wanted, IN):
        raise DnsError("another question")
    at += 4
    if flags & 0x0200:
        return Answer(flags & 15, truncated=True)
    aliases: dict[bytes, tuple[bytes, int]] = {}
    found: dict[bytes, list[tuple[str, int]]] = {}
    for _ in range(min(answers, _MAX_RECORDS)):
        owner, at = _name(packet, at)
        if at + 10 > len(packet):
            raise DnsError("short record")
        kind, klass, ttl, size = _RECORD.unpack_from(packet, at)
        at += 10
        if at + size > len(packet):
            raise DnsError("short data")
        if klass == IN and kind == wanted:
            if size != (4 if wanted == A else 16):
                raise DnsError("address size")
            address = socket.inet_ntop(socket.AF_INET if wanted == A else socket.AF_INET6, packet[at : at + size])
            found.setdefault(owner, []).append((address, ttl))
        elif klass == IN and kind == CNAME:
            aliases.setdefault(owner, (_name(packet, at)[0], ttl))
        at += size
    return _follow(flags & 15, name.lower(), aliases, found)


def _follow(
    code: int, name: bytes, aliases: dict[bytes, tuple[bytes, int]], found: dict[bytes, list[tuple[str, int]]]
) -> Answer:
    ttls = []
    for _ in range(16):
        records = found.get(name)
        if records:
            ttls += [ttl for _, ttl in records]
            return Answer(NOERROR, tuple(dict.fromkeys(address for address, _ in records)), min(min(ttls), 86400))
        if name not in aliases:
            break
        name, ttl = aliases[name]
        ttls.append(ttl)
    return Answer(code)


def _plain_name(packet: bytes, at: int) -> tuple[bytes, int]:
    """A name without compression, with its case kept."""
    labels: list[bytes] = []
    total = 0
    while True:
        if at >= len(packet):
            raise DnsError("short name")
        size = packet[at]
        at += 1
        if size == 0:
            break
        if size > 63 or at + size > len(packet):
            raise DnsError("label")
        total += size + 1
        if total > 254:
            raise DnsError("long name")
        label = packet[at : at + size]
        if b"." in label:
            raise DnsError("dot in a label")
        labels.append(label)
        at += size
    return b".".join(labels), at


def _name(packet: bytes, at: int) -> tuple[bytes, int]:
    """A name that may be compressed, in lower case, and where the record goes on."""
    labels: list[bytes] = []
    total, end, pointers = 0, -1, 0
    while True:
        if at >= len(packet):
            raise DnsError("short name")
        size = packet[at]
        if size & 0xC0 == 0xC0:
            if at + 2 > len(packet):
                raise DnsError("short pointer")
            target = ((size & 0x3F) << 8) | packet[at + 1]
            pointers += 1
            if target >= at or pointers > _MAX_POINTERS:
                raise DnsError("pointer")
            end = at + 2 if end < 0 else end
            at = target
            continue
        at += 1
        if size == 0:
            break
        if size > 63 or at + size > len(packet):
            raise DnsError("label")
        total += size + 1
        if total > 254:
            raise DnsError("long name")
        labels.append(packet[at : at + size].lower())
        at += size
    return b".".join(labels), at if end < 0 else end
