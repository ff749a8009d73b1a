"""Just enough rtnetlink, in-process: veth pairs across two namespaces, addresses, a default route, deletion.

A netlink socket belongs to the network namespace its thread was in when it was opened, and stays there. Starting `ip`
costs ten milliseconds a time and a general library about as much; these messages cost a tenth of one.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

CLONE_NEWNET: Final = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

_ERROR, _NEWLINK, _DELLINK, _GETLINK, _NEWADDR, _NEWROUTE = 2, 16, 17, 18, 20, 24
_REQUEST, _ACK, _EXCL, _CREATE = 0x1, 0x4, 0x200, 0x400
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_GROUP, _IFLA_NET_NS_FD = 3, 18, 27, 28
_INFO_KIND, _INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFF_UP: Final = 1
_IFLA_OPERSTATE: Final = 16
_OPERSTATE_UP: Final = 6
_NESTED: Final = 0x8000
_HEADER = struct.Struct("=IHHII")
_IFINFO = struct.Struct("=BxHiII")
_IFADDR = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")


def unshare_net() -> None:
    """Put the calling thread in a new network namespace."""
    if _libc.unshare(CLONE_NEWNET) != 0:
        err = ctypes.get_errno()
        raise OSError(err, f"unshare(CLONE_NEWNET): {os.strerror(err)}")


def enter_net(fd: int) -> None:
    """Put the calling thread in the network namespace behind `fd`."""
    if _libc.setns(fd, CLONE_NEWNET) != 0:
        err = ctypes.get_errno()
        raise OSError(err, f"setns(CLONE_NEWNET): {os.strerror(err)}")


def current_net() -> int:
    """A descriptor of the calling thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def inside_net(fd: int) -> Iterator[None]:
    """Run the body in another network namespace; the thread is back afterwards, whatever happens."""
    home = current_net()
    try:
        enter_net(fd)
        try:
            yield
        finally:
            enter_net(home)
    finally:
        os.close(home)


def write_sysctl(path: str, value: str) -> None:
    """Set a sysctl of the calling thread's own network namespace (`/proc/sys/net` follows the thread)."""
    with open("/proc/sys/net/" + path, "w", encoding="ascii") as handle:
        handle.write(value)


def _attr(kind: int, data: bytes) -> bytes:
    size = 4 + len(data)
    return struct.pack("=HH", size, kind) + data + bytes(-size % 4)


class Netlink:
    """A route socket of the namespace the calling thread is in."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.settimeout(10)
        self._socket.bind((0, 0))
        self._sequence = 0

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "Netlink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_veth(self, name: str, peer: str, peer_net: int) -> None:
        """A pair, both ends down: `name` here, `peer` in `peer_net`."""
        inner = _IFINFO.pack(0, 0, 0, 0, 0)
        inner += _attr(_IFLA_IFNAME, peer.encode() + b"\0") + _attr(_IFLA_NET_NS_FD, struct.pack("=I", peer_net))
        data = _attr(_INFO_DATA | _NESTED, _attr(_VETH_INFO_PEER | _NESTED, inner))
        info = _attr(_IFLA_LINKINFO | _NESTED, _attr(_INFO_KIND, b"veth\0") + data)
        body = _IFINFO.pack(0, 0, 0, 0, 0) + _attr(_IFLA_IFNAME, name.encode() + b"\0") + info
        self._request(_NEWLINK, _CREATE | _EXCL, body)

    def move(self, index: int, name: str, net: int) -> None:
        """Give a device another name in another namespace."""
        where = _attr(_IFLA_NET_NS_FD, struct.pack("=I", net)) + _attr(_IFLA_IFNAME, name.encode() + b"\0")
        self._request(_NEWLINK, 0, _IFINFO.pack(0, 0, index, 0, 0) + where)

    def add_address(self, index: int, address: str, prefix: int) -> None:
        packed = socket.inet_aton(address)
        body = _IFADDR.pack(socket.AF_INET, prefix, 0, 0, index) + _attr(2, packed) + _attr(1, packed)
        self._request(_NEWADDR, _CREATE | _EXCL, body)

    def add_default_route(self, index: int, gateway: str) -> None:
        main, static, universe, unicast = 254, 4, 0, 1
        body = _ROUTE.pack(socket.AF_INET, 0, 0, 0, main, static, universe, unicast, 0)
        body += _attr(5, socket.inet_aton(gateway)) + _attr(4, struct.pack("=I", index))
        self._request(_NEWROUTE, _CREATE | _EXCL, body)

    def set_up(self, index: int, up: bool = True) -> None:
        self._request(_NEWLINK, 0, _IFINFO.pack(0, 0, index, _IFF_UP if up else 0, _IFF_UP))

    def is_running(self, name: str) -> bool:
        """Does the interface carry packets? Up is not enough: the kernel starts its queue a moment after its peer's.

        Asking makes newer kernels do so at once (they bring the carrier state up to date for this message).
        """
        answer = self._exchange(_GETLINK, 0, _IFINFO.pack(0, 0, 0, 0, 0) + _attr(_IFLA_IFNAME, name.encode() + b"\0"))
        at = _HEADER.size + _IFINFO.size
        while at + 4 <= len(answer):
            size, kind = struct.unpack_from("=HH", answer, at)
            if kind == _IFLA_OPERSTATE:
                return answer[at + 4] == _OPERSTATE_UP
            at += (max(size, 4) + 3) & ~3
        return True

    def set_group(self, index: int, group: int) -> None:
        self._request(_NEWLINK, 0, _IFINFO.pack(0, 0, index, 0, 0) + _attr(_IFLA_GROUP, struct.pack("=I", group)))

    def delete_group(self, group: int) -> None:
        """Delete every link of the group at once: the kernel's grace periods are then paid once, not per link."""
        try:
            self._request(_DELLINK, 0, _IFINFO.pack(0, 0, 0, 0, 0) + _attr(_IFLA_GROUP, struct.pack("=I", group)))
        except OSError as err:
            if err.errno != errno.ENODEV:
                raise

    def _request(self, kind: int, flags: int, body: bytes) -> None:
        self._exchange(kind, _ACK | flags, body)

    def _exchange(self, kind: int, flags: int, body: bytes) -> bytes:
        """Send one message; its answer, or the error in it."""
        self._sequence += 1
        size = _HEADER.size + len(body)
        self._socket.send(_HEADER.pack(size, kind, _REQUEST | flags, self._sequence, 0) + body)
        while True:
            answer = self._socket.recv(65536)
            got_size, got_kind, _, sequence, _ = _HEADER.unpack_from(answer)
            if sequence != self._sequence:
                continue
            if got_kind != _ERROR:
                return answer[:got_size]
            (code,) = struct.unpack_from("=i", answer, _HEADER.size)
            if code:
                raise OSError(-code, os.strerror(-code))
            return b""
