"""The asyncio driver: the same rules as the blocking one (see there), with the event loop doing the waiting.

It works on plain non-blocking sockets through the loop's `sock_*` calls, so that a cancelled call leaves nothing behind
but a closed connection, which the daemon takes as a cancel of the command.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from atoll.errors import FailedPrecondition

from .. import archive, spawn
from ..http import LAST_CHUNK, Cut, ProtocolError, ResponseParser, encode_chunk, encode_request
from ..outcome import ATTEMPTS, Again, AsyncAnswered, BodyFailed, OnSocket, Refused, is_quiet, late, lost, unsent

if TYPE_CHECKING:
    from ..calls import Call
    from .sandbox import AsyncSandbox

T = TypeVar("T")
P = ParamSpec("P")
Lock = asyncio.Lock
Socket = socket.socket

PIECE = 262_144
FIRST_PIECE = 16_384  # most answers fit into it; a large buffer costs a mapping of its own
SMALL = 16_384  # fits the socket's buffer, so sending never waits for the peer


class AsyncExchange(OnSocket, AsyncAnswered):
    """One request under way."""

    async def read(self) -> bytes:
        """The next piece of the body; empty at its end."""
        while True:
            piece = self._parser.take()
            if piece:
                return piece
            if self._parser.done:
                self._release()
                return b""
            if self._sock is None:
                raise lost(self.call, "closed")
            try:
                async with asyncio.timeout(self.call.timeout):
                    await _receive(self._sock, self._parser)
            except TimeoutError:
                self.close()
                raise late(self.call) from None
            except (OSError, Cut, ProtocolError) as failure:
                self.close()
                raise lost(self.call, str(failure)) from None
            except BaseException:
                self.close()
                raise


class AsyncLink:
    """The way to one daemon, for one event loop."""

    MAX_IDLE = 32

    def __init__(self, home: str | None = None, *, path: str | None = None, start: bool = True) -> None:
        self.home = os.path.abspath(home) if home else spawn.home_directory()
        self.path = path or spawn.socket_path(self.home)
        self._start = start and path is None
        self._host = "atoll"
        self._headers: tuple[tuple[str, str], ...] = ()  # of every request
        self._idle: list[socket.socket] = []

    async def call(self, call: Call) -> Any:
        """Send, wait, decode."""
        return await (await self.open(call)).json()

    async def open(self, call: Call, body: AsyncIterable[bytes] | None = None) -> AsyncExchange:
        """Send the request (its body in chunks when given) and wait for the head of the answer."""
        for attempt in range(1, ATTEMPTS + 1):
            sock = self._idle_connection() or await self._connect()
            try:
                return await self._exchange(sock, call, body)
            except Again as again:
                sock.close()
                if attempt == ATTEMPTS or (body is not None and again.consumed):
                    raise again.error from None
            except BaseException:
                sock.close()
                raise
        raise AssertionError("unreachable")

    def keep(self, sock: socket.socket) -> None:
        if len(self._idle) < self.MAX_IDLE:
            self._idle.append(sock)
        else:
            sock.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _idle_connection(self) -> socket.socket | None:
        while self._idle:
            sock = self._idle.pop()
            if self._is_usable(sock):
                return sock
            sock.close()
        return None

    def _is_usable(self, sock: socket.socket) -> bool:
        return is_quiet(sock.fileno())

    async def _connect(self) -> socket.socket:
        started, until = False, asyncio.get_running_loop().time() + 30.0
        while True:
            try:
                bare = spawn.connect(self.path, 0)  # a Unix socket connects at once or, with a full backlog, not yet
                return socket.socket(fileno=bare.detach())
            except BlockingIOError as failure:
                if asyncio.get_running_loop().time() > until:
                    raise spawn.refusal(self.path, failure) from None
                await asyncio.sleep(0.01)
                continue
            except OSError as failure:
                if not self._start or started or not spawn.is_absent(failure):
                    raise spawn.refusal(self.path, failure) from None
            await asyncio.to_thread(spawn.ensure, self.home)
            started = True

    async def _exchange(self, sock: socket.socket, call: Call, body: AsyncIterable[bytes] | None) -> AsyncExchange:
        parser, sent = ResponseParser(), _Sent()
        try:
            headers, chunked = (*self._headers, *call.headers), body is not None
            head = encode_request(call.method, call.target, headers, call.body, chunked=chunked, host=self._host)
            async with asyncio.timeout(call.timeout):
                await _converse(sock, head, body, parser, sent)
        except BodyFailed as own:
            raise own.cause from None
        except TimeoutError:
            raise late(call) from None
        except ProtocolError as bad:
            raise lost(call, str(bad)) from None
        except Refused as bad:
            raise spawn.refusal(self.path, bad) from None
        except (OSError, Cut) as bad:
            if sent.whole and not call.repeatable:
                raise lost(call, str(bad)) from None
            raise Again(unsent(self.path, call, str(bad), sent.whole or sent.consumed), sent.consumed) from None
        if parser.head is None:
            raise AssertionError("unreachable")
        return AsyncExchange(self, call, sock, parser, parser.head, sent.whole)


class _Sent:
    """How far a request got out."""

    whole = False
    consumed = False  # some of a streamed body, which cannot be had again


async def _converse(
    sock: socket.socket, request: bytes, body: AsyncIterable[bytes] | None, parser: ResponseParser, sent: _Sent
) -> None:
    """Send, and wait for the head of the answer. An answer that comes before a long body is out ends the sending."""
    if body is None and len(request) <= SMALL:
        with suppress(OSError):  # incomplete, so not acted upon; but why may have been answered
            await _send(sock, request, None, sent)
        await _head(sock, parser)
        return
    sending = asyncio.ensure_future(_send(sock, request, body, sent))
    receiving = asyncio.ensure_future(_head(sock, parser))
    try:
        await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
        trouble = sending.exception() if sending.done() else None
        if trouble is not None and not isinstance(trouble, OSError):
            raise trouble
        await receiving
    finally:
        await _end(sending)
        await _end(receiving)


async def _send(sock: socket.socket, request: bytes, body: AsyncIterable[bytes] | None, sent: _Sent) -> None:
    await send(sock, request)
    if body is not None:
        async for piece in _own(body):
            sent.consumed = True
            await send(sock, encode_chunk(piece))
        await send(sock, LAST_CHUNK)
    sent.whole = True


async def _own(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    try:
        async for piece in body:
            yield piece
    except OSError as bad:
        raise BodyFailed(bad) from None


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel and wait, whatever comes of it."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _head(sock: socket.socket, parser: ResponseParser) -> None:
    while parser.head is None:
        await _receive(sock, parser)


async def _receive(sock: socket.socket, parser: ResponseParser) -> None:
    data = await receive(sock, PIECE if parser.head is not None else FIRST_PIECE)
    if data:
        parser.feed(data)
    else:
        parser.eof()


# Needs of the faces that differ between the two drivers


def ask_id(sandbox: AsyncSandbox) -> str:
    """Refuse: a property cannot wait for a create."""
    raise FailedPrecondition("the sandbox has not been created yet", hint="async with, or await create()")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that blocks, without blocking the event loop."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def receive(sock: socket.socket, size: int = PIECE) -> bytes:
    """The next bytes of a socket; empty at its end."""
    if isinstance(sock, socket.socket):
        return await asyncio.get_running_loop().sock_recv(sock, size)
    data: bytes = await sock.receive()  # over TLS
    return data


async def send(sock: socket.socket, data: bytes) -> None:
    """Send all of it."""
    if isinstance(sock, socket.socket):
        await asyncio.get_running_loop().sock_sendall(sock, data)
    else:
        await sock.send(data)  # over TLS


def without_deadline(sock: socket.socket) -> socket.socket:
    """The socket as it is: its waits are the event loop's."""
    return sock


async def pieces_of(data: IO[bytes] | AsyncIterable[bytes] | Iterable[bytes]) -> AsyncIterator[bytes]:
    """The content of a file or iterable, piece by piece; what blocks is read in a thread."""
    if isinstance(data, AsyncIterable):
        async for piece in data:
            yield piece
        return
    pieces = archive.read_pieces(cast(IO[bytes], data)) if hasattr(data, "read") else iter(data)
    while piece := await asyncio.to_thread(_next_piece, pieces):
        yield piece


def _next_piece(pieces: Iterator[bytes]) -> bytes:
    """The next piece that is not empty; empty at the end."""
    return next((piece for piece in pieces if piece), b"")


async def save(exchange: AsyncExchange, consume: Callable[[Iterator[bytes]], T]) -> T:
    """Give the body to a function that blocks: through a temporary file, in a thread."""
    with tempfile.TemporaryFile() as spool:
        while piece := await exchange.read():
            await asyncio.to_thread(spool.write, piece)
        spool.seek(0)
        return await asyncio.to_thread(consume, archive.read_pieces(spool))
