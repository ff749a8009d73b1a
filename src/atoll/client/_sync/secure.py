"""The blocking driver over TLS: the same calls and rules, to a gateway elsewhere."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, cast

from .. import tls
from ..outcome import is_quiet
from ..route import find_route
from .driver import PIECE, Link, Socket, send_until_answered

if TYPE_CHECKING:
    from collections.abc import Iterator


class RemoteLink(Link):
    """The way to one gateway. Safe to share between threads."""

    def __init__(self, endpoint: str | None = None, *, api_key: str | None = None, ca_cert: str | None = None) -> None:
        self._route = route = find_route(endpoint, api_key, ca_cert)
        super().__init__("", path=route.endpoint)
        self.home = ""
        self._context = tls.make_context(route)
        self._host = f"{route.server_name}:{route.port}" if route.loopback else route.address
        self._headers = (("Authorization", f"Bearer {route.api_key}"),) if route.api_key else ()

    def _connect(self, timeout: float | None) -> Socket:
        made = tls.connect(self._route, self._context, timeout)
        return cast(Socket, SecureSocket(made.raw, made.channel))

    def keep(self, sock: Socket) -> None:
        cast(SecureSocket, sock).touch()
        super().keep(sock)

    def _is_usable(self, sock: Socket) -> bool:
        return cast(SecureSocket, sock).is_fresh and is_quiet(sock.fileno())


class SecureSocket(tls.Secured):
    """What the driver uses of a socket, over TLS. One thread may receive while another sends."""

    def __init__(self, raw: socket.socket, channel: tls.Channel) -> None:
        super().__init__(raw, channel)
        self._sending = threading.Lock()
        self._early = b""  # of the answer, come while the request was still being sent

    def settimeout(self, seconds: float | None) -> None:
        self.raw.settimeout(seconds)

    def recv(self, size: int) -> bytes:
        """The next bytes; empty at the end."""
        data, self._early = self._early, b""
        data = data or self.channel.decrypt()
        while not data and not self.channel.ended:
            data = self.channel.decrypt(self.raw.recv(tls.READ))
        return data

    def sendall(self, data: bytes, flags: int = 0) -> None:
        with self._sending:
            for piece in self._sealed(data):
                self.raw.sendall(piece, flags)

    def send_until_answered(self, data: bytes, timeout: float | None) -> bool:
        """Send all of it; False when the peer answered before it had everything."""
        with self._sending:
            raw = cast(Socket, self.raw)
            return all(send_until_answered(raw, piece, timeout, self._is_answered) for piece in self._sealed(data))

    def _sealed(self, data: bytes) -> Iterator[bytes]:
        view = memoryview(data)
        for start in range(0, len(view), PIECE):
            yield self.channel.encrypt(view[start : start + PIECE])

    def _is_answered(self) -> bool:
        """Whether what can be read is an answer, and not TLS's own."""
        self._early += self.channel.decrypt(self.raw.recv(tls.READ))
        return bool(self._early) or self.channel.ended
