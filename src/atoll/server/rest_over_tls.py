"""REST for the connections of the TLS port that speak HTTP/1.1.

Each request says who calls: by its bearer key, else by the connection's client certificate, else by the owner of a loopback
socket. It is counted against the caller's rate, and comes from no web page.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from contextlib import suppress
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from atoll.core.access.audited_verbs import SOURCE
from atoll.core.access.credentials import Doorkeeper, Peer, bearer_of
from atoll.core.access.principals import Principal
from atoll.errors import AtollError, Exhausted, InvalidArgument, Unauthenticated
from atoll.server import tunnel
from atoll.server.error_boundary import content_kind, guarded, refuse_browsers
from atoll.server.request import Event, Exchange, Receive, Scope, Send
from atoll.server.request_limits import settings
from atoll.server.slow_clients import BoundedPace, BoundedReader
from atoll.server.visits import STRANGER_BYTES, Visit, Visits, peer_of

KEEP_ALIVE = 300
STALL_SECONDS = 60.0
MAX_MESSAGE = 4 * 1024 * 1024  # of a WebSocket
STALE_SECONDS = 1.0  # a caller that was identified longer ago is looked at again before its request is served
FORMS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")  # what a page may send unasked
_log = logging.getLogger(__name__)


class RestOverTls:
    """Makes the protocols of connections, and ends them."""

    def __init__(self, app: Any, keeper: Doorkeeper) -> None:
        self._keeper = keeper
        self._config = settings(
            _Guard(app, keeper),
            _Protocol,
            KEEP_ALIVE,
            ws=_Forward,
            ws_max_size=MAX_MESSAGE,
            ws_per_message_deflate=False,
            ws_ping_interval=None,  # a client that only sends does not look for pings; TCP keeps watch
        )
        self._state = ServerState()

    def make(self, visits: Visits) -> asyncio.Protocol:
        """The protocol for one connection."""
        return _Protocol(self._config, self._state, self._keeper, visits)

    async def close(self, patience: float) -> None:
        """Let requests under way be answered for `patience` seconds, then cut them."""
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks and patience:
            await asyncio.wait(set(self._state.tasks), timeout=patience)
        for task in set(self._state.tasks):
            task.cancel()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=1)
        for connection in list(self._state.connections):
            connection.transport.abort()


class _Protocol(BoundedPace):
    """uvicorn's protocol, which finds out who sends a request when its head is whole."""

    def __init__(self, config: Any, state: ServerState, keeper: Doorkeeper, visits: Visits) -> None:
        super().__init__(config, state, {})
        self.stall_seconds = STALL_SECONDS
        self._keeper = keeper
        self._visits = visits
        self._visit: Visit | None = None
        self._peer: Peer | None = None
        self._came = 0  # bytes from a stranger

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        try:
            self._visit = self._visits.enter(transport, self._cut)
            self._peer = peer_of(transport)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except (OSError, TypeError, ValueError) as trouble:  # it has gone already
            _log.info("a connection could not be served: %s", trouble)
        if self._visit is None or self._peer is None:
            transport.abort()
            return
        with suppress(AtollError):
            self._visit.admit(self._keeper.identify(self._peer, None))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._visit is not None:
            self._visit.leave()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._visit is None or self._visit.known:
            return
        self._came += len(data)
        if self._came >= STRANGER_BYTES:
            self.transport.pause_reading()  # its time ends the connection; until then it can read why it was refused

    def on_headers_complete(self) -> None:
        self.app_state = self._identify()
        self.scope["state"] = self.app_state.copy()
        super().on_headers_complete()

    def _should_upgrade(self) -> bool:
        """Whether this becomes a WebSocket. The request of an unknown caller is answered as any other."""
        return "principal" in self.app_state and super()._should_upgrade()

    def _identify(self) -> Scope:
        """Return the caller of a request for the application: its principal, or why there is none."""
        if self._visit is None or self._peer is None:
            return {"refusal": Unauthenticated("this connection is not known")}
        given = [value.decode("latin-1") for name, value in self.headers if name == b"authorization"]
        facts = {"peer": self._peer, "visit": self._visit, "by_key": bool(given), "gone": self._is_gone}
        try:
            if len(given) > 1:
                raise Unauthenticated("more than one `authorization` was sent")
            who = self._keeper.identify(self._peer, bearer_of(given[0] if given else None))
            if not self._visit.admit(who):
                raise Exhausted("this key has too many connections")
        except AtollError as refusal:
            self._visit.refuse()
            return {**facts, "refusal": refusal}
        return {**facts, "principal": who, "at": self.loop.time(), "books": self._visits.books}

    def _is_gone(self) -> bool:
        """Whether the caller has closed the connection, also while nothing is read from it."""
        if self.transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def _cut(self, why: str) -> None:
        _log.warning("the connection of %s was cut: %s", self._peer and self._peer.address, why)
        self.transport.abort()


class _Forward(BoundedReader, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, which gives its connection's place back at its end."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.stall_seconds = STALL_SECONDS

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.app_state["visit"].leave()


class _Guard:
    """The application, behind all that a caller over TCP has to pass."""

    def __init__(self, app: Any, keeper: Doorkeeper) -> None:
        self._app = app
        self._keeper = keeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, cast(Principal, scope["state"].get("principal")), [])

        async def watched(message: Event) -> None:
            exchange.started = True
            await send(message)

        async def fail(exchange: Exchange, error: AtollError) -> None:
            await (tunnel.refuse(error, send) if scope["type"] == "websocket" else exchange.fail(error))

        await guarded(exchange, self._serve(exchange, receive, watched), fail)

    async def _serve(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        state = exchange.scope["state"]
        who = self._admit(exchange, state)
        SOURCE.set(f"https {state['peer'].address}")
        with exchange.charged(state["books"], who.owner):
            await self._app(exchange.scope, receive, send)  # which ends a request whose key is taken away

    def _admit(self, exchange: Exchange, state: Scope) -> Principal:
        """The caller; raises for an unknown one, a web page, and one that calls too often."""
        if "refusal" in state:
            raise state["refusal"]
        who: Principal = state["principal"]
        refuse_browsers(exchange, only_local_names=who.kind == "local")
        if not state["by_key"] and content_kind(exchange) in FORMS:
            raise InvalidArgument("the content type is one that web pages send", hint="send application/json")
        if asyncio.get_running_loop().time() - state["at"] > STALE_SECONDS:
            self._keeper.recheck(who)  # it waited behind another request of its connection
        self._keeper.admit(who, "read" if exchange.scope.get("method") in ("GET", "HEAD") else "write")
        return who
