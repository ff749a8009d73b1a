"""The sandboxes' side of the broker: the sockets of the router namespace, and who stands at each.

A sandbox is known by the address of ours that its packet came to, or by the interface, together with its own address;
the router's rules have made sure that the two belong together. All that happens here is finding the sandbox and putting the
piece into its lane: the work itself is done there, and charged.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Any, Final

from atoll.egress.broker.dns_stream import DnsStream
from atoll.egress.broker.flow import Ask, Flow
from atoll.egress.broker.registry import Roster
from atoll.egress.broker.resolver import Report, Resolver
from atoll.egress.broker.sandbox import Member
from atoll.egress.router.nflog import Attempt, read_log
from atoll.egress.router.router import RouterSockets

_SO_ORIGINAL_DST: Final = 80
_IP_PKTINFO: Final = 8
_DNS_STREAMS_EACH: Final = 16
_TURN: Final = 128
_MAX_WAITING: Final = 256  # jobs of a lane to which a DNS packet is still added
_log = logging.getLogger(__name__)

Take = Callable[[Member, socket.socket], bool]


class Doors:
    """Reads what sandboxes send, and gives each piece to the resolver or to a new flow."""

    def __init__(self, sockets: RouterSockets, roster: Roster, resolver: Resolver, report: Report, ask: Ask) -> None:
        self._sockets = sockets
        self._roster = roster
        self._resolver = resolver
        self._report = report
        self._ask = ask
        self._opened = False

    def open(self) -> None:
        """Begin, once the sandboxes are known: until then what they send waits in the sockets."""
        if self._opened:
            return
        self._opened = True
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sockets.dns_udp, guarded, self._read_dns)
        loop.add_reader(self._sockets.dns_tcp, guarded, self._accept, self._sockets.dns_tcp, self._take_dns)
        loop.add_reader(self._sockets.proxy, guarded, self._accept, self._sockets.proxy, self._take_flow)
        loop.add_reader(self._sockets.log, guarded, self._read_log)

    def _accept(self, listener: socket.socket, take: Take) -> None:
        for _ in range(_TURN):
            try:
                client, (peer, _) = listener.accept()
            except BlockingIOError:
                return
            except OSError as err:
                _log.warning("accept: %s", err)  # out of descriptors, or the connection is gone
                self._rest(listener, take)
                return
            try:
                client.setblocking(False)
                member = self._roster.at_gateway(client.getsockname()[0], peer)
                if member is None or not take(member, client):
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    client.close()
            except OSError:
                client.close()

    def _rest(self, listener: socket.socket, take: Take) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(0.1, loop.add_reader, listener, guarded, self._accept, listener, take)

    def _take_flow(self, member: Member, client: socket.socket) -> bool:
        if not self._roster.take_room(member):
            address, port = original_target(client)
            self._report(member, "", address, port, "tcp", "too many connections at once")
            return False
        if member.lane.submit(self._begin_flow, member, client):
            return True
        self._roster.give_room(member)
        return False

    def _begin_flow(self, member: Member, client: socket.socket) -> None:
        try:
            target = original_target(client)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError:  # gone already
            client.close()
            self._roster.give_room(member)
            return
        Flow(member, client, target, self._report, self._ask).start()

    def _read_dns(self) -> None:
        """Give each packet to the lane of its sandbox. What does not fit there is lost, as packets are."""
        for _ in range(_TURN):
            try:
                packet, ancillary, _, source = self._sockets.dns_udp.recvmsg(4097, socket.CMSG_SPACE(12))
            except BlockingIOError:
                return
            info = next((data for level, kind, data in ancillary if (level, kind) == (0, _IP_PKTINFO)), b"")
            if len(info) < 12:
                continue
            index, local = struct.unpack_from("=i4s", info)
            member = self._roster.at_interface(index, source[0])
            if member is not None and member.lane.backlog < _MAX_WAITING:
                back = struct.pack("=i4s4s", 0, local, bytes(4))
                member.lane.submit(self._answer_packet, member, packet, source, back)

    def _answer_packet(self, member: Member, packet: bytes, source: Any, info: bytes) -> None:
        answer = self._resolver.answer(member, packet)
        if isinstance(answer, Coroutine):
            member.lane.spawn(self._answer_later(answer, source, info))
        elif answer is not None:
            self._send_packet(answer, source, info)

    async def _answer_later(self, work: Coroutine[Any, Any, bytes], source: Any, info: bytes) -> None:
        try:
            self._send_packet(await work, source, info)
        except Exception:
            _log.exception("DNS query")

    def _send_packet(self, answer: bytes, source: Any, info: bytes) -> None:
        try:
            self._sockets.dns_udp.sendmsg([answer], [(0, _IP_PKTINFO, info)], 0, source)
        except OSError as err:
            _log.debug("DNS answer: %s", err)

    def _take_dns(self, member: Member, client: socket.socket) -> bool:
        if len(member.streams) >= _DNS_STREAMS_EACH:
            return False
        stream = DnsStream(member, client, self._resolver)
        if not member.lane.submit(stream.start):
            stream.end()
        return True

    def _read_log(self) -> None:
        for attempt in islice(read_log(self._sockets.log), _TURN):
            member = self._roster.at_interface(attempt.index)
            if member is not None:
                self._report(member, *_explain(member, attempt))


def original_target(client: socket.socket) -> tuple[str, int]:
    """Where the sandbox wanted to go, before the router sent it here."""
    port, packed = struct.unpack_from("!2xH4s", client.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16))
    return socket.inet_ntoa(packed), port


def _explain(member: Member, attempt: Attempt) -> tuple[str, str, int, str, str]:
    """Name, address, port, protocol and reason of a packet that the router refused."""
    name = ""
    if attempt.prefix == "spoofed":
        reason = f"source address {attempt.source} is not the sandbox's own"
    elif attempt.protocol != "tcp":
        reason = f"{attempt.protocol} is not passed"
    elif names := member.grants.names(attempt.address):
        name, reason = names[0], f"port {attempt.port} is not open for this host"
    else:
        reason = "raw addresses are not reachable"
    return name, attempt.address, attempt.port, attempt.protocol, reason


def guarded(callback: Callable[..., None], *args: Any) -> None:
    """Run a callback of the loop; nothing it raises may stop the broker."""
    try:
        callback(*args)
    except Exception:
        _log.exception("in %s", getattr(callback, "__name__", callback))
