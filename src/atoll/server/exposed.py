"""The door to exposed ports: HTTP and WebSockets from loopback to a port inside a sandbox, for as long as they last.

A URL is `http://127.0.0.1:PORT/x/<secret>/...` or, with an origin of its own for browsers, `http://<secret>.localhost:PORT/`.
Both messages are parsed and written anew, one request after the other: what one sandbox answers never mixes with
another's, and a request for one secret never reaches the owner of another.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

import h11

from atoll import accounts, errors, model
from atoll.accounts import Accounts
from atoll.core.files.exposures import Exposures, Target
from atoll.core.files.ports import Ports, Tunnel
from atoll.core.store.records import Store
from atoll.server import exposed_cookies as cookies

log = logging.getLogger("atoll.exposed")

PREFIX = "/x/"
SITE = ".localhost"
REMEMBERED_PORT = "exposed_port"
MAX_HEAD = 64 * 1024
MAX_CONNECTIONS = 1024
MAX_STRANGERS = 256  # of them, connections that have not shown a secret; the oldest makes room for the next
MAX_STRANGERS_OF_ONE = 128  # of one address
MAX_FOR_ONE = 256  # connections to one sandbox
STRANGER_SECONDS = 10.0  # in which a secret has to be shown
HEAD_TIMEOUT = 60.0
IDLE = 300.0
PIECE = 64 * 1024
_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te")
)
_OURS = frozenset(
    (b"x-k8e-expose-session", b"x-forwarded-host", b"x-forwarded-prefix", b"x-forwarded-proto",
     b"e2b-sandbox-id", b"e2b-sandbox-port", b"e2b-traffic-access-token")
)  # fmt: skip
# Answers that act on all of an origin: a worker for every path would see other sandboxes' addresses and answer for them.
_WHOLE_ORIGIN = frozenset((b"service-worker-allowed", b"clear-site-data"))

Read = Callable[[], Awaitable[bytes]]
Headers = list[tuple[bytes, bytes]]


class Refused(Exception):
    """An answer of our own instead of the sandbox's."""

    def __init__(self, status: int, text: str, headers: Headers | None = None, json: Any = None) -> None:
        super().__init__(text)
        self.status, self.text, self.headers, self.json = status, text, headers or [], json

    def content(self) -> tuple[bytes, bytes]:
        """Return the content type and the body."""
        if self.json is not None:
            return b"application/json", model.encode(self.json)
        return b"text/plain; charset=utf-8", (self.text + "\n").encode()


class Router(Protocol):
    """Decides where the requests of a connection lead."""

    @property
    def ports(self) -> Ports: ...

    @property
    def stays(self) -> bool: ...  # whether the connection may serve another request

    @property
    def ends_with_client(self) -> bool: ...  # whether a client that hangs up ends the request at once

    def knows(self, task: Any) -> bool: ...  # whether this connection has led somewhere already

    async def route(self, task: Any, request: h11.Request) -> tuple[Target, str, bytes]: ...  # or Refused

    def explain(self, error: Exception) -> Refused: ...  # what is said when the sandbox does not answer


class ExposedPorts:
    """The listener and its connections."""

    stays = True
    ends_with_client = False

    def __init__(
        self, exposures: Exposures, ports: Ports, store: Store, base_url: str = "", books: Accounts | None = None
    ) -> None:
        self._exposures = exposures
        self._ports = ports
        self._store = store
        self._base = base_url.rstrip("/")
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._books = books or Accounts()
        self._connections: dict[asyncio.Task[None], Target | None] = {}
        self._strangers: dict[asyncio.Task[None], accounts.Lease] = {}  # the oldest first
        self._guests: dict[asyncio.Task[None], accounts.Lease] = {}
        self.port = 0

    async def open(self) -> None:
        """Listen on loopback, on the same port as last time when it is free: URLs survive a restart."""
        async with self._opening:
            if self._server is not None:
                return
            wanted = int(self._store.meta(REMEMBERED_PORT) or 0)
            try:
                sock = _listen(wanted)
            except OSError as error:
                log.warning("port %d is taken, exposed ports get another: %s", wanted, error)
                sock = _listen(0)
            self.port = sock.getsockname()[1]
            self._store.set_meta(REMEMBERED_PORT, str(self.port))
            self._server = await asyncio.start_server(self._connected, sock=sock, limit=PIECE)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(set(self._connections), timeout=5)

    def url(self, token: str) -> str:
        return f"{self._base or f'http://127.0.0.1:{self.port}'}{PREFIX}{token}/"

    def site_url(self, token: str) -> str:
        return f"http://{token}{SITE}:{self.port}/"

    def cut(self, target: Target) -> None:
        for task, leads_to in list(self._connections.items()):
            if leads_to == target:
                task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if not self._enter(task, writer):
            writer.transport.abort()
            return
        try:
            while await ProxiedRequest(self, task, reader, writer).run():
                self._connections[task] = None
        except (OSError, h11.RemoteProtocolError, asyncio.IncompleteReadError, TimeoutError) as error:
            log.debug("an exposed connection ended: %s", error)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._leave(task)
            writer.close()

    def _enter(self, task: "asyncio.Task[None]", writer: asyncio.StreamWriter) -> bool:
        """A place among those that have shown no secret yet. When there is none, the oldest of the same address goes, or of all."""
        name = writer.get_extra_info("peername")
        holder = accounts.stranger(name[0] if name else "")
        mine = [one for one, lease in self._strangers.items() if lease.holders == (holder,)]
        if len(mine) >= MAX_STRANGERS_OF_ONE:
            self._turn_out(mine[0])
        elif len(self._strangers) >= MAX_STRANGERS:
            self._turn_out(next(iter(self._strangers)))
        if len(self._connections) >= MAX_CONNECTIONS + MAX_STRANGERS:
            return False
        try:
            self._strangers[task] = self._books.lease(accounts.CONNECTIONS, 1, holder)
        except errors.Exhausted as full:
            log.warning("a connection to an exposed port was refused: %s", full)
            return False
        self._connections[task] = None
        return True

    def _turn_out(self, task: "asyncio.Task[None]") -> None:
        self._strangers.pop(task).end()
        task.cancel()

    def _leave(self, task: "asyncio.Task[None]") -> None:
        self._connections.pop(task, None)
        for place in (self._strangers.pop(task, None), self._guests.pop(task, None)):
            if place is not None:
                place.end()

    def knows(self, task: "asyncio.Task[None]") -> bool:
        """Whether this connection has shown a secret."""
        return task in self._guests

    def _admit(self, task: "asyncio.Task[None]", target: Target) -> None:
        """It has shown the secret of this target: a place of its sandbox's and its owner's, no stranger's any more."""
        holders = accounts.sandbox(target.sandbox), accounts.owner(target.principal.owner)
        place = self._guests.get(task)
        if place is None or place.holders != holders:
            others = sum(1 for one in self._guests.values() if one.holders == holders)
            if others >= MAX_FOR_ONE or len(self._guests) >= MAX_CONNECTIONS:
                raise Refused(503, "too many connections to this address")
            try:
                fresh = self._books.lease(accounts.CONNECTIONS, 1, *holders)
            except errors.Exhausted as full:
                raise Refused(503, full.message) from None
            for old in (self._strangers.pop(task, None), place):
                if old is not None:
                    old.end()
            self._guests[task] = fresh
        self._connections[task] = target

    def explain(self, error: Exception) -> Refused:
        text = error.message if isinstance(error, errors.AtollError) else "the sandbox did not answer in HTTP"
        gone = isinstance(error, errors.SandboxGone | errors.FailedPrecondition)
        return Refused(503 if gone else 502, text)

    async def route(self, task: "asyncio.Task[None]", request: h11.Request) -> tuple[Target, str, bytes]:
        """Whose request it is, the prefix that was taken off, and the path the sandbox sees."""
        host = next((value for name, value in request.headers if name == b"host"), b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        path = request.target.decode("latin-1")
        if name.endswith(SITE):
            token, prefix, rest = name[: -len(SITE)], "", path
        elif path.startswith(PREFIX):
            token, slash, after = path[len(PREFIX) :].partition("/")
            if not slash:
                plain, question, query = token.partition("?")
                if self._exposures.find(plain) is not None:
                    where = f"{PREFIX}{plain}/{question}{query}".encode("latin-1")
                    raise Refused(308, "this address ends with a slash", [(b"location", where)])
            prefix, rest = f"{PREFIX}{token}", "/" + after
        else:
            raise Refused(404, "nothing is exposed at this address")
        target = self._exposures.find(token)
        if target is None:
            raise Refused(404, "nothing is exposed at this address")
        self._admit(task, target)
        return target, prefix, rest.encode("latin-1")

    @property
    def ports(self) -> Ports:
        return self._ports


class ProxiedRequest:
    """One request and its answer."""

    def __init__(
        self, door: Router, task: "asyncio.Task[Any]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._door = door
        self._task = task
        self._reader = reader
        self._writer = writer
        self._outside = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._answered = False

    async def run(self) -> bool:
        """Serve one request; whether another may follow on this connection."""
        known = self._door.knows(self._task)
        begun = asyncio.get_running_loop().time()
        async with asyncio.timeout(IDLE if known else STRANGER_SECONDS):
            first = await self._read()
        if not first:
            return False
        self._outside.receive_data(first)
        waited = asyncio.get_running_loop().time() - begun
        try:
            async with asyncio.timeout(HEAD_TIMEOUT if known else max(1.0, STRANGER_SECONDS - waited)):
                request = await _next(self._outside, self._read)
            if not isinstance(request, h11.Request):
                return False
            target, prefix, path = await self._door.route(self._task, request)
            await self._forward(request, target, prefix, path)
        except Refused as refused:
            await self._refuse(refused)
            return False
        except h11.RemoteProtocolError:
            await self._refuse(Refused(400, "this is not HTTP/1.1"))
            return False
        except (errors.AtollError, h11.LocalProtocolError, BrokenPipeError) as error:
            await self._refuse(self._door.explain(error))
            return False
        return self._reusable()

    def _reusable(self) -> bool:
        """Whether the client may send another request. What it sent ahead of time would be lost, so then it may not."""
        done = self._outside.our_state is h11.DONE and self._outside.their_state is h11.DONE
        return done and not self._outside.trailing_data[0]

    async def _forward(self, request: h11.Request, target: Target, prefix: str, path: bytes) -> None:
        inside = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        async with self._door.ports.connect(target.principal, target.sandbox, target.port, target.host) as tunnel:
            received = aiter(tunnel)

            async def read() -> bytes:
                return await anext(received, b"")

            headers = _request_headers(request, target, prefix)
            head = inside.send(h11.Request(method=request.method, target=path, headers=headers))
            await tunnel.send(head or b"")
            upwards = asyncio.ensure_future(self._upwards(inside, tunnel))
            to_browser = bool(prefix) and cookies.is_browser(list(request.headers))
            try:
                downwards = self._downwards(inside, read, prefix, to_browser)
                await (self._unless_it_hangs_up(downwards, upwards) if self._door.ends_with_client else downwards)
                if inside.our_state is h11.SWITCHED_PROTOCOL:
                    upwards.cancel()
                    await asyncio.wait([upwards])
                    await self._raw(inside, tunnel, read)
                elif self._outside.our_state is h11.DONE and not upwards.done() and not self._outside_wants_more():
                    await asyncio.wait([upwards])
            finally:
                upwards.cancel()
                with suppress(asyncio.CancelledError, h11.ProtocolError, OSError, errors.AtollError):
                    await upwards

    async def _unless_it_hangs_up(self, downwards: Coroutine[Any, Any, None], upwards: "asyncio.Task[None]") -> None:
        """Pass the answer on until the client closes its side; what it sends after its request does not count."""

        async def hung_up() -> None:
            await asyncio.wait([upwards])
            while await self._read():
                pass

        tasks = [asyncio.ensure_future(downwards), asyncio.ensure_future(hung_up())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ConnectionResetError("the client hung up")
            tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _outside_wants_more(self) -> bool:
        """An answer that came before the whole request: the rest is not waited for."""
        return self._outside.their_state is h11.SEND_BODY

    async def _upwards(self, inside: h11.Connection, tunnel: Tunnel) -> None:
        """The request's body, piece by piece."""
        while True:
            event = await _next(self._outside, self._read)
            if isinstance(event, h11.Data | h11.EndOfMessage):
                data = inside.send(event)
                if data:
                    with suppress(BrokenPipeError):  # the sandbox may answer without reading it all
                        await tunnel.send(data)
            if not isinstance(event, h11.Data):
                return

    async def _downwards(self, inside: h11.Connection, read: Read, prefix: str, to_browser: bool) -> None:
        """The answer, and everything before it."""
        while True:
            try:
                event = await _next(inside, read)
            except h11.RemoteProtocolError as error:
                if self._answered:
                    raise ConnectionResetError(str(error)) from None
                raise Refused(502, "the sandbox did not answer in HTTP") from None
            if isinstance(event, h11.InformationalResponse | h11.Response):
                event = _answer(event, bool(prefix), closes=not self._door.stays)
                if to_browser:
                    confined = cookies.outward(list(event.headers), prefix)
                    event = type(event)(status_code=event.status_code, headers=confined, reason=event.reason)
                self._answered = self._answered or isinstance(event, h11.Response) or event.status_code == 101
            if isinstance(event, h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage):
                await self._write(self._outside.send(event))
            if isinstance(event, h11.EndOfMessage) or inside.our_state is h11.SWITCHED_PROTOCOL:
                return
            if isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                raise Refused(502, "the sandbox closed the connection without an answer")

    async def _raw(self, inside: h11.Connection, tunnel: Tunnel, read: Read) -> None:
        """After an upgrade: bytes both ways until either side ends."""

        async def up() -> None:
            data = self._outside.trailing_data[0]
            while True:
                if data:
                    await tunnel.send(data)
                data = await self._read()
                if not data:
                    return

        async def down() -> None:
            data = inside.trailing_data[0]
            while True:
                if data:
                    await self._write(data)
                data = await read()
                if not data:
                    return

        tasks = [asyncio.ensure_future(up()), asyncio.ensure_future(down())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _refuse(self, refused: Refused) -> None:
        """Our own words, if nothing of the sandbox's has been said yet; then the connection ends."""
        kind, body = refused.content()
        headers: Headers = [(b"content-type", kind), (b"connection", b"close")]
        headers += [(b"content-length", str(len(body)).encode()), *refused.headers]
        with suppress(h11.LocalProtocolError, OSError):
            await self._write(self._outside.send(h11.Response(status_code=refused.status, headers=headers)))
            await self._write(self._outside.send(h11.Data(data=body)))
            await self._write(self._outside.send(h11.EndOfMessage()))

    async def _read(self) -> bytes:
        return await self._reader.read(PIECE)

    async def _write(self, data: bytes | None) -> None:
        if data:
            self._writer.write(data)
            await self._writer.drain()


async def _next(connection: h11.Connection, read: Read) -> Any:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await read())
    return event


def _request_headers(request: h11.Request, target: Target, prefix: str) -> Headers:
    upgrade = any(name == b"upgrade" for name, _ in request.headers)
    host = next((value for name, value in request.headers if name == b"host"), b"localhost")
    headers = [(name, value) for name, value in request.headers if name not in _HOP and name not in _OURS]
    if not any(name == b"host" for name, _ in headers):
        headers.append((b"host", host))
    headers.append((b"connection", b"upgrade" if upgrade else b"close"))
    headers += [
        (b"x-k8e-expose-session", f"sess-{target.sandbox}".encode()),
        (b"x-forwarded-host", host),
        (b"x-forwarded-proto", b"http"),
    ]
    if prefix:
        headers = cookies.inward(headers, prefix) if cookies.is_browser(headers) else headers
        headers.append((b"x-forwarded-prefix", prefix.encode("latin-1")))
    return headers


def _answer(event: "h11.InformationalResponse | h11.Response", shared_origin: bool, *, closes: bool) -> Any:
    switching = event.status_code == 101
    headers = [(name, value) for name, value in event.headers if switching or name not in _HOP]
    if shared_origin:
        headers = [(name, value) for name, value in headers if name not in _WHOLE_ORIGIN]
    if shared_origin and not switching and not any(name == b"referrer-policy" for name, _ in headers):
        headers.append((b"referrer-policy", b"same-origin"))  # the address holds the secret
    if closes and not switching and event.status_code >= 200:
        headers.append((b"connection", b"close"))
    return type(event)(status_code=event.status_code, headers=headers, reason=event.reason)


def _listen(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen(128)
        sock.setblocking(False)
        return sock
    except BaseException:
        sock.close()
        raise
