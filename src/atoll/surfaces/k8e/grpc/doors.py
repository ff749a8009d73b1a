"""The listeners of gRPC and of REST over TLS: a TCP port and a Unix socket, each connection known before its first byte.

On the TLS port ALPN chooses the protocol of a connection: `h2` is gRPC, `http/1.1` and no choice at all are REST. A client
that offers both gets `http/1.1`, because gRPC clients offer `h2` alone.

gRPC's Python server can either insist on client certificates or not ask for them, and never says who is at the other end of
a Unix socket. So connections are accepted here: TLS with an optional client certificate, the peer's uid, the owner of a
loopback socket. The plain HTTP/2 stream then goes to the server over a private Unix socket from an address of its own,
which gRPC reports as the peer of every call on it. An address that is not in the book was not opened by a door.

What strangers may do is in `atoll.server.visits`. What a known caller has sent of messages that are not whole yet is
charged to its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

from atoll import accounts
from atoll.core.access.credentials import Peer
from atoll.core.access.principals import Principal
from atoll.errors import AtollError, Exhausted
from atoll.server.visits import STRANGER_BYTES, STRANGER_CALLS, UNIX, Visit, Visits, peer_of

from .messages import Edges, Unfinished

__all__ = ["STRANGER_CALLS", "UNIX", "Doors"]

MESSAGE_SECONDS = 60.0  # in which a message under way has to go on
MESSAGE_BYTES = 64 * 1024  # by at least so much
HANDSHAKE_SECONDS = 10.0
CONNECT_SECONDS = 10.0
GOODBYE_SECONDS = 5.0  # in which a client reads why its calls end
STALL_SECONDS = 60.0  # for so long an answer over TCP may wait for its reader
_log = logging.getLogger(__name__)


Identify = Callable[[Peer, None], Principal]


class Doors:
    """All listeners of one gRPC server, and who came through them.

    `ready` is awaited before a connection is passed on; `identify` says who is there without a key, if that can be told.
    `rest` makes the protocol of a connection that does not speak HTTP/2; without one such a connection is refused.
    """

    def __init__(
        self,
        inner: Path,
        ready: Callable[[], Awaitable[None]] | None = None,
        identify: Identify | None = None,
        books: accounts.Accounts | None = None,
        rest: Callable[[Visits], asyncio.Protocol] | None = None,
    ) -> None:
        self.inner = inner
        self.ready = ready
        self.identify = identify
        self.rest = rest
        self.visits = Visits(books)
        self.books = self.visits.books
        self._guests: dict[str, _Front] = {}
        self._servers: list[asyncio.AbstractServer] = []
        self._fronts: set[_Front] = set()

    def who(self, address: str) -> Peer | None:
        """The peer behind what gRPC calls its peer; None for a connection that came past the doors."""
        front = self._guests.get(address.removeprefix("unix-abstract:"))
        return None if front is None else front.peer

    def admit(self, address: str, who: Principal) -> None:
        """A caller on this connection is known."""
        front = self._guests.get(address.removeprefix("unix-abstract:"))
        if front is not None and not front.known:
            front.admit(who)

    def refuse(self, address: str) -> None:
        """A call on this connection was nobody's. A connection with too many of them and none of anybody's ends."""
        front = self._guests.get(address.removeprefix("unix-abstract:"))
        if front is not None:
            front.refuse()

    async def open_tcp(self, host: str, port: int, context: ssl.SSLContext) -> int:
        """Listen with TLS; returns the port. Certificates loaded into `context` later count for new connections."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=256)
        await self._listen(listener, context)
        bound: int = listener.getsockname()[1]
        return bound

    async def open_unix(self, path: Path, mode: int = 0o600) -> None:
        """Listen on a Unix socket which replaces an older one, and never exists with wider rights than `mode`."""
        fresh = f".{path.name[:40]}.{secrets.token_hex(4)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        os.fchmod(listener.fileno(), 0o600)  # Linux makes the file with the socket's own mode
        # By way of a descriptor, because a socket's address holds 107 bytes and a path may be longer.
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{fresh}")
        finally:
            os.close(directory)
        os.chmod(path.parent / fresh, mode)
        listener.listen(256)
        os.replace(path.parent / fresh, path)
        await self._listen(listener, None)

    async def _listen(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        patience = HANDSHAKE_SECONDS if context else None
        server = await loop.create_server(
            lambda: _Chooser(self) if context else _Front(self),
            sock=listener,
            ssl=context,
            ssl_handshake_timeout=patience,
        )
        self._servers.append(server)

    @property
    def connections(self) -> int:
        return len(self.visits)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for front in list(self._fronts):
            front.drop()
        for server in self._servers:
            await server.wait_closed()

    def drop(self, address: str) -> None:
        """Cut a connection, by what gRPC calls its peer."""
        name = address.removeprefix("unix-abstract:")
        for front in [front for front in self._fronts if front.name == name]:
            front.cut()

    def enter(self, front: _Front, transport: asyncio.Transport) -> Visit | None:
        visit = self.visits.enter(transport, front.cut)
        if visit is not None:
            self._fronts.add(front)
        return visit

    def announce(self, front: _Front) -> None:
        self._guests[front.name] = front

    def leave(self, front: _Front) -> None:
        self._fronts.discard(front)
        self._guests.pop(front.name, None)


class _Chooser(asyncio.Protocol):
    """Hands a connection, once its TLS handshake is over, to the protocol that the client chose."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        chosen = stream.get_extra_info("ssl_object").selected_alpn_protocol()
        if chosen == "h2":
            protocol: asyncio.Protocol = _Front(self._doors)
        elif self._doors.rest is not None:
            protocol = self._doors.rest(self._doors.visits)
        else:
            stream.abort()
            return
        stream.set_protocol(protocol)
        protocol.connection_made(stream)


class _Half(asyncio.Protocol):
    """One side of a connection that is passed through. Each side stops reading while the other cannot take more."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Half | None = None
        self.full = False  # it takes no more for now
        self._early: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early.append(data)
        else:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        self.full = True
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.full = False
        if self.other is not None:
            self.other.go_on()

    def go_on(self) -> None:
        """Read again, now that the other side takes more."""
        if self.transport is not None:
            self.transport.resume_reading()

    def connection_lost(self, reason: Exception | None) -> None:
        self.transport = None
        if self.other is not None:
            self.other.drop(politely=True)

    def join(self, other: _Half) -> None:
        """Both ends are there: pass on what came early, then let it flow."""
        self.other, other.other = other, self
        for here, there in ((self, other), (other, self)):
            if there.transport is not None and here._early:
                there.transport.write(b"".join(here._early))
            here._early.clear()

    def drop(self, *, politely: bool = False) -> None:
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.close() if politely else transport.abort()


class _Front(_Half):
    """The side that faces the client."""

    def __init__(self, doors: Doors) -> None:
        super().__init__()
        self.name = ""
        self.peer: Peer | None = None
        self._doors = doors
        self._task: asyncio.Task[None] | None = None
        self._visit: Visit | None = None
        self._held: accounts.Lease | None = None  # what came of messages that are not whole
        self._messages: Unfinished | None = None
        self._sent = Edges()  # towards the client
        self._over = False
        self._came = 0  # bytes, since the last look
        self._clock: asyncio.TimerHandle | None = None  # of a message under way
        self._stall: asyncio.TimerHandle | None = None
        self._untaken = 0

    @property
    def known(self) -> bool:
        return self._visit is not None and self._visit.known

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # uvloop's transports are not of that class, only of that shape
        self._visit = self._doors.enter(self, stream)
        if self._visit is None:
            stream.abort()
            return
        self.transport = stream
        stream.pause_reading()
        if stream.get_extra_info("ssl_object") is not None:
            self._messages = Unfinished()
        self._task = asyncio.ensure_future(self._connect(stream))

    async def _connect(self, transport: asyncio.Transport) -> None:
        try:
            peer = self.peer = peer_of(transport)
            if self._doors.ready is not None:
                await self._doors.ready()
            self.name = f"atoll-{secrets.token_hex(16)}"
            sock = await _dial(self._doors.inner, self.name)
            self._doors.announce(self)
            self._admit_without_key(peer)
            sent = self._sent if self._messages is not None else None
            _, back = await asyncio.get_running_loop().create_connection(lambda: _Back(sent), sock=sock)
            self.join(back)
        except (OSError, ValueError) as trouble:
            _log.warning("a gRPC connection could not be passed on: %s", trouble)
            self.drop()
            return
        if self.transport is None:
            back.drop()  # the client left meanwhile
        else:
            transport.resume_reading()

    def go_on(self) -> None:
        if self.known or self._messages is None or self._came < STRANGER_BYTES:
            super().go_on()

    # Identity of the peer

    def _admit_without_key(self, peer: Peer) -> None:
        """Identify a peer that needs no key."""
        if self._doors.identify is not None:
            with contextlib.suppress(AtollError):
                self.admit(self._doors.identify(peer, None))

    def admit(self, who: Principal) -> None:
        """Its caller is known: what it holds is its owner's from now on."""
        if self.known or self.transport is None:
            return
        if self._visit is None or not self._visit.admit(who) or self._messages is None:
            return
        try:
            self._held = self._doors.books.lease(accounts.MEMORY, self._messages.held, accounts.owner(who.owner))
        except Exhausted as full:
            self._exhaust(str(full))
            return
        self._watch_messages()
        if not self._paused:
            self.transport.resume_reading()

    def refuse(self) -> None:
        """One more call of nobody's."""
        if self._visit is not None:
            self._visit.refuse()

    # Bytes of the peer

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        if self._messages is not None:
            self._messages.feed(data)
            self._came += len(data)
            if not self.known:
                if self._came >= STRANGER_BYTES and self.transport is not None:
                    self.transport.pause_reading()  # until its caller is known, or its time is over
            elif not self._charge():
                return
        super().data_received(data)

    def _charge(self) -> bool:
        """Whether its owner may hold what it has sent of messages that are not whole."""
        assert self._messages is not None and self._held is not None
        more = self._messages.held - self._held.amount
        if more < 0:
            self._held.shrink(-more)
        elif more > 0:
            try:
                self._held.grow(more)
            except Exhausted as full:
                self._exhaust(str(full))
                return False
            self._watch_messages()
        return True

    def _watch_messages(self) -> None:
        if self._clock is None and self._messages is not None and self._messages.held:
            self._came = 0
            self._clock = asyncio.get_running_loop().call_later(MESSAGE_SECONDS, self._look_at_messages)

    def _look_at_messages(self) -> None:
        self._clock = None
        if self._messages is not None and self._messages.held and self._came < MESSAGE_BYTES and not self._paused:
            self.cut("a message does not go on")
        else:
            self._watch_messages()

    @property
    def _paused(self) -> bool:
        """Whether it is we who do not take more."""
        return self.other is not None and self.other.full

    def _forget_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.peer is not None and self.peer.address != UNIX and self._stall is None:
            self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stall_timer()

    def connection_lost(self, reason: Exception | None) -> None:
        self._cancel_stall_timer()
        self._forget_clock()
        super().connection_lost(reason)
        self._doors.leave(self)
        if self._visit is not None:
            self._visit.leave()
        if self._held is not None:
            self._held.end()

    def cut(self, why: str = "its answers are not taken") -> None:
        """End it at once."""
        _log.warning("the gRPC connection of %s was cut: %s", self.peer and self.peer.address, why)
        self.drop()

    def _exhaust(self, why: str) -> None:
        """End the calls whose messages are not whole with RESOURCE_EXHAUSTED, and the connection behind them.

        What they sent is given back at once; what the client still sends is not looked at.
        """
        transport, back = self.transport, self.other
        if transport is None or back is None or self._messages is None or not self._sent.whole:
            return self.cut(why)
        _log.warning("calls of %s were refused: %s", self.peer and self.peer.address, why)
        self._over = True
        self.other = back.other = None
        back.drop()
        if self._held is not None:
            self._held.end()
        self._forget_clock()
        transport.write(self._messages.refusals())
        transport.resume_reading()
        self._clock = asyncio.get_running_loop().call_later(GOODBYE_SECONDS, self.drop)

    def _await_reader(self) -> None:
        if self.transport is not None:
            self._untaken = self.transport.get_write_buffer_size()
            self._stall = asyncio.get_running_loop().call_later(STALL_SECONDS, self._look_at_reader)

    def _look_at_reader(self) -> None:
        if self.transport is not None and self.transport.get_write_buffer_size() < self._untaken:
            self._await_reader()
        else:
            self.cut()

    def _cancel_stall_timer(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


class _Back(_Half):
    """The side that faces the gRPC server."""

    def __init__(self, sent: Edges | None) -> None:
        super().__init__()
        self._sent = sent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._sent is not None:
            self._sent.feed(data)
        super().data_received(data)


async def _dial(inner: Path, name: str) -> socket.socket:
    """Connect to the server from an abstract address: a name without a file, gone with the socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.bind(f"\0{name}")
        async with asyncio.timeout(CONNECT_SECONDS):
            while True:
                try:
                    sock.connect(str(inner))
                    return sock
                except BlockingIOError:  # the server's backlog is full; unlike TCP, nothing is under way
                    await asyncio.sleep(0.01)
    except BaseException:
        sock.close()
        raise
