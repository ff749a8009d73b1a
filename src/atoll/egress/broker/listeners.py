"""The sandboxes' side of the broker: the sockets of the router namespace, and who stands at each.

A sandbox is known by the address of ours that its packet came to, or by the interface, together with its own address;
the router's rules have made sure that the two belong together.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any, Final

from atoll.egress.broker.flow import Ask, Flow
from atoll.egress.broker.registry import Roster
from atoll.egress.broker.resolver import Report, Resolver
from atoll.egress.broker.sandbox import Member
from atoll.egress.router.nflog import Attempt, read_log
from atoll.egress.router.router import RouterSockets

_SO_ORIGINAL_DST: Final = 80
_IP_PKTINFO: Final = 8
_DNS_STREAMS: Final = 512
_DNS_STREAMS_EACH: Final = 16
_QUERIES_PER_STREAM: Final = 32
_STREAM_SECONDS: Final = 10
_TURN: Final = 64
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
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: dict[str, int] = {}
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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        raw = client.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
        port, packed = struct.unpack_from("!2xH4s", raw)
        target = (socket.inet_ntoa(packed), port)
        if not self._roster.has_room(member):
            self._report(member, "", target[0], port, "tcp", "too many connections at once")
            return False
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        Flow(member, client, target, self._report, self._ask).start()
        return True

    def _read_dns(self) -> None:
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
            if member is not None:
                self._spawn(self._answer_dns(member, packet, source, struct.pack("=i4s4s", 0, local, bytes(4))))

    async def _answer_dns(self, member: Member, packet: bytes, source: Any, info: bytes) -> None:
        try:
            answer = await self._resolver.answer(member, packet)
            if answer is not None:
                self._sockets.dns_udp.sendmsg([answer], [(0, _IP_PKTINFO, info)], 0, source)
        except OSError as err:
            _log.debug("DNS answer: %s", err)
        except Exception:
            _log.exception("DNS query")

    def _take_dns(self, member: Member, client: socket.socket) -> bool:
        sandbox = member.link.sandbox
        open_now = self._streams.get(sandbox, 0)
        if open_now >= _DNS_STREAMS_EACH or sum(self._streams.values()) >= _DNS_STREAMS:
            return False
        self._streams[sandbox] = open_now + 1
        self._spawn(self._serve_dns(member, client))
        return True

    async def _serve_dns(self, member: Member, client: socket.socket) -> None:
        try:
            with client:
                await self._answer_stream(member, client)
        except (OSError, TimeoutError) as err:
            _log.debug("DNS stream: %s", err)
        except Exception:
            _log.exception("DNS stream")
        finally:
            left = self._streams.pop(member.link.sandbox, 1) - 1
            if left > 0:
                self._streams[member.link.sandbox] = left

    async def _answer_stream(self, member: Member, client: socket.socket) -> None:
        loop, data = asyncio.get_running_loop(), bytearray()
        for _ in range(_QUERIES_PER_STREAM):
            while len(data) < 2 or len(data) < 2 + (data[0] << 8 | data[1]):
                async with asyncio.timeout(_STREAM_SECONDS):
                    got = await loop.sock_recv(client, 4096)
                if not got:
                    return
                data += got
            size = data[0] << 8 | data[1]
            answer = await self._resolver.answer(member, bytes(data[2 : 2 + size]))
            del data[: 2 + size]
            if answer is None:
                return
            async with asyncio.timeout(_STREAM_SECONDS):
                await loop.sock_sendall(client, struct.pack("!H", len(answer)) + answer)

    def _read_log(self) -> None:
        for attempt in read_log(self._sockets.log):
            member = self._roster.at_interface(attempt.index)
            if member is not None:
                self._report(member, *_explain(member, attempt))


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
