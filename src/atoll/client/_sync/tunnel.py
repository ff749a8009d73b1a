"""`Sandbox.forward`: a TCP connection to a port inside, carried as WebSocket messages."""

from _socket import socket as Socket
from collections import deque
from typing import Self, cast

from atoll.errors import InvalidArgument, Unavailable

from .. import websocket
from ..calls import Call, sandbox_path
from ..http import ProtocolError
from .driver import PIECE, Link


class Tunnel:
    """`send` bytes, `recv` bytes (empty at the end), `close`."""

    def __init__(self, sock: Socket, rest: bytes) -> None:
        self._sock: Socket | None = sock
        self._decoder = websocket.Decoder()
        self._ready: deque[bytes] = deque()
        self._ended = False
        self._first = rest
        sock.settimeout(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        if data:
            self._write(websocket.BINARY, data)

    def send_eof(self) -> None:
        """No more from this side; the other may still send."""
        self._write(websocket.BINARY, b"")

    def recv(self) -> bytes:
        """The next bytes; empty when the other end has closed."""
        if self._first:
            self._take(self._first)
            self._first = b""
        while not self._ready and not self._ended:
            if self._sock is None:
                return b""
            try:
                data = self._sock.recv(PIECE)
            except OSError as failure:
                raise Unavailable(f"the connection to the port was lost: {failure}") from None
            if data:
                self._take(data)
            else:
                self._ended = True
        return self._ready.popleft() if self._ready else b""

    def close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _take(self, data: bytes) -> None:
        try:
            messages = self._decoder.feed(data)
        except ProtocolError as bad:
            raise Unavailable(f"the connection to the port is out of step: {bad}") from None
        for opcode, payload in messages:
            if opcode == websocket.BINARY and payload:
                self._ready.append(payload)
            elif opcode == websocket.PING:
                self._write(websocket.PONG, payload)
            elif opcode == websocket.CLOSE:
                self._ended = True

    def _write(self, opcode: int, data: bytes) -> None:
        if self._sock is None:
            raise Unavailable("the connection to the port is closed")
        try:
            self._sock.sendall(websocket.encode(opcode, data))
        except OSError as failure:
            raise Unavailable(f"the connection to the port was lost: {failure}") from None


def open_tunnel(link: Link, ref: str, port: int) -> Tunnel:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise InvalidArgument(f"{port!r} is not a port")
    if not isinstance(link, Link):
        return cast(Tunnel, link.tunnel(ref, port))  # a gateway elsewhere has a way of its own
    return upgrade(link, sandbox_path(ref, "ports", str(port)))


def upgrade(link: Link, target: str) -> Tunnel:
    """Ask the daemon to speak WebSocket on this connection from now on."""
    key, headers = websocket.handshake()
    exchange = link.open(Call("GET", target, None, headers, repeatable=True))
    try:
        exchange.raise_for_status()
        websocket.check(key, exchange.head)
    except ProtocolError as bad:
        raise Unavailable(str(bad)) from None
    finally:
        if exchange.head.status != 101:
            exchange.close()
    return Tunnel(*exchange.detach())
