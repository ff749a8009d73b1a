"""The user that owns the other end of a loopback connection, asked of the kernel for that one socket (sock_diag).

/proc/net/tcp has all sockets of the machine: whoever opens many would make every accept of the daemon read them all. It is
read only on a kernel that does not answer the question.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from atoll.backends.local.kernel.rootless import standing

End = tuple[str, int]

_SOCK_DIAG = 4  # the netlink family
_BY_FAMILY, _ERROR = 20, 2  # kinds of message
_REQUEST = 1
_ESTABLISHED = 1
_ANY_COOKIE = 0xFFFFFFFF
BROKER = b"atoll.egress.broker.process"  # in the command line of one


class Owned(NamedTuple):
    """A socket's user and inode."""

    uid: int
    inode: int


def loopback_owner(theirs: tuple[str, int], ours: tuple[str, int]) -> int | None:
    """The uid that owns the client's end of a loopback connection; None when it cannot be told.

    Asked once, when the connection is accepted: later the same pair of ports may belong to somebody else. What the egress
    broker carries for a sandbox is nobody's, also where the broker has to run as the daemon's own user.
    """
    if not (_is_loopback(theirs[0]) and _is_loopback(ours[0])):
        return None
    found = socket_owner(theirs, ours)
    if found is None or (standing().rootless and _is_brokers(found.inode)):
        return None
    return found.uid


def _is_brokers(inode: int) -> bool:
    """Whether a broker holds this socket. Only those of this daemon's own namespace can be looked into."""
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and BROKER in (process / "cmdline").read_bytes():
                for descriptor in (process / "fd").iterdir():
                    with suppress(OSError):
                        if os.readlink(descriptor) == f"socket:[{inode}]":
                            return True
    return False


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def socket_owner(theirs: End, ours: End) -> Owned | None:
    """The owner of the established socket whose own address is `theirs` and whose peer is `ours`; None: there is none."""
    if not _kernel_answers():
        return _looked_up(theirs, ours)
    try:
        return _asked(theirs, ours)
    except OSError:
        return None  # not told is nobody


def _asked(theirs: End, ours: End) -> Owned | None:
    """Ask the kernel. It answers within the call."""
    family, here = _packed(theirs)
    there = _packed(ours)[1]
    ends = struct.pack("!HH", theirs[1], ours[1]) + here.ljust(16, b"\0") + there.ljust(16, b"\0")
    wish = struct.pack("=BBxxI", family, socket.IPPROTO_TCP, 1 << _ESTABLISHED)
    body = wish + ends.ljust(40, b"\0") + struct.pack("=II", _ANY_COOKIE, _ANY_COOKIE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as asking:
        asking.settimeout(1)
        asking.send(struct.pack("=IHHII", 16 + len(body), _BY_FAMILY, _REQUEST, 1, 0) + body)
        answer = asking.recv(4096)
    if len(answer) < 16 + 72 or struct.unpack_from("=H", answer, 4)[0] != _BY_FAMILY:
        if len(answer) >= 20 and struct.unpack_from("=i", answer, 16)[0] not in (-errno.ENOENT, -errno.ESTALE):
            raise OSError(-struct.unpack_from("=i", answer, 16)[0], "sock_diag")
        return None
    # A listener of that port answers where no connection is: only the very pair of ports counts.
    state, found = answer[16 + 1], answer[16 + 4 : 16 + 8]
    uid, inode = struct.unpack_from("=II", answer, 16 + 4 + 48 + 12)
    if state != _ESTABLISHED or found != ends[:4] or not inode:
        return None  # an inode of 0 is an orphan, whose uid says nothing
    return Owned(uid, inode)


@functools.cache
def _kernel_answers() -> bool:
    """Whether this kernel tells the owner of a socket of our own."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), 5) as client,
        ):
            found = _asked(client.getsockname(), listener.getsockname())
            return found is not None and found.inode == os.fstat(client.fileno()).st_ino
    except OSError:
        return False


def _packed(end: End) -> tuple[int, bytes]:
    address = ipaddress.ip_address(end[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return socket.AF_INET if address.version == 4 else socket.AF_INET6, address.packed


def _looked_up(theirs: End, ours: End) -> Owned | None:
    """The same from /proc/net/tcp and /proc/net/tcp6."""
    wanted = {(_hex_address(theirs, mapped), _hex_address(ours, mapped)) for mapped in (False, True)}
    found: set[Owned] = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == "01" and fields[9] != "0" and (fields[1], fields[2]) in wanted:
                    found.add(Owned(int(fields[7]), int(fields[9])))
    return found.pop() if len(found) == 1 else None


def _hex_address(end: End, mapped: bool) -> str:
    """The kernel's notation: 32-bit words in the byte order of the machine, then the port."""
    packed = _packed(end)[1]
    if mapped and len(packed) == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    words = [int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{end[1]:04X}"
