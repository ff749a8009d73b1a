"""Refused packets, told by the kernel: opening the log socket (privileged) and reading it (not).

The daemon opens and binds it inside the router namespace and passes it on; the broker, which has no rights there, only
receives. What it carries is the first bytes of packets that sandboxes made up: attacker input.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_SUBSYSTEM: Final = 4
_PACKET, _CONFIG = (_SUBSYSTEM << 8) | 0, (_SUBSYSTEM << 8) | 1
_CFG_CMD, _CFG_MODE, _CFG_QTHRESH = 1, 2, 5
_IN_INDEX, _PAYLOAD, _PREFIX = 4, 9, 10
_HEADER = struct.Struct("=IHHII")
_NAMES: Final = {1: "icmp", 6: "tcp", 17: "udp", 132: "sctp"}


@dataclass(frozen=True, slots=True)
class Attempt:
    """A packet the router refused."""

    index: int
    prefix: str
    protocol: str
    source: str
    address: str
    port: int


def open_log(group: int, copy: int = 96) -> socket.socket:
    """A socket that receives packets logged to `group` in the calling thread's network namespace."""
    log = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 12)
    try:
        log.settimeout(10)
        log.bind((0, 0))
        _configure(log, group, 1, struct.pack("=HHB", 5, _CFG_CMD, 1) + bytes(3))
        _configure(log, group, 2, struct.pack("=HH", 10, _CFG_MODE) + struct.pack("!IBB2x", copy, 2, 0))
        _configure(log, group, 3, struct.pack("=HH", 8, _CFG_QTHRESH) + struct.pack("!I", 1))
        log.setblocking(False)
    except BaseException:
        log.close()
        raise
    return log


def _configure(log: socket.socket, group: int, sequence: int, attribute: bytes) -> None:
    body = struct.pack("!BBH", socket.AF_UNSPEC, 0, group) + attribute
    log.send(_HEADER.pack(_HEADER.size + len(body), _CONFIG, 0x1 | 0x4, sequence, 0) + body)
    while True:
        answer = log.recv(65536)
        _, kind, _, got, _ = _HEADER.unpack_from(answer)
        if kind == 2 and got == sequence:
            (code,) = struct.unpack_from("=i", answer, _HEADER.size)
            if code:
                raise OSError(-code, f"packet log: {os.strerror(-code)}")
            return


def read_log(log: socket.socket) -> Iterator[Attempt]:
    """The attempts waiting on a non-blocking log socket."""
    while True:
        try:
            data = log.recv(65536)
        except BlockingIOError:
            return
        except OSError as err:
            if err.errno == errno.ENOBUFS:  # some were lost: the socket goes on working
                continue
            raise
        yield from parse_log(data)


def parse_log(data: bytes) -> Iterator[Attempt]:
    at = 0
    while at + _HEADER.size <= len(data):
        size, kind, _, _, _ = _HEADER.unpack_from(data, at)
        if size < _HEADER.size or at + size > len(data):
            return
        if kind == _PACKET:
            attempt = _attempt(_attributes(data[at + _HEADER.size + 4 : at + size]))
            if attempt is not None:
                yield attempt
        at += (size + 3) & ~3


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    at = 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if size < 4 or at + size > len(data):
            break
        found[kind & 0x3FFF] = data[at + 4 : at + size]
        at += (size + 3) & ~3
    return found


def _attempt(attributes: dict[int, bytes]) -> Attempt | None:
    index, packet = attributes.get(_IN_INDEX, b""), attributes.get(_PAYLOAD, b"")
    if len(index) != 4 or len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    prefix = attributes.get(_PREFIX, b"").rstrip(b"\0").decode("ascii", "replace")
    size = (packet[0] & 15) * 4
    number = packet[9]
    port = 0
    if number in (6, 17, 132) and len(packet) >= size + 4:
        (port,) = struct.unpack_from("!H", packet, size + 2)
    return Attempt(
        int.from_bytes(index, "big"),
        prefix,
        _NAMES.get(number, f"protocol {number}"),
        socket.inet_ntoa(packet[12:16]),
        socket.inet_ntoa(packet[16:20]),
        port,
    )
