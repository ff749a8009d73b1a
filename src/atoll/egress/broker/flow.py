"""One connection of a sandbox, from accept to end: who asks, whom for really, may it, and then bytes.

Nothing is dialled, and no byte leaves, before the name that was resolved and the name that is really sent agree and
are allowed. The address dialled is the one the sandbox connected to, which the resolver gave it, judged once more here.
"""

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Final

from atoll.egress.addresses import refusal
from atoll.egress.broker.relay import Relay
from atoll.egress.broker.sandbox import Member
from atoll.egress.parse import hello
from atoll.egress.parse.http_head import HeadError, RequestGuard
from atoll.egress.policy import HOST_NAME
from atoll.egress.requests import Request

FIRST_BYTES_SECONDS: Final = 15.0
DIAL_SECONDS: Final = 20.0
IDLE_SECONDS: Final = 2 * 3600.0
HALF_CLOSED_SECONDS: Final = 180.0
_TLS_ALERT: Final = b"\x15\x03\x01\x00\x02\x02\x70"  # fatal, unrecognized_name
_HARD_CLOSE: Final = struct.pack("ii", 1, 0)
_LOOK_SECONDS: Final = 1.0
_ESTABLISHED: Final = 1
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
        self._asked = False
        self._loop = asyncio.get_running_loop()
        self._server: socket.socket | None = None
        self._relay: Relay | None = None
        self._task: asyncio.Task[None] | None = None
        self._guard: RequestGuard | None = None
        self._held = bytearray()
        self._from_server = bytearray()

    def start(self) -> None:
        self.member.flows.add(self)
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._after_run)

    def _after_run(self, task: asyncio.Task[None]) -> None:
        if self._relay is None:  # also when it was cancelled before its first step
            self._close()

    def still_allowed(self) -> bool:
        """Would it be let through under the policy as it is now?"""
        policy = self.member.policy
        return all(
            policy.decide(name, self.port).allowed and (self._guard is not None or not policy.narrowed(name, self.port))
            for name in self.names
        )

    def cut(self) -> None:
        """End now, with a reset on both sides."""
        self._reset_on_close()
        if self._relay is not None:
            self._relay.end()
        elif self._task is not None:
            self._task.cancel()

    def is_stale(self, now: float) -> bool:
        """Silent for too long; much shorter when one side has ended, since the other may be gone without a trace."""
        half = self._relay is not None and self._relay.half_closed
        return now - self.last_active > (HALF_CLOSED_SECONDS if half else IDLE_SECONDS)

    def _reset_on_close(self) -> None:
        for sock in (self.client, self._server):
            if sock is not None and sock.fileno() >= 0:
                try:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HARD_CLOSE)
                except OSError as err:
                    _log.debug("reset: %s", err)

    async def _run(self) -> None:
        try:
            first = await self._admit()
            await self._consent()
            await self._dial()
        except Refused as no:
            self._refuse(no)
        except (OSError, TimeoutError) as err:
            _log.debug("connection to %s:%d: %s", self.address, self.port, err)
            self._reset_on_close()
            self._close()
        except asyncio.CancelledError:
            self._close()
        except Exception:
            _log.exception("connection handling failed")
            self._close()
        else:
            self._open(first)

    async def _admit(self) -> bytes:
        """Find the name and judge it; the bytes read so far that may go to the server."""
        if self.address == self.member.link.gateway:
            self._judge(HOST_NAME)
            return b""
        candidates = self.member.grants.names(self.address)
        if not candidates:
            raise Refused("the address was not resolved by this sandbox")
        verdicts = [(name, self.member.policy.decide(name, self.port)) for name in candidates]
        allowed = [name for name, verdict in verdicts if verdict.allowed]
        if not allowed:
            raise Refused(verdicts[0][1].reason, verdicts[0][0])
        if self.port == 443:
            return await self._admit_tls()
        if self.port == 80 or any(self.member.policy.narrowed(name, self.port) for name in allowed):
            return await self._admit_http()
        self._judge(allowed[0])
        return b""

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
        if self._asked and name not in self.names and self.member.policy.waits(name):
            raise Refused("needs approval, on a connection of its own", name, goodbye)
        self.names.add(name)

    async def _consent(self) -> None:
        """Where a rule says so, wait for a person; the client has been accepted and nothing has been dialled."""
        self._asked = True
        for name in sorted(self.names):
            if not self.member.policy.waits(name):
                continue
            asking = asyncio.ensure_future(self._ask(self.member, name, self.port))
            try:
                while not (await asyncio.wait((asking,), timeout=_LOOK_SECONDS))[0]:
                    if self.client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
                        raise ConnectionResetError("closed by the sandbox while it waited for approval")
            finally:
                asking.cancel()
            if why := asking.result():
                raise Refused(why, name, self._goodbye(why, name))

    def _goodbye(self, why: str, name: str) -> bytes:
        if self.port == 443:
            return _TLS_ALERT
        return _forbidden(HeadError(why, name)) if self._guard is not None else b""

    async def _admit_tls(self) -> bytes:
        data = bytearray()
        try:
            while (found := hello.read_hello(data)) is None:
                data += await self._more("no TLS ClientHello arrived")
        except hello.HelloError as err:
            raise Refused(str(err), goodbye=_TLS_ALERT) from None
        self._judge(found.name, _TLS_ALERT)
        self._held = data[found.size :]
        return bytes(data[: found.size])

    async def _admit_http(self) -> bytes:
        guard = self._guard = RequestGuard(self.port, self._approve, self._look)
        ready = b""
        try:
            while not ready:
                ready = guard.feed(await self._more("no HTTP request arrived"))
        except HeadError as err:
            raise Refused(str(err), err.name, _forbidden(err)) from None
        return ready

    def _approve(self, host: str) -> None:
        try:
            self._judge(host)
        except Refused as no:
            raise HeadError(no.reason, host) from None

    def _look(self, host: str, request: Request) -> None:
        if not self.member.policy.permits(host, self.port, request):
            raise HeadError(f"{request.method} {request.path[:100]} is not among the requests open for this host", host)

    async def _more(self, missing: str) -> bytes:
        left = FIRST_BYTES_SECONDS - (time.monotonic() - self.last_active)
        try:
            async with asyncio.timeout(max(left, 0.0)):
                data = await self._loop.sock_recv(self.client, 65536)
        except TimeoutError:
            raise Refused(missing + " in time") from None
        if not data:
            raise ConnectionResetError("closed by the sandbox")
        return data

    async def _dial(self) -> None:
        target = ("127.0.0.1" if HOST_NAME in self.names else self._far, self.port)
        family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
        server = self._server = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        async with asyncio.timeout(DIAL_SECONDS):
            await self._loop.sock_connect(server, target)

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

        relay = self._relay = Relay(self.client, self._server, sent, received, self._close)
        if not self.still_allowed():  # the policy changed while dialling
            self.cut()
            return
        if self._guard is not None:
            relay.on_client_data = self._http_from_client
            if self._guard.upgrade_asked:
                self._await_upgrade(relay)
        elif self.port == 443 and HOST_NAME not in self.names:
            relay.hold_client(True)
            relay.on_server_data = self._tls_from_server
        relay.start(first)

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
            relay.on_client_data = self._tls_second_hello
            held = self._tls_second_hello(memoryview(held))
        relay.push(held)
        relay.hold_client(False)
        return data

    def _tls_second_hello(self, data: memoryview) -> bytes:
        self._held += data
        try:
            found = hello.read_hello(self._held, again=True)
            if found is None:
                return b""
            if found.name not in self.names:
                raise Refused("the second ClientHello names another server", found.name)
        except (hello.HelloError, Refused) as err:
            self._refuse(Refused(str(err), getattr(err, "name", "") or min(self.names), _TLS_ALERT))
            return b""
        assert self._relay is not None
        self._relay.on_client_data = None
        held, self._held = bytes(self._held), bytearray()
        return held

    # HTTP: every further request of the connection is judged like the first.

    def _http_from_client(self, data: memoryview) -> bytes:
        assert self._guard is not None and self._relay is not None
        try:
            ready = self._guard.feed(data)
        except HeadError as err:
            self._refuse(Refused(str(err), err.name))
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
            relay.on_client_data = None
        relay.push(held)
        relay.hold_client(False)
        return data

    def _refuse(self, no: Refused) -> None:
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
        self.member.flows.discard(self)
        for sock in (self.client, self._server):
            if sock is not None:
                sock.close()


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
