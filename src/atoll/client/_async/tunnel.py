"""`AsyncSandbox.forward`: a TCP connection to a port inside, carried as WebSocket messages."""

from collections import deque
from typing import Self

from atoll.errors import AtollError, InvalidArgument, Unavailable

from .. import websocket
from ..calls import Call, sandbox_path
from ..http import ProtocolError
from .driver import AsyncLink, Socket, receive, send, without_deadline


class AsyncTunnel:
    """`send` bytes, `recv` bytes (empty at the end), `close`."""

    def __init__(self, sock: Socket, rest: bytes) -> None:
        self._sock: Socket | None = without_deadline(sock)
        self._decoder = websocket.Decoder()
        self._ready: deque[bytes] = deque()
        self._ended = False
        self._refusal: AtollError | None = None  # why it was ended
        self._first = rest

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, data: bytes) -> None:
        if data:
            await self._write(websocket.BINARY, data)

    async def send_eof(self) -> None:
        """No more from this side; the other may still send."""
        await self._write(websocket.BINARY, b"")

    async def recv(self) -> bytes:
        """The next bytes; empty when the other end has closed."""
        if self._first:
            await self._take(self._first)
            self._first = b""
        while not self._ready and not self._ended:
            if self._sock is None:
                return b""
            try:
                data = await receive(self._sock)
            except OSError as failure:
                raise Unavailable(f"the connection to the port was lost: {failure}") from None
            if data:
                await self._take(data)
            else:
                self._ended = True
        if self._refusal is not None and not self._ready:
            raise self._refusal
        return self._ready.popleft() if self._ready else b""

    async def close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    async def _take(self, data: bytes) -> None:
        try:
            messages = self._decoder.feed(data)
        except ProtocolError as bad:
            raise Unavailable(f"the connection to the port is out of step: {bad}") from None
        for opcode, payload in messages:
            if opcode == websocket.BINARY and payload:
                self._ready.append(payload)
            elif opcode == websocket.PING:
                await self._write(websocket.PONG, payload)
            elif opcode == websocket.CLOSE:
                self._ended, self._refusal = True, websocket.closing_error(payload)

    async def _write(self, opcode: int, data: bytes) -> None:
        if self._sock is None:
            raise Unavailable("the connection to the port is closed")
        try:
            await send(self._sock, websocket.encode(opcode, data))
        except OSError as failure:
            raise Unavailable(f"the connection to the port was lost: {failure}") from None


async def open_tunnel(link: AsyncLink, ref: str, port: int) -> AsyncTunnel:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise InvalidArgument(f"{port!r} is not a port")
    return await upgrade(link, sandbox_path(ref, "ports", str(port)))


async def upgrade(link: AsyncLink, target: str) -> AsyncTunnel:
    """Ask the daemon to speak WebSocket on this connection from now on."""
    key, headers = websocket.handshake()
    exchange = await link.open(Call("GET", target, None, headers, repeatable=True))
    try:
        await exchange.raise_for_status()
        websocket.check(key, exchange.head)
    except ProtocolError as bad:
        raise Unavailable(str(bad)) from None
    finally:
        if exchange.head.status != 101:
            exchange.close()
    return AsyncTunnel(*exchange.detach())
