"""One connection of a sandbox, from accept to end: who asks, whom for really, may it, and then bytes.

Nothing is dialled, and no byte leaves, before the name that was resolved and the name that is really sent agree and
are allowed. The address dialled is the one the sandbox connected to, which the resolver gave it, judged once more here.
Every step runs in the sandbox's lane, and every byte that is held back is charged to it.
"""

import asyncio
import errno
import logging
import select
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Final

from atoll import accounts
from atoll.egress.addresses import refusal
from atoll.egress.broker.relay import Relay
from atoll.egress.broker.sandbox import Member
from atoll.egress.parse import hello
from atoll.egress.parse.http_head import HeadError, RequestGuard
from atoll.egress.policy import HOST_NAME
from atoll.egress.requests import Request
from atoll.errors import Exhausted

FIRST_BYTES_SECONDS: Final = 15.0
DIAL_SECONDS: Final = 20.0
IDLE_SECONDS: Final = 2 * 3600.0
HALF_CLOSED_SECONDS: Final = 180.0
_TLS_ALERT: Final = b"\x15\x03\x01\x00\x02\x02\x70"  # fatal, unrecognized_name
_HARD_CLOSE: Final = struct.pack("ii", 1, 0)
_LOOK_SECONDS: Final = 1.0
_ESTABLISHED: Final = 1
_FIRST_READ: Final = 16384
_MAX_FIRST_READS: Final = 512
_log = logging.getLogger(__name__)

Report = Callable[[Member, str, str, int, str, str], None]
Ask = Callable[[Member, str, int], Awaitable[str]]  # why a person said no, or nothing


class Refused(Exception):
    """The connection may not be; the text is the reason shown to people."""

    def __init__(self, reason: str, name: str = "", goodbye: bytes = b"") -> None:
        super().__init__(reason)
        self.reason, self.name, self.goodbye = reason, name, goodbye


class Flow:
    """A connection in the making or open. `run` brings it up; `cut` ends it at any time."""

    def __init__(
        self, member: Member, client: socket.socket, target: tuple[str, int], report: Report, ask: Ask
    ) -> None:
        self.member = member
        self.client = client
        self.address, self.port = target
        self._far = member.standins.real(self.address)
        self.names: set[str] = set()
        self.last_active = time.monotonic()
        self._report = report
        self._ask = ask
        self._to_ask: set[str] = set()  # names that wait for a person though another name of the address does not
        self._approved: set[str] | None = None  # nothing before it was asked
        self._loop = asyncio.get_running_loop()
        self._lane = member.lane
        self._server: socket.socket | None = None
        self._target: tuple[str, int] | None = None  # where a local port is taken for
        self._reset = False
        self._relay: Relay | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._guard: RequestGuard | None = None
        self._reader: hello.HelloReader | None = None
        self._reads = 0
        self._first = b""
        self._held = bytearray()
        self._from_server = bytearray()
        self._lease = member.accounts.lease(accounts.MEMORY, 0, member.holder)
        self._closed = False

    def start(self) -> None:
        self.member.flows.add(self)
        try:
            self._admit()
        except Refused as no:
            self._refuse(no)

    def still_allowed(self) -> bool:
        """Would it be let through under the policy as it is now?"""
        policy, guard = self.member.policy, self._guard
        for name in self.names:
            if not policy.decide(name, self.port).allowed:
                return False
            if policy.narrowed(name, self.port) and (guard is None or guard.forgot):
                return False
            if self._approved is not None and name not in self._approved and policy.waits(name):
                return False
        # A body, an upgraded stream or an answer may still be running for each request that was let through.
        return guard is None or all(policy.permits(host, self.port, request) for host, request in guard.requests)

    def cut(self) -> None:
        """End now, with a reset on both sides."""
        self._reset_on_close()
        if self._relay is not None:
            self._relay.end()
        self._close()

    def is_stale(self, now: float) -> bool:
        """Silent for too long; much shorter when one side has ended, since the other may be gone without a trace."""
        half = self._relay is not None and self._relay.half_closed
        return now - self.last_active > (HALF_CLOSED_SECONDS if half else IDLE_SECONDS)

    def _reset_on_close(self) -> None:
        self._reset = True
        for sock in (self.client, self._server):
            if sock is not None and sock.fileno() >= 0:
                try:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HARD_CLOSE)
                except OSError as err:
                    _log.debug("reset: %s", err)

    def _admit(self) -> None:
        """Judge what can be judged without a byte; then wait for the first bytes, or go on."""
        if self.address == self.member.link.gateway:
            self._judge(HOST_NAME)
            return self._go_on(b"")
        candidates = self.member.grants.names(self.address)
        if not candidates:
            raise Refused("the address was not resolved by this sandbox")
        policy = self.member.policy
        verdicts = [(name, policy.decide(name, self.port)) for name in candidates]
        allowed = [name for name, verdict in verdicts if verdict.allowed]
        if not allowed:
            raise Refused(verdicts[0][1].reason, verdicts[0][0])
        if self.port == 443:
            self._reader = hello.HelloReader()
            return self._wait("no TLS ClientHello arrived", self._first_tls)
        if self.port == 80 or any(policy.narrowed(name, self.port) for name in allowed):
            self._guard = RequestGuard(self.port, self._approve, self._look)
            return self._wait("no HTTP request arrived", self._first_http)
        self._judge(allowed[0])
        # Nothing on this port says which of the address's names is meant: the strictest one decides.
        self._to_ask = self.member.held_names(self.address, self.port)
        self._go_on(b"")

    def _wait(self, missing: str, feed: Callable[[bytes], bytes | None]) -> None:
        """Read until `feed` gives the bytes that may go to the server."""
        self._timer = self._loop.call_later(FIRST_BYTES_SECONDS, self._refuse, Refused(missing + " in time"))
        self._lane.add_reader(self.client, self._first_readable, feed)

    def _first_readable(self, feed: Callable[[bytes], bytes | None]) -> None:
        try:
            data = self.client.recv(_FIRST_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._fail("closed by the sandbox")
            return
        self._reads += 1
        try:
            self._hold(self._lease.amount + len(data))
            if self._reads > _MAX_FIRST_READS:
                raise Refused("the first bytes came in too many pieces")
            ready = feed(data)
            if ready is not None:
                self._lane.remove_reader(self.client)
                self._stop_timer()
                self._go_on(ready)
        except Refused as no:
            self._refuse(no)

    def _hold(self, size: int) -> None:
        """Charge what is held back of this connection; Refused beyond the sandbox's share or that of all."""
        try:
            if size > self._lease.amount:
                self.member.check_early()
                self._lease.grow(size - self._lease.amount)
            elif size < self._lease.amount:
                self._lease.shrink(self._lease.amount - size)
        except Exhausted:
            raise Refused("too much is held for this sandbox at once", min(self.names, default="")) from None

    def _go_on(self, first: bytes) -> None:
        """The connection is allowed: ask a person where a rule says so, then dial."""
        self._first = first
        waiting = {name for name in self.names if self.member.policy.waits(name)} | self._to_ask
        if waiting:
            self._task = self._lane.spawn(self._consent(sorted(waiting)))
        else:
            self._approved = set()
            self._dial()

    def _judge(self, name: str, goodbye: bytes = b"") -> None:
        """The one place where a connection is allowed: policy, grant and address range, all of them."""
        verdict = self.member.policy.decide(name, self.port)
        if not verdict.allowed:
            raise Refused(verdict.reason, name, goodbye)
        if not verdict.host_access:
            if not self.member.grants.holds(self.address, name):
                raise Refused("the name sent is not the name that was resolved", name, goodbye)
            why = refusal(self._far, verdict.exceptions)
            if why is None and not verdict.exceptions and is_own_address(self._far):
                why = "address of this machine"
            if why is not None:
                raise Refused(f"the name leads to a {why} address", name, goodbye)
        if self._approved is not None and name not in self.names and self.member.policy.waits(name):
            raise Refused("needs approval, on a connection of its own", name, goodbye)
        self.names.add(name)

    async def _consent(self, names: list[str]) -> None:
        """Wait for a person; the client has been accepted and nothing has been dialled."""
        try:
            for name in names:
                await self._ask_for(name)
        except Refused as no:
            self._refuse(no)
        except OSError as err:
            self._fail(str(err))
        except asyncio.CancelledError:
            self._close()
        except Exception:
            _log.exception("asking failed")
            self.cut()
        else:
            self._approved = set(names)
            self._dial()

    async def _ask_for(self, name: str) -> None:
        asking = asyncio.ensure_future(self._ask(self.member, name, self.port))
        try:
            while not (await asyncio.wait((asking,), timeout=_LOOK_SECONDS))[0]:
                if not _is_open(self.client):
                    raise ConnectionResetError("closed by the sandbox while it waited for approval")
        finally:
            asking.cancel()
        if why := asking.result():
            raise Refused(why, name, self._goodbye(why, name))

    def _goodbye(self, why: str, name: str) -> bytes:
        if self.port == 443:
            return _TLS_ALERT
        return _forbidden(HeadError(why, name)) if self._guard is not None else b""

    def _first_tls(self, data: bytes) -> bytes | None:
        reader = self._reader
        assert reader is not None
        try:
            found = reader.feed(data)
        except hello.HelloError as err:
            raise Refused(str(err), goodbye=_TLS_ALERT) from None
        if found is None:
            return None
        self._reader = None
        self._judge(found.name, _TLS_ALERT)
        self._held = reader.data[found.size :]
        return bytes(reader.data[: found.size])

    def _first_http(self, data: bytes) -> bytes | None:
        assert self._guard is not None
        try:
            return self._guard.feed(data) or None
        except HeadError as err:
            raise Refused(str(err), err.name, _forbidden(err)) from None

    def _approve(self, host: str) -> None:
        try:
            self._judge(host)
        except Refused as no:
            raise HeadError(no.reason, host) from None

    def _look(self, host: str, request: Request) -> None:
        if not self.member.policy.permits(host, self.port, request):
            raise HeadError(f"{request.method} {request.path[:100]} is not among the requests open for this host", host)

    def _dial(self) -> None:
        target = ("127.0.0.1" if HOST_NAME in self.names else self._far, self.port)
        if not self.member.ports.take(self.member.holder, target):
            return self._refuse(Refused("too many connections to this host within a minute", min(self.names)))
        self._target = target
        family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
        try:
            server = self._server = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            code = server.connect_ex(target)
        except OSError as err:
            return self._fail(str(err))
        if code not in (0, errno.EINPROGRESS):
            return self._fail(f"dialling failed with {errno.errorcode.get(code, code)}")
        self._timer = self._loop.call_later(DIAL_SECONDS, self._fail, "no answer in time")
        self._lane.add_writer(server, self._connected)

    def _connected(self) -> None:
        assert self._server is not None
        self._lane.remove_writer(self._server)
        self._stop_timer()
        code = self._server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            return self._fail(f"dialling failed with {errno.errorcode.get(code, code)}")
        first, self._first = self._first, b""
        self._open(first)

    def _fail(self, why: str) -> None:
        """End a connection that is allowed and cannot be: a reset, and nothing to report."""
        _log.debug("connection to %s:%d: %s", self.address, self.port, why)
        self.cut()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _open(self, first: bytes) -> None:
        assert self._server is not None
        name, member = min(self.names), self.member
        use = member.account(name)
        use.connections += 1

        def sent(size: int) -> None:
            member.count_sent(name, use, size)
            self.last_active = time.monotonic()
            member.last_payload = time.time()

        def received(size: int) -> None:
            use.received += size
            self.last_active = time.monotonic()
            member.last_payload = time.time()

        relay = self._relay = Relay(
            self.client, self._server, sent, received, self._close, self._lane, self.member.buffers
        )
        if not self.still_allowed():  # the policy changed while dialling
            self.cut()
            return
        guard = self._guard
        if guard is not None:
            relay.on_client_data = self._http_from_client
            relay.client_appetite = lambda: guard.appetite
            if guard.upgrade_asked:
                self._await_upgrade(relay)
        elif self.port == 443 and HOST_NAME not in self.names:
            relay.hold_client(True)
            relay.on_server_data = self._tls_from_server
        self._hold_now()
        relay.start(first)

    def _hold_now(self) -> None:
        """Charge what is held back of an open connection; it ends where that is too much."""
        held = len(self._held) + (self._guard.holding if self._guard is not None else 0)
        if held != self._lease.amount:
            try:
                self._hold(held)
            except Refused as no:
                self._refuse(no)

    # TLS: a HelloRetryRequest makes the client send a second hello, which is judged like the first.

    def _tls_from_server(self, data: memoryview) -> memoryview:
        self._from_server += data[: hello.SERVER_PREFIX]
        seen = self._from_server
        if seen[0] == 22 and len(seen) < hello.SERVER_PREFIX:
            return data
        relay = self._relay
        assert relay is not None
        relay.on_server_data = None
        held, self._held = bytes(self._held), bytearray()
        if seen[0] == 22 and hello.is_retry(seen):
            self._reader = hello.HelloReader(again=True)
            relay.on_client_data = self._tls_second_hello
            relay.client_appetite = lambda: _FIRST_READ
            held = self._tls_second_hello(memoryview(held))
        self._hold_now()
        relay.push(held)
        relay.hold_client(False)
        return data

    def _tls_second_hello(self, data: memoryview) -> bytes:
        reader, relay = self._reader, self._relay
        assert reader is not None and relay is not None
        try:
            self._hold(self._lease.amount + len(data))
            found = reader.feed(data) if len(data) else None
            if found is None:
                return b""
            if found.name not in self.names:
                raise Refused("the second ClientHello names another server", found.name)
        except (hello.HelloError, Refused) as err:
            self._refuse(Refused(str(err), getattr(err, "name", "") or min(self.names), _TLS_ALERT))
            return b""
        self._reader = relay.on_client_data = relay.client_appetite = None
        self._hold_now()
        return bytes(reader.data)

    # HTTP: every further request of the connection is judged like the first.

    def _http_from_client(self, data: memoryview) -> bytes:
        assert self._guard is not None and self._relay is not None
        try:
            ready = self._guard.feed(data)
        except HeadError as err:
            self._refuse(Refused(str(err), err.name))
            return b""
        self._hold_now()
        if self._closed:
            return b""
        if self._guard.upgrade_asked:
            self._await_upgrade(self._relay)
        return ready

    def _await_upgrade(self, relay: Relay) -> None:
        relay.hold_client(True)
        relay.on_server_data = self._http_upgrade_answer

    def _http_upgrade_answer(self, data: memoryview) -> memoryview:
        self._from_server += data[:12]
        if len(self._from_server) < 12:
            return data
        guard, relay = self._guard, self._relay
        assert guard is not None and relay is not None
        relay.on_server_data = None
        upgraded = bytes(self._from_server[:12]) == b"HTTP/1.1 101"
        try:
            held = guard.answered(upgraded)
        except HeadError as err:
            self._refuse(Refused(str(err), err.name))
            return data
        if upgraded:
            relay.on_client_data = relay.client_appetite = None
        self._hold_now()
        relay.push(held)
        relay.hold_client(False)
        return data

    def _refuse(self, no: Refused) -> None:
        if self._closed:
            return
        names = self.member.grants.names(self.address)
        name = no.name or (
            names[0] if len(names) == 1 else ""
        )  # what the client kept to itself, where it can only be that
        self._report(self.member, name, self._far, self.port, "tcp", no.reason)
        if self._relay is not None:
            self.cut()
            return
        try:
            if no.goodbye:
                self.client.send(no.goodbye)
                self.client.shutdown(socket.SHUT_WR)
            else:
                self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HARD_CLOSE)
        except OSError as err:
            _log.debug("goodbye: %s", err)
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.member.flows.discard(self)
        self._stop_timer()
        if self._task is not None:
            self._task.cancel()
        for sock in (self.client, self._server):
            if sock is not None:
                self._lane.forget(sock)
                sock.close()
        if self._target is not None:
            ours = not self._reset and not (self._relay is not None and self._relay.server_left_first)
            self.member.ports.give(self.member.holder, self._target, kept=ours)
        self._lease.end()
        self._held, self._first, self._reader = bytearray(), b"", None
        self.member.accounts.release(accounts.CONNECTIONS, 1, self.member.holder)


def _is_open(client: socket.socket) -> bool:
    """Whether the sandbox still holds its end of a connection."""
    if client.family == socket.AF_UNIX:
        poll = select.poll()
        poll.register(client, 0)
        return not poll.poll(0)  # an end that is gone shows without being asked for
    return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def is_own_address(address: str) -> bool:
    """Is it an address of this machine? The kernel picks it as its own source then; nothing is sent to find out."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            return str(probe.getsockname()[0]) == address
        except OSError:
            return False


def _forbidden(err: HeadError) -> bytes:
    text = f"blocked by the sandbox's network policy: {err.name + ': ' if err.name else ''}{err}\n".encode()
    head = f"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    return head.encode() + text
