"""The broker process: the only way out of every sandbox, without rights, and hard to stop.

It is started by the daemon with sockets of the router namespace, gives up its rights, and takes orders over a Unix
socket whose listening end it keeps: when the daemon dies it goes on, and the next daemon gets the sockets back from it.
Without a daemon no name can be granted anew and nobody can be asked; open connections and granted addresses go on working.
"""

import asyncio
import encodings.ascii  # codecs are imported while the files can still be read: an interpreter may lie in a private directory
import encodings.idna
import encodings.latin_1
import encodings.punycode  # noqa: F401
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

from atoll.egress import presets
from atoll.egress.broker.carrier import CarrierPlace
from atoll.egress.broker.confine import drop_rights, raise_file_limit
from atoll.egress.broker.held import Consents
from atoll.egress.broker.listeners import Doors, guarded
from atoll.egress.broker.registry import Roster
from atoll.egress.broker.resolver import Resolver
from atoll.egress.broker.sandbox import Bucket, EgressEvent, Member
from atoll.egress.broker.turns import Turns
from atoll.egress.broker.upstream import Upstream
from atoll.egress.control import wire
from atoll.egress.limits import Limits
from atoll.egress.policy import EgressPolicy
from atoll.egress.router.netlink import enter_net
from atoll.egress.router.nft import Entry
from atoll.egress.router.router import Link, LinkSockets, RouterSockets

GRANT_SECONDS: Final = 5.0
_ORPHAN_SECONDS: Final = 60.0
_SWEEP_SECONDS: Final = 15.0
_SIOCGIFNAME: Final = 0x8910
_log = logging.getLogger("atoll.egress.broker.process")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a broker at its start: JSON in the only argument."""

    fds: list[int]
    control: int
    daemon_uid: int
    uid: int | None = None
    gid: int | None = None
    host_net: int | None = None
    servers: list[list[Any]] | None = None
    hosts_file: str = "/etc/hosts"
    limits: dict[str, int] | None = None


class Broker:
    """The doors towards sandboxes, and the line to the daemon."""

    def __init__(self, settings: Settings, sockets: RouterSockets, file_limit: int) -> None:
        self._settings = settings
        self._sockets = sockets
        turns = Turns()
        self._crowd = turns.crowd
        self._crowd.tell = self._tell_crowd
        self._roster = Roster(file_limit, self._send, turns, Limits(**settings.limits or {}))
        servers = tuple((str(host), int(port)) for host, port in settings.servers or ())
        upstream = Upstream(servers, hosts_file=settings.hosts_file)
        resolver = Resolver(upstream, self._open_way, self._report)
        self._doors = Doors(sockets, self._roster, resolver, self._report, Consents(self._question).ask)
        self._daemon: asyncio.StreamWriter | None = None
        self._handover: socket.socket | None = None
        self._handed: dict[str, LinkSockets | socket.socket] = {}
        self._questions: dict[int, asyncio.Future[wire.Message]] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
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
        loop.add_reader(control, guarded, self._accept_daemon, control)
        self._spawn(self._sweep())
        await self._stop.wait()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _report(self, member: Member, name: str, address: str, port: int, protocol: str, reason: str) -> None:
        event = member.refusal(name, address, port, protocol, reason)
        if event is not None:
            self._send(event)

    def _send(self, event: EgressEvent) -> None:
        if not self._tell({"op": "event", "event": event.to_dict()}):
            self._untold.append(event)

    def _tell_crowd(self, there: bool) -> None:
        """Ask the daemon for another priority: having given up all rights, the broker could lower its own but not raise it."""
        self._tell({"op": "crowd", "there": there})

    def _tell(self, message: wire.Message) -> bool:
        writer = self._daemon
        if writer is None or writer.is_closing() or writer.transport.get_write_buffer_size() > 8 << 20:
            return False
        writer.write(wire.encode(message))
        return True

    async def _open_way(self, member: Member, entries: list[Entry]) -> bool:
        if member.link.is_carried:
            return True  # no rules of a router are between it and us
        rows = [[entry.address, entry.port, entry.seconds] for entry in entries]
        answer = await self._question({"op": "grant", "sandbox": member.link.sandbox, "entries": rows}, GRANT_SECONDS)
        return bool(answer.get("ok"))

    async def _question(self, message: wire.Message, seconds: float) -> wire.Message:
        """Ask the daemon something; an empty answer when there is none, or none in time."""
        self._number += 1
        number = self._number
        answer: asyncio.Future[wire.Message] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            if not self._tell({**message, "q": number}):
                return {}
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            return {}
        finally:
            self._questions.pop(number, None)

    def _accept_daemon(self, control: socket.socket) -> None:
        conn, _ = control.accept()
        _, uid, _ = struct.unpack("3i", conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (self._settings.daemon_uid, 0):
            conn.close()
            return
        conn.setblocking(True)
        conn.settimeout(5)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        net, log = self._sockets.filenos()
        with theirs:
            greeting = wire.GREETING.pack(wire.VERSION, os.getpid())
            socket.send_fds(conn, [greeting], [net, theirs.fileno(), log])
        conn.setblocking(False)
        ours.setblocking(False)
        self._forget_handed()
        self._handover = ours
        self._spawn(self._serve_daemon(conn))

    def _forget_handed(self) -> None:
        if self._handover is not None:
            self._handover.close()
        for sockets in self._handed.values():
            sockets.close()
        self._handed.clear()

    def _take_sockets(self, link: Link) -> LinkSockets | CarrierPlace:
        """The sockets of a new link, which the daemon sends before it says that the sandbox is there."""
        if link.is_carried:
            return CarrierPlace()
        self._take_handed()
        found = self._handed.pop(link.ifname, None)
        if not isinstance(found, LinkSockets):
            raise ValueError(f"no sockets came for {link.ifname}")
        return found

    def _carry(self, sandbox: str) -> None:
        """Take the socket over which what a sandbox sends is brought from now on."""
        self._take_handed()
        found, member = self._handed.pop(sandbox, None), self._roster.get(sandbox)
        if not isinstance(found, socket.socket):
            raise ValueError(f"no socket came for {sandbox}")
        if member is None:
            found.close()
            raise ValueError(f"{sandbox} is not known")
        self._doors.carry(member, found)

    def _take_handed(self) -> None:
        while self._handover is not None:
            try:
                name, fds, _, _ = socket.recv_fds(self._handover, 64, 8)
            except BlockingIOError:
                break
            if not name:
                break
            late = self._handed.pop(name.decode(), None)
            if late is not None:
                late.close()
            self._handed[name.decode()] = (
                LinkSockets.from_filenos(fds) if len(fds) > 1 else socket.socket(fileno=fds[0])
            )

    async def _serve_daemon(self, conn: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=conn, limit=1 << 20)
        if self._daemon is not None:
            self._daemon.close()
        self._daemon = writer
        self._tell_crowd(self._crowd.there)  # the daemon before may have left it with another priority
        while self._untold:
            self._tell({"op": "event", "event": self._untold.popleft().to_dict()})
        try:
            while True:
                message = await wire.receive(reader)
                if message.get("op") == "answer":
                    waiting = self._questions.get(int(message["q"]))
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                    continue
                writer.write(wire.encode({"n": message.get("n"), **self._carry_out(message)}))
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            _log.info("the daemon hung up")
        except Exception:
            _log.exception("control message")
        finally:
            writer.close()
            for waiting in self._questions.values():  # who asked that daemon gets no answer any more
                if not waiting.done():
                    waiting.set_result({})
            if self._daemon is writer:
                self._daemon = None
                self._alone_since = time.monotonic()

    def _carry_out(self, message: wire.Message) -> wire.Message:
        try:
            match message.get("op"):
                case "register":
                    link, policy = Link.from_dict(message["link"]), EgressPolicy.from_dict(message["policy"])
                    grant, revoke = self._roster.put(link, policy, self._take_sockets)
                    member = self._roster.get(link.sandbox)
                    assert member is not None
                    self._doors.admit(member)
                    return {"ok": True, "grant": grant, "revoke": revoke}
                case "carry":
                    self._carry(str(message["sandbox"]))
                    return {"ok": True}
                case "unregister":
                    return {"ok": True, "counters": self._roster.remove(str(message["sandbox"]))}
                case "counters":
                    member = self._roster.get(str(message["sandbox"]))
                    return {"ok": True, "counters": member.counters() if member else {}}
                case "list":
                    links = {member.link.sandbox: member.link.ifname for member in self._roster}
                    return {"ok": True, "sandboxes": links}
                case "ping":
                    return {"ok": True}
                case "open":
                    self._doors.open()
                    return {"ok": True}
                case "stop":
                    asyncio.get_running_loop().call_later(0.05, self._stop.set)
                    return {"ok": True}
                case other:
                    return {"ok": False, "error": f"unknown order {other!r}"}
        except Exception as err:
            _log.exception("order failed")
            return {"ok": False, "error": str(err)}

    async def _sweep(self) -> None:
        """Now and then: end idle connections, forget old grants, and leave when nobody is left."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            try:
                self._roster.ports.expire()
                for member in self._roster:
                    member.grants.expire()
                    for flow in list(member.flows):
                        if flow.is_stale(now):
                            flow.cut()
                    if self._daemon is None and not _link_exists(member):
                        self._roster.remove(member.link.sandbox)
                if self._daemon is None and not self._roster and now - self._alone_since > _ORPHAN_SECONDS:
                    self._stop.set()
            except Exception:
                _log.exception("sweep")


def _link_exists(member: Member) -> bool:
    """Asked through a socket of the router namespace, which needs no rights."""
    if not isinstance(member.sockets, LinkSockets):
        return False  # without a daemon nobody carries for it
    request = struct.pack("16si20x", b"", member.link.index)
    try:
        answer = fcntl.ioctl(member.sockets.dns_udp, _SIOCGIFNAME, request)
    except OSError:
        return False
    return answer[:16].rstrip(b"\0").decode() == member.link.ifname


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
    """Entry point: `python -m atoll.egress.broker.process SETTINGS`."""
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
