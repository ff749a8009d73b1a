"""The asyncio driver over TLS: the same calls and rules, to a gateway elsewhere."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from .. import tls
from ..outcome import is_quiet
from ..route import find_route
from .driver import PIECE, AsyncLink


class AsyncRemoteLink(AsyncLink):
    """The way to one gateway, for one event loop."""

    def __init__(self, endpoint: str | None = None, *, api_key: str | None = None, ca_cert: str | None = None) -> None:
        self._route = route = find_route(endpoint, api_key, ca_cert)
        super().__init__("", path=route.endpoint)
        self.home = ""
        self._context = tls.make_context(route)
        self._host = f"{route.server_name}:{route.port}" if route.loopback else route.address
        self._headers = (("Authorization", f"Bearer {route.api_key}"),) if route.api_key else ()

    async def _connect(self) -> socket.socket:
        """A thread does it: names are looked up, and a handshake waits."""
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(None, tls.connect, self._route, self._context, None)
        try:
            made = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_discard)
            raise
        made.raw.setblocking(False)
        return cast(socket.socket, AsyncSecureSocket(made.raw, made.channel))

    def keep(self, sock: socket.socket) -> None:
        cast(AsyncSecureSocket, sock).touch()
        super().keep(sock)

    def _is_usable(self, sock: socket.socket) -> bool:
        return cast(AsyncSecureSocket, sock).is_fresh and is_quiet(sock.fileno())


class AsyncSecureSocket(tls.Secured):
    """The socket operations that the driver uses, over TLS."""

    def __init__(self, raw: socket.socket, channel: tls.Channel) -> None:
        super().__init__(raw, channel)
        self._sending = asyncio.Lock()

    async def receive(self) -> bytes:
        """The next bytes; empty at the end."""
        data = self.channel.decrypt()
        while not data and not self.channel.ended:
            data = self.channel.decrypt(await asyncio.get_running_loop().sock_recv(self.raw, tls.READ))
        return data

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        async with self._sending:
            for start in range(0, len(view), PIECE):
                sealed = self.channel.encrypt(view[start : start + PIECE])
                await asyncio.get_running_loop().sock_sendall(self.raw, sealed)


def _discard(opening: asyncio.Future[tls.Secured]) -> None:
    """Close a connection that nobody waits for any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
