"""A TCP listener for an app of the daemon, open for as long as the request that opened it.

Each connection comes with the user that owns its other end, where that is a process of this machine.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypedDict, cast

from uvicorn.server import ServerState

from atoll import errors
from atoll.server.request_limits import settings
from atoll.server.server import Joint
from atoll.server.slow_clients import BoundedPace
from atoll.server.socket_owner import loopback_owner

KEEP_ALIVE = 75
MAX_CONNECTIONS = 1024


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class OwnedProtocol(BoundedPace):
    """uvicorn's protocol, which asks for the owner of its peer while the connection is fresh."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()
            return
        theirs, ours = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        owner = loopback_owner(theirs[:2], ours[:2]) if theirs and ours else None
        joint = Joint(transport)
        self.transport = cast(asyncio.Transport, joint)
        self.app_state = {**self.app_state, "owner": owner, "joint": joint}


class Door:
    """A TCP listener for an app. `protocol` makes what serves one connection."""

    def __init__(
        self, app: Any, protocol: Callable[..., OwnedProtocol] = OwnedProtocol, keep_alive: int = KEEP_ALIVE
    ) -> None:
        self._protocol = protocol
        self._config = settings(app, OwnedProtocol, keep_alive, ws="none")
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
        self._server = await loop.create_server(lambda: self._protocol(self._config, self._state, {}), sock=listener)
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


class Place(TypedDict):
    host: str
    port: int


class Listening(TypedDict):
    listening: Place


async def listening(app: Any, host: str, port: int) -> AsyncGenerator[Listening, None]:
    """Serve until the iterator is closed; its one item says where."""
    door = Door(app)
    try:
        yield {"listening": {"host": host, "port": await door.open(host, port)}}
        await asyncio.Event().wait()
    finally:
        await door.close()
