"""The router namespace: where every sandbox's link ends, and from which nothing is forwarded.

Privileged, blocking, and used by one thread only, which lives in that namespace (`Router.create` or `Router.adopt` move
the calling thread there for good). The namespace exists as long as someone holds one of its sockets: the daemon does,
and the broker does, so that a daemon that died finds it again.
"""

import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypedDict

from atoll.egress.router.netlink import Netlink, current_net, enter_net, inside_net, unshare_net, write_sysctl
from atoll.egress.router.nflog import open_log
from atoll.egress.router.nft import (
    BROKER_PORT,
    CLOSED_SECONDS,
    DNS_PORT,
    LOG_GROUP,
    UDP_SECONDS,
    Entry,
    Nft,
    TableShare,
)
from atoll.egress.router.tap import PREFIX as TAP_PREFIX
from atoll.egress.router.tap import TAP_IFNAME
from atoll.errors import Exhausted, Internal, Unsupported

SANDBOX_IFNAME: Final = "eth0"
PREFIX: Final = 30
_BASE: Final = 0x64600000  # 100.96.0.0
_BLOCKS: Final = 1 << 17  # /30 blocks up to 100.103.255.255
_DYING: Final = 0xA7011
BACKLOG: Final = 2048  # connections of one sandbox that wait for the broker to take them
BATCH: Final = 256  # elements of the rules in one step
_FEW_LINKS: Final = 16
_RUNNING_SECONDS: Final = 0.5
_SYSCTLS: Final = (
    ("ipv4/ip_forward", "0"),
    ("ipv4/conf/all/rp_filter", "1"),
    ("ipv4/conf/default/rp_filter", "1"),
    ("ipv4/conf/all/accept_redirects", "0"),
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/all/accept_source_route", "0"),
    ("ipv4/conf/default/accept_source_route", "0"),
    ("ipv4/icmp_echo_ignore_all", "1"),
    ("ipv6/conf/all/disable_ipv6", "1"),
    ("ipv6/conf/default/disable_ipv6", "1"),
    ("netfilter/nf_conntrack_udp_timeout", str(UDP_SECONDS)),
    ("netfilter/nf_conntrack_udp_timeout_stream", str(UDP_SECONDS)),
    ("netfilter/nf_conntrack_tcp_timeout_time_wait", str(CLOSED_SECONDS)),
    ("netfilter/nf_conntrack_tcp_timeout_close", str(CLOSED_SECONDS)),
    ("core/somaxconn", str(BACKLOG)),
)
_log = logging.getLogger(__name__)


class LinkFields(TypedDict):
    """A link as the record of its sandbox keeps it."""

    sandbox: str
    address: str
    gateway: str
    ifname: str
    index: int
    prefix: int


@dataclass(frozen=True, slots=True)
class Link:
    """One sandbox's way to the router: its address, the gateway (also its DNS server), and the router's interface."""

    sandbox: str
    address: str
    gateway: str
    ifname: str
    index: int
    prefix: int = PREFIX

    @property
    def is_carried(self) -> bool:
        """Whether there is no interface, and what the sandbox sends is carried to the broker by others."""
        return self.index == 0

    @property
    def resolv_conf(self) -> str:
        """Return the text of the sandbox's `/etc/resolv.conf`."""
        return f"nameserver {self.gateway}\noptions timeout:5 attempts:2\n"

    @property
    def is_tap(self) -> bool:
        """Whether a virtual machine holds its other end, which cannot be made again."""
        return self.ifname.startswith(TAP_PREFIX)

    def to_dict(self) -> LinkFields:
        return {
            "sandbox": self.sandbox,
            "address": self.address,
            "gateway": self.gateway,
            "ifname": self.ifname,
            "index": self.index,
            "prefix": self.prefix,
        }

    @classmethod
    def from_dict(cls, data: LinkFields) -> "Link":
        return cls(data["sandbox"], data["address"], data["gateway"], data["ifname"], data["index"])


@dataclass(frozen=True, slots=True)
class RouterSockets:
    """The broker's handles into the router namespace, and what a later daemon needs to find it again."""

    net: int
    log: socket.socket

    def filenos(self) -> tuple[int, int]:
        return (self.net, self.log.fileno())

    @classmethod
    def from_filenos(cls, fds: Iterable[int]) -> "RouterSockets":
        net, log = fds
        return cls(net, socket.socket(fileno=log))

    def close(self) -> None:
        os.close(self.net)
        self.log.close()


@dataclass(frozen=True, slots=True)
class LinkSockets:
    """Where the packets of one link arrive: DNS over UDP and TCP, and the connections that the broker passes on.

    They are bound to the link's interface and gateway address, so nobody else's packets come here, and what one sandbox sends
    waits in queues of its own.
    """

    dns_udp: socket.socket
    dns_tcp: socket.socket
    proxy: socket.socket

    @classmethod
    def open(cls, link: Link) -> "LinkSockets":
        """New ones, in the namespace of the calling thread. The link must exist there."""
        opened: list[socket.socket] = []
        try:
            for kind, port in (
                (socket.SOCK_DGRAM, DNS_PORT),
                (socket.SOCK_STREAM, DNS_PORT),
                (socket.SOCK_STREAM, BROKER_PORT),
            ):
                sock = socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK)
                opened.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, link.ifname.encode() + b"\0")
                if kind == socket.SOCK_DGRAM:
                    _set_receive_buffer(sock, _DNS_BUFFER)
                else:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((link.gateway, port))
                if kind == socket.SOCK_STREAM:
                    sock.listen(BACKLOG if port == BROKER_PORT else _DNS_BACKLOG)
        except BaseException:
            for sock in opened:
                sock.close()
            raise
        return cls(*opened)

    @classmethod
    def from_filenos(cls, fds: Iterable[int]) -> "LinkSockets":
        return cls(*(socket.socket(fileno=fd) for fd in fds))

    def filenos(self) -> list[int]:
        return [self.dns_udp.fileno(), self.dns_tcp.fileno(), self.proxy.fileno()]

    def close(self) -> None:
        for sock in (self.dns_udp, self.dns_tcp, self.proxy):
            sock.close()


class Router:
    """Links, addresses and rules of one router namespace."""

    def __init__(self, sockets: RouterSockets, nft: Nft, netlink: Netlink) -> None:
        self.sockets = sockets
        self._nft = nft
        self._netlink = netlink
        self._sweeper = Netlink()
        self._used: set[int] = set()
        self._closed_ends: dict[str, Netlink] = {}
        self._host_ports: dict[str, frozenset[int]] = {}
        self._opened: dict[str, set[tuple[str, int | None]]] = {}
        self._stale: deque[tuple[str, Entry]] = deque()
        self._next = 0
        self._level = 0

    @classmethod
    def create(cls) -> "Router":
        """A new namespace with its rules loaded before anything is connected to it; the thread moves there."""
        try:
            return cls._create()
        except (OSError, Internal) as err:
            raise Unsupported(
                f"network policy cannot be enforced on this machine: {err}",
                hint="it needs network namespaces, veth and nftables (with NAT) in the kernel; "
                "without them run sandboxes with no network",
            ) from err

    @classmethod
    def _create(cls) -> "Router":
        unshare_net()
        for path, value in _SYSCTLS:
            try:
                write_sysctl(path, value)
            except OSError as err:
                # Missing knobs (no IPv6, older kernels, user namespaces) weaken nothing: the rules drop all the same.
                _log.debug("router sysctl %s: %s", path, err)
        nft, netlink = Nft(), Netlink()
        nft.load()
        netlink.set_up(socket.if_nametoindex("lo"))
        return cls(_open_sockets(), nft, netlink)

    @classmethod
    def adopt(cls, sockets: RouterSockets) -> "Router":
        """The namespace a broker has kept alive; the thread moves there."""
        enter_net(sockets.net)
        return cls(sockets, Nft(), Netlink())

    def plug(self, sandbox: str, net: int, *, address: str | None = None) -> Link:
        """Join the sandbox's namespace by a veth pair, addressed on both ends, with the router's end still down.

        A tap device that waits there for us is a virtual machine's: it is moved here, and the machine gives itself the inner address.
        """
        block = self._reserve(address)
        self._share_table()
        gateway, inner = _address(block, 1), _address(block, 2)
        ifname = "at" + secrets.token_hex(5)
        try:
            with inside_net(net):
                inside = Netlink()
                _no_ipv6()
                tap = _find_tap()
            try:
                if tap is not None:
                    ifname = TAP_PREFIX + secrets.token_hex(5)
                    with inside:
                        inside.move(tap, ifname, self.sockets.net)
                    index = self._address_tap(ifname, gateway, inner)
                    return Link(sandbox, inner, gateway, ifname, index)
                index = self._wire_up(inside, net, ifname, gateway, inner)
            except BaseException:
                inside.close()
                raise
        except BaseException:
            self._used.discard(block)
            raise
        self._closed_ends[ifname] = inside
        return Link(sandbox, inner, gateway, ifname, index)

    def _share_table(self) -> None:
        """Divide the kernel's connection table, which all links share, so that all of them together cannot fill it."""
        level = max(_FEW_LINKS, 1 << (len(self._used) - 1).bit_length())
        if level != self._level:
            self._nft.limit(TableShare.of(_table_size(), level))
            self._level = level

    def _wire_up(self, inside: Netlink, net: int, ifname: str, gateway: str, inner: str) -> int:
        self._netlink.add_veth(ifname, SANDBOX_IFNAME, net)
        index = socket.if_nametoindex(ifname)
        try:
            self._netlink.add_address(index, gateway, PREFIX)
            with inside_net(net):
                inner_index, loopback = socket.if_nametoindex(SANDBOX_IFNAME), socket.if_nametoindex("lo")
            inside.set_up(loopback)
            inside.add_address(inner_index, inner, PREFIX)
            inside.set_up(inner_index)
            inside.add_default_route(inner_index, gateway)
            self._nft.admit(ifname, inner)
        except BaseException:
            self._netlink.set_group(index, _DYING)
            raise
        return index

    def _address_tap(self, ifname: str, gateway: str, inner: str) -> int:
        index = socket.if_nametoindex(ifname)
        try:
            self._netlink.add_address(index, gateway, PREFIX)
            self._nft.admit(ifname, inner)
        except BaseException:
            self._netlink.set_group(index, _DYING)
            raise
        return index

    def open_link(self, link: Link) -> None:
        """Bring the router's end up: from now on packets of the sandbox are looked at."""
        self._netlink.set_up(link.index)
        inside = self._closed_ends.pop(link.ifname, None)
        if inside is None:
            return
        # The sandbox's end starts to send a moment later; a first packet lost to that would cost a second.
        with inside:
            deadline = time.monotonic() + _RUNNING_SECONDS
            while not inside.is_running(SANDBOX_IFNAME) and time.monotonic() < deadline:
                time.sleep(0.0001)

    def known(self, link: Link) -> bool:
        """Does this link still exist here? If so its addresses are taken."""
        try:
            if socket.if_nametoindex(link.ifname) != link.index:
                return False
        except OSError:
            return False
        self._used.add(_block(link.gateway))
        return True

    def grant(self, link: Link, entries: Iterable[Entry]) -> None:
        """Open destinations for a link. Give few at a time: whoever else needs the rules waits meanwhile."""
        rows = list(entries)
        self._nft.grant(link.ifname, rows)
        self._opened.setdefault(link.ifname, set()).update((entry.address, entry.port) for entry in rows)

    def revoke(self, link: Link, entries: Iterable[Entry]) -> None:
        rows = list(entries)
        self._nft.revoke(link.ifname, rows)
        self._opened.get(link.ifname, set()).difference_update((entry.address, entry.port) for entry in rows)

    def set_host_ports(self, link: Link, ports: Iterable[int]) -> None:
        """Open exactly these ports of the gateway address, behind which the broker reaches the host's loopback."""
        wanted = frozenset(ports)
        before = self._host_ports.get(link.ifname, frozenset())
        self.revoke(link, [Entry(link.gateway, port) for port in before - wanted])
        self.grant(link, [Entry(link.gateway, port) for port in wanted])
        self._host_ports[link.ifname] = wanted

    def clear_stale(self) -> bool:
        """Delete some elements of links that are gone; are there more?"""
        by_link: dict[str, list[Entry]] = {}
        for _ in range(min(BATCH, len(self._stale))):
            ifname, entry = self._stale.popleft()
            by_link.setdefault(ifname, []).append(entry)
        for ifname, entries in by_link.items():
            self._nft.revoke(ifname, entries)
        return bool(self._stale)

    def flush_grants(self) -> None:
        self._nft.flush_grants()
        self._opened.clear()
        self._host_ports.clear()
        self._stale.clear()

    def unplug(self, link: Link) -> None:
        """Stop the sandbox's packets now; the interface itself goes with the next `sweep`. Idempotent."""
        self._nft.expel(link.ifname, link.address)
        try:
            if socket.if_nametoindex(link.ifname) == link.index:
                self._netlink.set_group(link.index, _DYING)
        except OSError as err:
            _log.debug("link %s is gone already: %s", link.ifname, err)
        self._used.discard(_block(link.gateway))
        self._host_ports.pop(link.ifname, None)
        self._stale.extend((link.ifname, Entry(*row)) for row in self._opened.pop(link.ifname, ()))
        inside = self._closed_ends.pop(link.ifname, None)
        if inside is not None:
            inside.close()

    def sweep(self) -> None:
        """Delete the unplugged interfaces: tens of milliseconds, whatever their number. May run on another thread."""
        self._sweeper.delete_group(_DYING)

    def forget_others(self, keep: Iterable[Link]) -> None:
        """Unplug every interface that belongs to none of these links: leftovers of a daemon that died."""
        names = {link.ifname for link in keep}
        for index, name in socket.if_nameindex():
            if name.startswith("at") and name not in names:
                self._netlink.set_group(index, _DYING)

    def close(self) -> None:
        self._nft.close()
        self._netlink.close()
        self._sweeper.close()
        for inside in self._closed_ends.values():
            inside.close()
        self.sockets.close()

    def _reserve(self, address: str | None) -> int:
        if address is not None:
            block = _block(address)
            if block in self._used or not 0 <= block < _BLOCKS:
                raise Exhausted(f"the address {address} is in use")
            self._used.add(block)
            return block
        # Round and round, so that an address comes back as late as possible.
        for step in range(_BLOCKS):
            block = (self._next + step) % _BLOCKS
            if block not in self._used:
                self._next = (block + 1) % _BLOCKS
                self._used.add(block)
                return block
        raise Exhausted("no address is free for another sandbox")


def _table_size() -> int:
    try:
        with open("/proc/sys/net/netfilter/nf_conntrack_max", encoding="ascii") as handle:
            return int(handle.read())
    except (OSError, ValueError):
        return 65536


def _address(block: int, host: int) -> str:
    return socket.inet_ntoa((_BASE + 4 * block + host).to_bytes(4, "big"))


def _block(address: str) -> int:
    return (int.from_bytes(socket.inet_aton(address), "big") - _BASE) // 4


def _find_tap() -> int | None:
    """The index of a tap device in the calling thread's namespace."""
    return next((index for index, name in socket.if_nameindex() if name == TAP_IFNAME), None)


def _no_ipv6() -> None:
    """New interfaces of the sandbox get no IPv6; its loopback keeps it. Root inside may undo it: the router drops it."""
    try:
        write_sysctl("ipv6/conf/default/disable_ipv6", "1")
    except OSError as err:
        _log.debug("sandbox without an IPv6 switch: %s", err)


def _open_sockets() -> RouterSockets:
    log = open_log(LOG_GROUP)
    _set_receive_buffer(log, _LOG_BUFFER)
    return RouterSockets(current_net(), log)


def _set_receive_buffer(sock: socket.socket, size: int) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size)
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


_SO_RCVBUFFORCE: Final = 33
_DNS_BACKLOG: Final = 64
_DNS_BUFFER: Final = 256 * 1024  # one sandbox's burst of packets
_LOG_BUFFER: Final = 16 << 20  # a burst of refused packets of many sandboxes; the rules limit that of each
