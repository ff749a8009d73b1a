"""The TCP door of agentkernel's HTTP interface: who may come in, and what a browser may not do.

A page in somebody's browser can send requests to loopback. So Host must be a name of this door, a foreign Origin is refused,
and bodies must say that they are JSON, which a page cannot do without asking first. Without a key only processes of the
daemon's own user are served, known by the owner of their socket; any other address needs a key.
"""

import asyncio
import hmac
import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from atoll import errors
from atoll.core.access import Principal, local
from atoll.core.credentials import loopback_owner
from atoll.gateway.exchange import Exchange
from atoll.gateway.heads import BoundedHeads

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
KEEP_ALIVE = 75
MAX_CONNECTIONS = 1024


@dataclass(frozen=True, slots=True)
class Admission:
    """What lets a request in: the address served, and the key if there is one."""

    host: str
    key: str | None

    def check(self, exchange: Exchange) -> Principal:
        """The caller, or why not."""
        self._check_browser(exchange)
        if exchange.parts == ["health"]:
            return local(os.geteuid(), os.getegid())  # it says nothing about anybody
        if self.key is not None:
            self._check_key(exchange, self.key)
        elif exchange.scope["state"].get("owner") != os.geteuid():
            raise errors.Unauthenticated("Missing API key: only processes of the server's own user need none")
        return local(os.geteuid(), os.getegid())

    def _check_browser(self, exchange: Exchange) -> None:
        asked = exchange.header(b"host")
        name = _host_name(asked)
        if name not in LOCAL_NAMES and is_loopback(self.host):
            raise errors.PermissionDenied("this server is not called that", hint="use http://localhost")
        origin = exchange.header(b"origin")
        if origin and origin.lower() != f"http://{asked.lower()}":
            raise errors.PermissionDenied("requests from web pages are refused")
        if exchange.header(b"sec-fetch-site") in ("cross-site", "same-site"):
            raise errors.PermissionDenied("requests from web pages are refused")

    def _check_key(self, exchange: Exchange, key: str) -> None:
        given = exchange.header(b"x-api-key")
        header = exchange.header(b"authorization")
        if header:
            scheme, _, given = header.partition(" ")
            if scheme.lower() != "bearer":
                raise errors.Unauthenticated("Invalid authorization scheme: expected Bearer")
        if not given:
            raise errors.Unauthenticated("Missing API key")
        if not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise errors.Unauthenticated("Invalid API key")


def check_content(exchange: Exchange, body: bytes) -> None:
    """A body must be JSON by its own word."""
    kind = exchange.header(b"content-type").partition(";")[0].strip().lower()
    if (body or kind) and kind != "application/json":
        raise errors.InvalidArgument("the content type must be application/json")


def _host_name(text: str) -> str:
    if text.startswith("["):
        return text[1:].partition("]")[0].lower()
    return text.partition(":")[0].lower()


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _OwnedProtocol(BoundedHeads):
    """uvicorn's protocol, which asks for the owner of its peer while the connection is fresh."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()
            return
        theirs, ours = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        owner = loopback_owner(theirs[:2], ours[:2]) if theirs and ours else None
        self.app_state = {**self.app_state, "owner": owner}


class Door:
    """A TCP listener for an app."""

    def __init__(self, app: Any) -> None:
        self._config = Config(
            app,
            http=_OwnedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE,
            server_header=False,
            date_header=False,
        )
        self._config.load()
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> int:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        address = "127.0.0.1" if host == "localhost" else host
        try:
            listener = socket.create_server((address, port), family=family, backlog=256)
        except OSError as failure:
            raise errors.Unavailable(f"cannot listen on {host}:{port}: {failure.strerror or failure}") from None
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _OwnedProtocol(self._config, self._state, {}), sock=listener)
        bound: int = listener.getsockname()[1]
        return bound

    async def close(self) -> None:
        """No new connections; what is under way is cut, and with it the commands of those callers."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        for task in set(self._state.tasks):
            task.cancel()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=10)
        for connection in list(self._state.connections):
            connection.transport.close()
