"""Asking the machine's own resolver: a small stub client, and `/etc/hosts`.

Each question goes out on a fresh socket with a random port, a random id and random letter case, and only an answer to
exactly that question counts. Nothing is asked here that the policy has not allowed.
"""

import asyncio
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Final

from atoll.egress.names import BadName, from_wire
from atoll.egress.parse import dns

_TRY_SECONDS: Final = 2.0
_TOTAL_SECONDS: Final = 8.0
_MAX_FILE: Final = 4 * 1024 * 1024
_HOSTS_TTL: Final = 60


@dataclass(slots=True)
class _File:
    """A system file, read again when it has changed."""

    path: str
    stamp: tuple[int, int] | None = None
    text: str = ""

    def read(self) -> str:
        try:
            status = os.stat(self.path)
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp != self.stamp:
                with open(self.path, encoding="utf-8", errors="replace") as handle:
                    self.text = handle.read(_MAX_FILE)
                self.stamp = stamp
        except OSError:
            self.stamp, self.text = None, ""
        return self.text


@dataclass(slots=True)
class Upstream:
    """Where names are looked up: fixed `servers`, or those of resolv.conf; hosts_file first, empty for none."""

    servers: tuple[tuple[str, int], ...] = ()
    resolv_conf: str = "/etc/resolv.conf"
    hosts_file: str = "/etc/hosts"
    _resolv: _File = field(init=False)
    _hosts: _File = field(init=False)
    _table: dict[str, list[str]] = field(init=False, default_factory=dict)
    _table_stamp: tuple[int, int] | None = field(init=False, default=None)
    _slots: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(2048))

    def __post_init__(self) -> None:
        self._resolv, self._hosts = _File(self.resolv_conf), _File(self.hosts_file)

    async def lookup(self, name: str, kind: int = dns.A) -> dns.Answer:
        """The A (or AAAA) records of a canonical name; SERVFAIL when nobody answers."""
        local = [address for address in self._from_hosts(name) if (":" in address) == (kind == dns.AAAA)]
        if local:
            return dns.Answer(dns.NOERROR, tuple(local), _HOSTS_TTL)
        deadline = time.monotonic() + _TOTAL_SECONDS
        async with self._slots:
            for _ in range(2):
                for server in self.servers or self._from_resolv():
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    try:
                        async with asyncio.timeout(min(left, _TRY_SECONDS)):
                            answer = await _ask(server, name, kind)
                    except (OSError, TimeoutError, dns.DnsError, asyncio.IncompleteReadError):
                        continue
                    if answer.code in (dns.NOERROR, dns.NXDOMAIN):
                        return answer
        return dns.Answer(dns.SERVFAIL)

    def _from_hosts(self, name: str) -> list[str]:
        if not self.hosts_file:
            return []
        text = self._hosts.read()
        if self._table_stamp != self._hosts.stamp:
            self._table_stamp = self._hosts.stamp
            self._table = {}
            for line in text.splitlines():
                address, *names = line.partition("#")[0].split() or [""]
                if not (_is_address(address, socket.AF_INET) or _is_address(address, socket.AF_INET6)):
                    continue
                for entry in names:
                    try:
                        self._table.setdefault(from_wire(entry.encode()), []).append(address)
                    except BadName:
                        continue
        return self._table.get(name, [])

    def _from_resolv(self) -> tuple[tuple[str, int], ...]:
        words = [line.split() for line in self._resolv.read().splitlines()]
        found = [(line[1], 53) for line in words if len(line) > 1 and line[0] == "nameserver"]
        return tuple(found[:3]) or (("127.0.0.1", 53),)


def has_route(address: str) -> bool:
    """Does this machine know a way there? Nothing is sent to find out."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return False
    return True


def _is_address(text: str, family: int) -> bool:
    try:
        socket.inet_pton(family, text)
    except OSError:
        return False
    return True


def _mix_case(name: str) -> bytes:
    bits = secrets.randbits(256)
    return bytes(c ^ 0x20 if 97 <= c <= 122 and bits >> i & 1 else c for i, c in enumerate(name.encode()))


async def _ask(server: tuple[str, int], name: str, kind: int) -> dns.Answer:
    ident, mixed = secrets.randbits(16), _mix_case(name)
    packet = dns.build_query(ident, mixed, kind)
    answer = await _ask_udp(server, packet, ident, mixed, kind)
    return await _ask_tcp(server, packet, ident, mixed, kind) if answer.truncated else answer


async def _ask_udp(server: tuple[str, int], packet: bytes, ident: int, name: bytes, kind: int) -> dns.Answer:
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        sock.connect(server)
        sock.send(packet)
        while True:
            got = await loop.sock_recv(sock, dns.MAX_MESSAGE)
            try:
                return dns.parse_answer(got, ident, name, kind)
            except dns.DnsError:
                if (
                    got[:2] == packet[:2]
                    and got[12 : 12 + len(name) + 2].lower() == packet[12 : 14 + len(name)].lower()
                ):
                    # The right answer from a server that does not keep letter case: ask where nobody can guess.
                    return dns.Answer(dns.SERVFAIL, truncated=True)


async def _ask_tcp(server: tuple[str, int], packet: bytes, ident: int, name: bytes, kind: int) -> dns.Answer:
    reader, writer = await asyncio.open_connection(server[0], server[1])
    try:
        writer.write(struct.pack("!H", len(packet)) + packet)
        (size,) = struct.unpack("!H", await reader.readexactly(2))
        got = await reader.readexactly(size)
    finally:
        writer.close()
    try:
        return dns.parse_answer(got, ident, name, kind)
    except dns.DnsError:
        return dns.parse_answer(got, ident, name.lower(), kind)
