"""The listener. Requests to ports of sandboxes leave uvicorn before it reads them: they are proxied as exposed ports are."""

import asyncio
import logging
from collections.abc import Callable

import h11

from atoll import accounts, errors
from atoll.core.files.exposures import Target
from atoll.core.files.ports import Ports
from atoll.core.sandboxes.state import Live
from atoll.server.exposed import MAX_HEAD, PIECE, ProxiedRequest, Refused
from atoll.server.request_limits import TOO_LARGE
from atoll.server.tcp import Door, OwnedProtocol
from atoll.surfaces.e2b import interpreter
from atoll.surfaces.e2b.app import E2b
from atoll.surfaces.e2b.replies import WireError
from atoll.surfaces.e2b.routing import ENVD, Place, find_place
from atoll.surfaces.e2b.served import NotServing
from atoll.surfaces.e2b.words import NETWORK

log = logging.getLogger("atoll.e2b")

KEEP_ALIVE = 330  # clients keep an idle connection for 300 seconds
STALL = 300.0  # seconds in which a reader has to take something: programs read files at their own pace
MOST_FOR_ONE = 256  # connections to the ports of one sandbox
_TOKEN = b"e2b-traffic-access-token"


class E2bDoor(Door):
    """The door with the connections that lead into sandboxes."""

    def __init__(self, app: E2b) -> None:
        self.ports = PortConnections(app)
        super().__init__(app, self._make, KEEP_ALIVE)

    def _make(self, *given: object) -> "PeekingProtocol":
        made = PeekingProtocol(*given)  # type: ignore[arg-type]
        made.hand_over = self.ports.serve
        return made

    async def close(self) -> None:
        await super().close()
        await self.ports.close()


class PeekingProtocol(OwnedProtocol):
    """uvicorn's protocol, which looks at each request's head first."""

    stall_seconds = STALL
    hand_over: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]
    _peeked = b""

    def data_received(self, data: bytes) -> None:
        if self.cycle is not None and (self.cycle.more_body or not self.cycle.response_complete):
            super().data_received(data)
            return
        self._peeked += data
        if b"\r\n\r\n" not in self._peeked:
            self._unset_keepalive_if_required()
            self._head_begins()
            if len(self._peeked) > MAX_HEAD:
                self.refuse(b"431 Request Header Fields Too Large", TOO_LARGE)
            return
        whole, self._peeked = self._peeked, b""
        if _leads_inside(whole):
            self._leave(whole)
        else:
            super().data_received(whole)

    def _leave(self, begun: bytes) -> None:
        """Give the connection, with what has come of it, to the proxy."""
        self._unset_keepalive_if_required()
        self._head_ends()
        self.connections.discard(self)
        reader = asyncio.StreamReader(limit=PIECE, loop=self.loop)
        protocol = asyncio.StreamReaderProtocol(reader, self.hand_over, loop=self.loop)  # type: ignore[arg-type]
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        protocol.data_received(begun)


def _leads_inside(data: bytes) -> bool:
    """Return whether a head names a port other than envd's. What is wrong with it is told by who serves it."""
    head = data[: data.find(b"\r\n\r\n")].lstrip(b"\r\n")
    headers = []
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        headers.append((name.strip().lower(), value.strip()))
    try:
        place = find_place(headers)
    except errors.InvalidArgument:
        return False
    return place is not None and place.port != ENVD


class PortConnections:
    """The connections to ports of sandboxes."""

    def __init__(self, app: E2b) -> None:
        self.app = app
        self._tasks: dict[asyncio.Task[object], str] = {}

    def count(self, sandbox: str) -> int:
        return sum(1 for one in self._tasks.values() if one == sandbox)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = ""
        visit = _Visit(self, task)
        try:
            while await ProxiedRequest(visit, task, reader, writer).run() and visit.stays:
                pass
        except (OSError, h11.RemoteProtocolError, asyncio.IncompleteReadError, TimeoutError) as error:
            log.debug("a connection to a port ended: %s", error)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            visit.leave()
            self._tasks.pop(task, None)
            writer.close()

    def enter(self, task: "asyncio.Task[object]", sandbox: str) -> None:
        if self._tasks[task] != sandbox and self.count(sandbox) >= MOST_FOR_ONE:
            raise errors.Unavailable("too many connections to this sandbox")
        self._tasks[task] = sandbox

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=5)


class _Visit:
    """One connection: where each of its requests leads, and what is said when it leads nowhere."""

    def __init__(self, door: PortConnections, task: "asyncio.Task[object]") -> None:
        self._door = door
        self._task = task
        self._place: Place | None = None
        self._release: Callable[[], None] = lambda: None
        self._lease: accounts.Lease | None = None

    @property
    def ports(self) -> Ports:
        return self._door.app.core.ports

    @property
    def stays(self) -> bool:
        """Whether more requests may follow: only where the host's name says that all lead here. Where the end of the
        connection means something, it belongs to one request."""
        return self._place is not None and self._place.by_host and not self.ends_with_client

    @property
    def ends_with_client(self) -> bool:
        """Whether a client that hangs up ends its request at once: a cell that nobody reads is interrupted."""
        return self._place is not None and self._place.port == interpreter.PORT

    def knows(self, task: object) -> bool:
        return self._place is not None

    def leave(self) -> None:
        self._release()
        if self._lease is not None:
            self._lease.end()

    async def route(self, task: object, request: h11.Request) -> tuple[Target, str, bytes]:
        app = self._door.app
        try:
            place = find_place(request.headers)
        except errors.InvalidArgument as error:
            raise _refusal(WireError(400, error.message)) from None
        if place is None or place.port == ENVD:
            raise _refusal(WireError(421, "send requests to different ports over different connections"))
        self._place = place
        owner = app.owner_of(place.sandbox)
        if owner is None:
            raise _refusal(NotServing(place.sandbox))
        token = next((value for name, value in request.headers if name == _TOKEN), b"").decode("latin-1")
        shown = bool(token) and app.tokens.fits("traffic", place.sandbox, token)
        live: Live | None = app.live(owner, place.sandbox)
        try:
            if place.port == interpreter.PORT:
                interpreter.check_token(app, place.sandbox, request.headers, shown)
            elif live is not None and not shown and not _is_public(live.spec.labels.get(NETWORK, "")):
                raise WireError(403, "the traffic access token is missing or wrong")
            who = app.stand_in(owner)
            live = await app.reach(place.sandbox, owner, may_resume=shown)
            self._enter(place.sandbox, owner, who)
            if place.port == interpreter.PORT:
                await interpreter.prepare(app, who, live)
        except errors.AtollError as error:
            raise self.explain(error) from None
        return Target(owner, place.sandbox, place.port, "127.0.0.1"), "", request.target

    def _enter(self, sandbox: str, owner: str, who: object) -> None:
        """Take a place among the sandbox's connections, which ends when the key of its owner does."""
        app = self._door.app
        self._door.enter(self._task, sandbox)
        self.leave()
        holders = accounts.sandbox(sandbox), accounts.owner(owner)
        self._lease = app.core.accounts.lease(accounts.CONNECTIONS, 1, *holders)
        self._release = app.core.keeper.watch.hold(who, lambda _: self._task.cancel())  # type: ignore[arg-type]

    def explain(self, error: Exception) -> Refused:
        """Return what is said when the sandbox does not answer."""
        assert self._place is not None
        if isinstance(error, WireError):
            return _refusal(error)
        if isinstance(error, errors.SandboxGone | errors.NotFound):
            return _refusal(NotServing(self._place.sandbox))
        if isinstance(error, errors.Unauthenticated):
            return _refusal(WireError(401, error.message))
        if isinstance(error, errors.FailedPrecondition):
            return _refusal(NotServing(self._place.sandbox, self._place.port))
        text = error.message if isinstance(error, errors.AtollError) else "the sandbox did not answer in HTTP"
        return _refusal(WireError(502, text, more={"sandboxId": self._place.sandbox, "port": self._place.port}))


def _is_public(network: str) -> bool:
    return '"allowPublicTraffic":false' not in network


def _refusal(error: WireError) -> Refused:
    return Refused(error.status, error.message, json=error.body)
