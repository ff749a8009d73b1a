"""The blocking driver: sends calls over Unix sockets, keeps idle connections, starts the daemon when none is there.

Nothing is ever sent twice that may have been acted upon: a request counts as acted upon from the moment its last byte
was given to the kernel. A kept connection is checked to be alive right before use, because a daemon that restarted has
closed it and would otherwise turn a harmless loss into an unknown outcome.
"""

from __future__ import annotations

import _socket
import os
from _socket import socket
from _thread import allocate_lock

from .. import spawn
from ..http import LAST_CHUNK, Cut, ProtocolError, ResponseParser, encode_chunk, encode_request
from ..outcome import ATTEMPTS, Again, Answered, BodyFailed, OnSocket, Refused, is_quiet, late, lost, unsent
from ..portable import wait_ready

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import IO, Any, ParamSpec, TypeVar

    from ..calls import Call
    from .sandbox import Sandbox

    T = TypeVar("T")
    P = ParamSpec("P")

Lock = allocate_lock
Socket = socket
PIECE = 262_144
FIRST_PIECE = 16_384  # most answers fit into it; a large buffer costs a mapping of its own
_MSG_DONTWAIT = getattr(_socket, "MSG_DONTWAIT", 0)
_MSG_NOSIGNAL = getattr(_socket, "MSG_NOSIGNAL", 0)


class Exchange(OnSocket, Answered):
    """One request under way."""

    def read(self) -> bytes:
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
                _receive(self._sock, self._parser)
            except TimeoutError:
                self.close()
                raise late(self.call) from None
            except (OSError, Cut, ProtocolError) as failure:
                self.close()
                raise lost(self.call, str(failure)) from None


class Link:
    """The way to one daemon. Safe to share between threads; a forked child opens its own connections."""

    MAX_IDLE = 8

    def __init__(self, home: str | None = None, *, path: str | None = None, start: bool = True) -> None:
        self.home = os.path.abspath(home) if home else spawn.home_directory()
        self.path = path or spawn.socket_path(self.home)
        self._start = start and path is None
        self._host = "atoll"
        self._headers: tuple[tuple[str, str], ...] = ()  # of every request
        self._idle: list[Socket] = []
        self._pid = os.getpid()

    def call(self, call: Call) -> Any:
        """Send, wait, decode."""
        return self.open(call).json()

    def open(self, call: Call, body: Iterable[bytes] | None = None) -> Exchange:
        """Send the request (its body in chunks when given) and wait for the head of the answer."""
        for attempt in range(1, ATTEMPTS + 1):
            sock = self._idle_connection() or self._connect(call.timeout)
            try:
                return self._exchange(sock, call, body)
            except Again as again:
                sock.close()
                if attempt == ATTEMPTS or (body is not None and again.consumed):
                    raise again.error from None
            except BaseException:
                sock.close()
                raise
        raise AssertionError("unreachable")

    def keep(self, sock: Socket) -> None:
        if len(self._idle) < self.MAX_IDLE and os.getpid() == self._pid:
            self._idle.append(sock)
        else:
            sock.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _idle_connection(self) -> Socket | None:
        if os.getpid() != self._pid:
            self._idle, self._pid = [], os.getpid()
        while self._idle:
            try:
                sock = self._idle.pop()
            except IndexError:  # another thread was quicker
                return None
            if self._is_usable(sock):
                return sock
            sock.close()
        return None

    def _is_usable(self, sock: Socket) -> bool:
        return is_quiet(sock.fileno())

    def _connect(self, timeout: float | None) -> Socket:
        started = False
        while True:
            try:
                return spawn.connect(self.path, timeout)
            except OSError as failure:
                if not self._start or started or not spawn.is_absent(failure):
                    raise spawn.refusal(self.path, failure) from None
            spawn.ensure(self.home)
            started = True

    def _exchange(self, sock: Socket, call: Call, body: Iterable[bytes] | None) -> Exchange:
        sock.settimeout(call.timeout)
        parser = ResponseParser()
        whole, consumed = False, False
        try:
            headers, chunked = (*self._headers, *call.headers), body is not None
            request = encode_request(call.method, call.target, headers, call.body, chunked=chunked, host=self._host)
            whole = _send(sock, request, call.timeout)
            if body is not None and whole:
                consumed = True
                whole = all(_send(sock, encode_chunk(piece), call.timeout, watch=True) for piece in _own(body))
                whole = whole and _send(sock, LAST_CHUNK, call.timeout)
        except BodyFailed as bad:
            raise bad.cause from None
        except TimeoutError:
            raise late(call) from None
        except OSError:
            whole = False  # what was sent is incomplete, so it was not acted upon; but why may have been answered
        try:
            while parser.head is None:
                _receive(sock, parser)
        except TimeoutError:
            raise late(call) from None
        except ProtocolError as bad:
            raise lost(call, str(bad)) from None
        except Refused as failure:
            raise spawn.refusal(self.path, failure) from None
        except (OSError, Cut) as failure:
            if whole and not call.repeatable:
                raise lost(call, str(failure)) from None
            raise Again(unsent(self.path, call, str(failure), whole or consumed), consumed) from None
        return Exchange(self, call, sock, parser, parser.head, whole)


def _own(body: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from body
    except OSError as bad:
        raise BodyFailed(bad) from None


def _receive(sock: Socket, parser: ResponseParser) -> None:
    data = sock.recv(PIECE if parser.head is not None else FIRST_PIECE)
    if data:
        parser.feed(data)
    else:
        parser.eof()


def _send(sock: Socket, data: bytes, timeout: float | None, *, watch: bool = False) -> bool:
    """Send all of it; False when the peer answered before it had everything: it will not read the rest.

    A short request is out before there can be an answer; with `watch` one is looked for all the same.
    """
    if len(data) <= 16_384 and not watch:
        sock.sendall(data, _MSG_NOSIGNAL)
        return True
    if not isinstance(sock, socket):
        answered: bool = sock.send_until_answered(data, timeout)  # over TLS
        return answered
    return send_until_answered(sock, data, timeout, lambda: True)


def send_until_answered(sock: Socket, data: bytes, timeout: float | None, is_answer: Callable[[], bool]) -> bool:
    """Send all of it; False when the peer answered before. `is_answer` says whether what can be read is one."""
    view = memoryview(data)
    while view:
        readable, writable, broken = wait_ready(sock.fileno(), timeout, write=True)
        if not (readable or writable or broken):
            raise TimeoutError
        if broken or (readable and is_answer()):
            return False
        if not writable:
            continue
        try:
            view = view[sock.send(view, _MSG_DONTWAIT | _MSG_NOSIGNAL) :]
        except BlockingIOError:
            continue
    return True


# What the faces need and what differs between the two drivers


def ask_id(sandbox: Sandbox) -> str:
    """Create the sandbox if need be; its id."""
    return sandbox._target()[0]


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it: a blocking caller may wait."""
    return function(*args, **kwargs)


def receive(sock: Socket) -> bytes:
    """The next bytes of a socket; empty at its end."""
    return sock.recv(PIECE)


def send(sock: Socket, data: bytes) -> None:
    """Send all of it."""
    sock.sendall(data)


def without_deadline(sock: Socket) -> Socket:
    """The socket, from now on without the time limit of the call that opened it."""
    sock.settimeout(None)
    return sock


def pieces_of(data: IO[bytes] | Iterable[bytes]) -> Iterator[bytes]:
    """The content of a file or iterable, piece by piece."""
    from ..archive import read_pieces

    return read_pieces(data) if hasattr(data, "read") else iter(data)  # type: ignore[arg-type]


def save(exchange: Exchange, consume: Callable[[Iterator[bytes]], T]) -> T:
    """Give the body to a function, piece by piece as it comes."""
    return consume(iter(exchange.read, b""))
