"""The sandboxes' side of the broker: the sockets where each one's packets arrive.

Each sandbox has listening sockets and a DNS socket of its own, bound to its link. They are served in its lane like its
connections: taking a connection or a packet is work of that sandbox, is charged to it and waits for its turn. What it sends faster than
that waits in the kernel's queues of these sockets, where it is in nobody else's way.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Any, Final

from atoll.egress.broker.carrier import Carrier, CarrierPlace
from atoll.egress.broker.dns_stream import DnsStream
from atoll.egress.broker.flow import Ask, Flow
from atoll.egress.broker.registry import Roster
from atoll.egress.broker.resolver import Report, Resolver
from atoll.egress.broker.sandbox import Member
from atoll.egress.router.nflog import Attempt, read_log
from atoll.egress.router.router import LinkSockets, RouterSockets

_SO_ORIGINAL_DST: Final = 80
_DNS_STREAMS_EACH: Final = 16
_AT_ONCE: Final = 4  # packets or connections, before the lane looks at its other sockets
_LOG_AT_ONCE: Final = 16
_MAX_WAITING: Final = 256  # jobs of a lane to which a refused packet is still added
_RESET: Final = struct.pack("ii", 1, 0)
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
        asyncio.get_running_loop().add_reader(self._sockets.log, guarded, self._read_log)
        for member in self._roster:
            self.admit(member)

    def admit(self, member: Member) -> None:
        """Begin to read what this sandbox sends. Again is no error."""
        if not self._opened:
            return
        lane, sockets = member.lane, member.sockets
        if not isinstance(sockets, LinkSockets):
            return  # what it sends is brought by `carry`
        lane.add_reader(sockets.dns_udp, self._read_dns, member, sockets.dns_udp)
        lane.add_reader(sockets.dns_tcp, self._accept, member, sockets.dns_tcp, self._take_dns)
        lane.add_reader(sockets.proxy, self._accept, member, sockets.proxy, self._take_flow)

    def carry(self, member: Member, sock: socket.socket) -> None:
        """From now on this socket brings what a sandbox without a link sends, in place of an older one."""
        place = member.sockets
        if not isinstance(place, CarrierPlace):
            raise ValueError(f"{member.link.sandbox} has a link of its own")
        place.put(lambda: Carrier(member, sock, self._roster, self._resolver, self._report, self._ask))

    def _accept(self, member: Member, listener: socket.socket, take: Take) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, (peer, _) = listener.accept()
            except BlockingIOError:
                return
            except OSError as err:
                _log.warning("accept: %s", err)  # out of descriptors, or the connection is gone
                self._rest(member, listener, take)
                return
            try:
                client.setblocking(False)
                if peer != member.link.address or not take(member, client):
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    client.close()
            except OSError:
                client.close()

    def _rest(self, member: Member, listener: socket.socket, take: Take) -> None:
        member.lane.remove_reader(listener)
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, member.lane.add_reader, listener, self._accept, member, listener, take)

    def _take_flow(self, member: Member, client: socket.socket) -> bool:
        target = original_target(client)
        if not self._roster.take_room(member):
            self._report(member, "", *target, "tcp", "too many connections at once")
            return False
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError:  # gone already
            self._roster.give_room(member)
            return False
        Flow(member, client, target, self._report, self._ask).start()
        return True

    def _read_dns(self, member: Member, udp: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                packet, source = udp.recvfrom(4097)
            except BlockingIOError:
                return
            except OSError as err:  # the link is going away
                _log.debug("DNS packet: %s", err)
                return
            if source[0] == member.link.address:
                self._answer_packet(member, packet, udp, source)

    def _answer_packet(self, member: Member, packet: bytes, udp: socket.socket, source: Any) -> None:
        answer = self._resolver.answer(member, packet)
        if isinstance(answer, Coroutine):
            member.lane.spawn(self._answer_later(udp, answer, source))
        elif answer is not None:
            self._send_packet(udp, answer, source)

    async def _answer_later(self, udp: socket.socket, work: Coroutine[Any, Any, bytes], source: Any) -> None:
        try:
            self._send_packet(udp, await work, source)
        except Exception:
            _log.exception("DNS query")

    def _send_packet(self, udp: socket.socket, answer: bytes, source: Any) -> None:
        try:
            udp.sendto(answer, source)
        except OSError as err:
            _log.debug("DNS answer: %s", err)

    def _take_dns(self, member: Member, client: socket.socket) -> bool:
        if len(member.streams) >= _DNS_STREAMS_EACH:
            return False
        DnsStream(member, client, self._resolver).start()
        return True

    def _read_log(self) -> None:
        """Give each refused packet to the lane of its sandbox. All share this socket, and the rules limit what each puts there."""
        for attempt in islice(read_log(self._sockets.log), _LOG_AT_ONCE):
            member = self._roster.at_interface(attempt.index)
            if member is not None and member.lane.backlog < _MAX_WAITING:
                member.lane.submit(self._report_attempt, member, attempt)

    def _report_attempt(self, member: Member, attempt: Attempt) -> None:
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
