"""The broker process: the only way out of every sandbox, without rights, and hard to stop.

It is started by the daemon with sockets of the router namespace, gives up its rights, and takes orders over a Unix
socket whose listening end it keeps: when the daemon dies it goes on, and the next daemon gets the sockets back from it.
Without a daemon no name can be granted anew; open connections and granted addresses go on working.
"""

import asyncio
import encodings.idna  # noqa: F401  (imported while the files can still be read)
import fcntl
import json
import logging
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

from atoll.egress import presets, wire
from atoll.egress.confine import drop_rights, raise_file_limit
from atoll.egress.flow import Flow
from atoll.egress.member import Bucket, EgressEvent, Member
from atoll.egress.netlink import enter_net
from atoll.egress.nflog import read_log
from atoll.egress.nft import Entry
from atoll.egress.policy import EgressPolicy
from atoll.egress.resolver import Resolver
from atoll.egress.router import Link, RouterSockets
from atoll.egress.upstream import Upstream

GRANT_SECONDS: Final = 5.0
_ORPHAN_SECONDS: Final = 60.0
_SWEEP_SECONDS: Final = 15.0
_SO_ORIGINAL_DST: Final = 80
_IP_PKTINFO: Final = 8
_SIOCGIFNAME: Final = 0x8910
_MAX_FLOWS: Final = 2048
_OWN_FLOWS: Final = 64
_MAX_DNS_STREAMS: Final = 512
_log = logging.getLogger("atoll.egress.broker")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the daemon says when it starts a broker, as JSON in the only argument."""

    fds: list[int]
    control: int
    daemon_uid: int
    uid: int | None = None
    gid: int | None = None
    host_net: int | None = None
    servers: list[list[Any]] | None = None
    hosts_file: str = "/etc/hosts"


class Broker:
    """All sandboxes' members, the sockets they reach, and the line to the daemon."""

    def __init__(self, settings: Settings, sockets: RouterSockets, file_limit: int) -> None:
        self._settings = settings
        self._sockets = sockets
        self._members: dict[str, Member] = {}
        self._by_gateway: dict[str, Member] = {}
        self._by_index: dict[int, Member] = {}
        servers = tuple((str(host), int(port)) for host, port in settings.servers or ())
        upstream = Upstream(servers, hosts_file=settings.hosts_file)
        self._resolver = Resolver(upstream, self._open_way, self.report)
        # Two descriptors a connection. A few are every sandbox's due; more only while a quarter of all is left.
        self._shared_flows = max(_OWN_FLOWS, (file_limit - 256) * 3 // 8)
        self._daemon: asyncio.StreamWriter | None = None
        self._grants: dict[int, asyncio.Future[bool]] = {}
        self._grant_number = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dns_streams: dict[str, int] = {}
        self._untold: deque[EgressEvent] = deque(maxlen=1000)
        self._alone_since = time.monotonic()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(
            lambda _, context: _log.error("%s", context.get("message"), exc_info=context.get("exception"))
        )
        control = socket.socket(fileno=self._settings.control)
        control.setblocking(False)
        loop.add_reader(control, self._guarded, self._accept_daemon, control)
        loop.add_reader(self._sockets.dns_udp, self._guarded, self._read_dns)
        loop.add_reader(self._sockets.dns_tcp, self._guarded, self._accept, self._sockets.dns_tcp, self._take_dns)
        loop.add_reader(self._sockets.proxy, self._guarded, self._accept, self._sockets.proxy, self._take_flow)
        loop.add_reader(self._sockets.log, self._guarded, self._read_log)
        self._spawn(self._sweep())
        await self._stop.wait()

    def _guarded(self, callback: Any, *args: Any) -> None:
        try:
            callback(*args)
        except Exception:
            _log.exception("in %s", getattr(callback, "__name__", callback))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Sandboxes' side

    def _accept(self, listener: socket.socket, take: Any) -> None:
        for _ in range(64):
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
                member = self._by_gateway.get(client.getsockname()[0])
                if member is None or member.link.address != peer or not take(member, client):
                    _reset(client)
            except OSError:
                client.close()

    def _rest(self, listener: socket.socket, take: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(0.1, loop.add_reader, listener, self._guarded, self._accept, listener, take)

    def _take_flow(self, member: Member, client: socket.socket) -> bool:
        raw = client.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
        port, packed = struct.unpack_from("!2xH4s", raw)
        target = (socket.inet_ntoa(packed), port)
        if not self._has_room(member):
            self.report(member, "", target[0], port, "tcp", "too many connections at once")
            return False
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        Flow(member, client, target, self.report).start()
        return True

    def _has_room(self, member: Member) -> bool:
        mine = len(member.flows)
        if mine < _OWN_FLOWS:
            return True
        return mine < _MAX_FLOWS and sum(len(each.flows) for each in self._members.values()) < self._shared_flows

    def _read_dns(self) -> None:
        for _ in range(64):
            try:
                packet, ancillary, _, source = self._sockets.dns_udp.recvmsg(4097, socket.CMSG_SPACE(12))
            except BlockingIOError:
                return
            info = next((data for level, kind, data in ancillary if (level, kind) == (0, _IP_PKTINFO)), None)
            if info is None or len(info) < 12:
                continue
            index, local = struct.unpack_from("=i4s", info)
            member = self._by_index.get(index)
            if member is None or member.link.address != source[0]:
                continue
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
        open_now = self._dns_streams.get(sandbox, 0)
        if open_now >= 16 or sum(self._dns_streams.values()) >= _MAX_DNS_STREAMS:
            return False
        self._dns_streams[sandbox] = open_now + 1
        self._spawn(self._serve_dns_stream(member, client))
        return True

    async def _serve_dns_stream(self, member: Member, client: socket.socket) -> None:
        loop, data = asyncio.get_running_loop(), bytearray()
        try:
            with client:
                for _ in range(32):
                    while len(data) < 2 or len(data) < 2 + (data[0] << 8 | data[1]):
                        async with asyncio.timeout(10):
                            got = await loop.sock_recv(client, 4096)
                        if not got:
                            return
                        data += got
                    size = data[0] << 8 | data[1]
                    answer = await self._resolver.answer(member, bytes(data[2 : 2 + size]))
                    del data[: 2 + size]
                    if answer is None:
                        return
                    async with asyncio.timeout(10):
                        await loop.sock_sendall(client, struct.pack("!H", len(answer)) + answer)
        except (OSError, TimeoutError) as err:
            _log.debug("DNS stream: %s", err)
        except Exception:
            _log.exception("DNS stream")
        finally:
            left = self._dns_streams.pop(member.link.sandbox, 1) - 1
            if left > 0:
                self._dns_streams[member.link.sandbox] = left

    def _read_log(self) -> None:
        for attempt in read_log(self._sockets.log):
            member = self._by_index.get(attempt.index)
            if member is None:
                continue
            if attempt.prefix == "spoofed":
                reason = f"source address {attempt.source} is not the sandbox's own"
            elif attempt.protocol == "tcp":
                names = member.grants.names(attempt.address)
                reason = (
                    f"port {attempt.port} is not open for this host" if names else "raw addresses are not reachable"
                )
                self.report(member, names[0] if names else "", attempt.address, attempt.port, "tcp", reason)
                continue
            else:
                reason = f"{attempt.protocol} is not passed"
            self.report(member, "", attempt.address, attempt.port, attempt.protocol, reason)

    # The daemon's side

    def report(self, member: Member, name: str, address: str, port: int, protocol: str, reason: str) -> None:
        event = member.refusal(name, address, port, protocol, reason)
        if event is not None and not self._tell({"op": "event", "event": event.to_dict()}):
            self._untold.append(event)

    def _tell(self, message: wire.Message) -> bool:
        writer = self._daemon
        if writer is None or writer.is_closing() or writer.transport.get_write_buffer_size() > 8 << 20:
            return False
        writer.write(wire.encode(message))
        return True

    async def _open_way(self, member: Member, entries: list[Entry]) -> bool:
        self._grant_number += 1
        number = self._grant_number
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._grants[number] = done
        rows = [[entry.address, entry.port, entry.seconds] for entry in entries]
        try:
            if not self._tell({"op": "grant", "g": number, "sandbox": member.link.sandbox, "entries": rows}):
                return False
            async with asyncio.timeout(GRANT_SECONDS):
                return await done
        except TimeoutError:
            return False
        finally:
            self._grants.pop(number, None)

    def _accept_daemon(self, control: socket.socket) -> None:
        conn, _ = control.accept()
        _, uid, _ = struct.unpack("3i", conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (self._settings.daemon_uid, 0):
            conn.close()
            return
        conn.setblocking(True)
        conn.settimeout(5)
        socket.send_fds(conn, [bytes((wire.VERSION,))], list(self._sockets.filenos()))
        conn.setblocking(False)
        self._spawn(self._serve_daemon(conn))

    async def _serve_daemon(self, conn: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=conn, limit=1 << 20)
        if self._daemon is not None:
            self._daemon.close()
        self._daemon = writer
        while self._untold:
            self._tell({"op": "event", "event": self._untold.popleft().to_dict()})
        try:
            while True:
                message = await wire.receive(reader)
                if message.get("op") == "granted":
                    waiting = self._grants.get(int(message["g"]))
                    if waiting is not None and not waiting.done():
                        waiting.set_result(bool(message.get("ok")))
                    continue
                writer.write(wire.encode({"n": message.get("n"), **self._obey(message)}))
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            _log.info("the daemon hung up")
        except Exception:
            _log.exception("control message")
        finally:
            writer.close()
            if self._daemon is writer:
                self._daemon = None
                self._alone_since = time.monotonic()

    def _obey(self, message: wire.Message) -> wire.Message:
        try:
            match message.get("op"):
                case "register":
                    return self._register(Link.from_dict(message["link"]), EgressPolicy.from_dict(message["policy"]))
                case "unregister":
                    return {"ok": True, "counters": self._unregister(str(message["sandbox"]))}
                case "counters":
                    member = self._members.get(str(message["sandbox"]))
                    return {"ok": True, "counters": member.counters() if member else {}}
                case "list":
                    return {
                        "ok": True,
                        "pid": os.getpid(),
                        "sandboxes": {i: m.link.to_dict() for i, m in self._members.items()},
                    }
                case "stop":
                    asyncio.get_running_loop().call_later(0.05, self._stop.set)
                    return {"ok": True}
                case other:
                    return {"ok": False, "error": f"unknown order {other!r}"}
        except Exception as err:
            _log.exception("order failed")
            return {"ok": False, "error": str(err)}

    def _register(self, link: Link, policy: EgressPolicy) -> wire.Message:
        """A new sandbox, or a new policy for a known one: what it no longer allows ends here and now."""
        member = self._members.get(link.sandbox)
        if member is not None and member.link != link:
            self._unregister(link.sandbox)
            member = None
        if member is None:
            member = Member(link, policy)
            self._members[link.sandbox] = self._by_gateway[link.gateway] = self._by_index[link.index] = member
            return {"ok": True, "grant": [], "revoke": []}
        before = dict.fromkeys((address, port) for address, port, _ in _open_entries(member))
        member.policy = policy
        member.grants.revoke(lambda name: policy.decide(name).allowed)
        for flow in list(member.flows):
            if not flow.still_allowed():
                flow.cut()
        after = _open_entries(member)
        for address, port, _ in after:
            before.pop((address, port), None)
        return {"ok": True, "grant": after, "revoke": [[address, port, None] for address, port in before]}

    def _unregister(self, sandbox: str) -> dict[str, Any]:
        member = self._members.pop(sandbox, None)
        if member is None:
            return {}
        self._by_gateway.pop(member.link.gateway, None)
        self._by_index.pop(member.link.index, None)
        member.policy = EgressPolicy()
        for flow in list(member.flows):
            flow.cut()
        return member.counters()

    async def _sweep(self) -> None:
        """Now and then: end idle connections, forget old grants, and leave when nobody is left."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            try:
                for member in list(self._members.values()):
                    member.grants.expire()
                    for flow in list(member.flows):
                        if flow.is_stale(now):
                            flow.cut()
                    if self._daemon is None and not self._link_exists(member.link):
                        self._unregister(member.link.sandbox)
                if self._daemon is None and not self._members and now - self._alone_since > _ORPHAN_SECONDS:
                    self._stop.set()
            except Exception:
                _log.exception("sweep")

    def _link_exists(self, link: Link) -> bool:
        """Asked through a socket of the router namespace, which needs no rights."""
        request = struct.pack("16si20x", b"", link.index)
        try:
            answer = fcntl.ioctl(self._sockets.dns_udp, _SIOCGIFNAME, request)
        except OSError:
            return False
        return answer[:16].rstrip(b"\0").decode() == link.ifname


def _open_entries(member: Member) -> list[list[Any]]:
    """What the router's rules should hold for this sandbox: address, port or None, seconds."""
    longest: dict[tuple[str, int | None], int] = {}
    for address, name, left in member.grants.live():
        ports = member.policy.ports(name)
        for port in (None,) if ports is None else ports:
            longest[address, port] = max(longest.get((address, port), 1), int(left) + 1)
    return [[address, port, seconds] for (address, port), seconds in longest.items()]


def _reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class _Calm(logging.Filter):
    """At most a few lines a second: what a sandbox can provoke must not fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._bucket = Bucket(2, 100)

    def filter(self, record: logging.LogRecord) -> bool:
        return self._bucket.take()


async def _main(settings: Settings, sockets: RouterSockets, file_limit: int) -> None:
    await Broker(settings, sockets, file_limit).run()


def main() -> None:
    """Entry point: `python -m atoll.egress.broker SETTINGS`."""
    logging.basicConfig(level=os.environ.get("ATOLL_LOG", "WARNING"), format="%(asctime)s %(name)s %(message)s")
    logging.getLogger().handlers[0].addFilter(_Calm())
    settings = Settings(**json.loads(sys.argv[1]))
    file_limit = raise_file_limit()
    sockets = RouterSockets.from_filenos(settings.fds)
    if settings.host_net is not None:
        enter_net(settings.host_net)
        os.close(settings.host_net)
    presets.default_hosts()  # read while the files can still be read
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        runner.get_loop()
        drop_rights(settings.uid, settings.gid)
        runner.run(_main(settings, sockets, file_limit))


if __name__ == "__main__":
    main()
