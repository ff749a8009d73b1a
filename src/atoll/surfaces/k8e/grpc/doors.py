"""The doors in front of the gRPC server: TLS on TCP and a Unix socket, each connection known before its first byte.

gRPC's Python server can either insist on client certificates or not ask for them, and never says who is at the other end of
a Unix socket. So connections are accepted here: TLS with an optional client certificate, the peer's uid, the owner of a
loopback socket. The plain HTTP/2 stream then goes to the server over a private Unix socket from an address of its own,
which gRPC reports as the peer of every call on it. An address that is not in the book was not opened by a door.

Until a caller on a connection over TCP is known, `STRANGER_BYTES` are taken from it, `STRANGER_CALLS` may be refused, and it
lives for `STRANGER_SECONDS`. What a known caller has sent of messages that are not whole yet is charged to its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

from atoll import accounts
from atoll.core.access.credentials import Peer, loopback_owner
from atoll.core.access.principals import Principal
from atoll.errors import AtollError, Exhausted

from .messages import Unfinished

MAX_CONNECTIONS = 2048
MAX_STRANGERS = 512  # of them, connections on which nobody is known yet
STRANGER_BYTES = 64 * 1024  # what is taken from a connection before its caller is known
STRANGER_CALLS = 16  # calls that may be refused before anybody is known
STRANGER_SECONDS = 60.0
MESSAGE_SECONDS = 60.0  # in which a message under way has to go on
MESSAGE_BYTES = 64 * 1024  # by at least so much
HANDSHAKE_SECONDS = 10.0
CONNECT_SECONDS = 10.0
STALL_SECONDS = 60.0  # for so long an answer over TCP may wait for its reader
UNIX = "unix"
_log = logging.getLogger(__name__)


Identify = Callable[[Peer, None], Principal]


class Doors:
    """All listeners of one gRPC server, and who came through them.

    `ready` is awaited before a connection is passed on; `identify` says who is there without a key, if that can be told.
    """

    def __init__(
        self,
        inner: Path,
        ready: Callable[[], Awaitable[None]] | None = None,
        identify: Identify | None = None,
        books: accounts.Accounts | None = None,
    ) -> None:
        self.inner = inner
        self.ready = ready
        self.identify = identify
        self.books = books or accounts.Accounts()
        self.strangers = 0  # connections on which nobody is known
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
            lambda: _Front(self), sock=listener, ssl=context, ssl_handshake_timeout=patience
        )
        self._servers.append(server)

    @property
    def connections(self) -> int:
        return len(self._fronts)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for front in list(self._fronts):
            front.drop()
        for server in self._servers:
            await server.wait_closed()

    def enter(self, front: _Front, holder: accounts.Holder) -> accounts.Lease | None:
        """A place for one more connection, or None. The last eighth is for those that have none."""
        others = self.books.held(accounts.CONNECTIONS, holder)
        for count, most in ((len(self._fronts), MAX_CONNECTIONS), (self.strangers, MAX_STRANGERS)):
            if count >= (most - most // accounts.KEPT_FOR_OTHERS if others else most):
                _log.warning("too many gRPC connections; one of %s was refused", holder)
                return None
        try:
            lease = self.books.lease(accounts.CONNECTIONS, 1, holder)
        except Exhausted as full:
            _log.warning("a gRPC connection was refused: %s", full)
            return None
        self._fronts.add(front)
        return lease

    def drop(self, address: str) -> None:
        """Cut a connection, by what gRPC calls its peer."""
        name = address.removeprefix("unix-abstract:")
        for front in [front for front in self._fronts if front.name == name]:
            front.cut()

    def announce(self, front: _Front) -> None:
        self._guests[front.name] = front

    def leave(self, front: _Front) -> None:
        self._fronts.discard(front)
        self._guests.pop(front.name, None)


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
        self.known = False
        self._doors = doors
        self._task: asyncio.Task[None] | None = None
        self._place: accounts.Lease | None = None  # the connection itself
        self._held: accounts.Lease | None = None  # what came of messages that are not whole
        self._messages: Unfinished | None = None
        self._came = 0  # bytes, since the last look
        self._refused = 0
        self._clock: asyncio.TimerHandle | None = None  # of a stranger, then of a message under way
        self._stall: asyncio.TimerHandle | None = None
        self._untaken = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # uvloop's transports are not of that class, only of that shape
        holder = _stranger(stream)
        place = self._doors.enter(self, holder)
        if place is None:
            stream.abort()
            return
        self._place = place
        self._doors.strangers += 1
        self.transport = stream
        stream.pause_reading()
        if holder.name != UNIX:
            self._messages = Unfinished()
            self._clock = asyncio.get_running_loop().call_later(STRANGER_SECONDS, self._expire)
        self._task = asyncio.ensure_future(self._connect(stream))

    async def _connect(self, transport: asyncio.Transport) -> None:
        try:
            peer = self.peer = _peer(transport)
            if self._doors.ready is not None:
                await self._doors.ready()
            self.name = f"atoll-{secrets.token_hex(16)}"
            sock = await _dial(self._doors.inner, self.name)
            self._doors.announce(self)
            self._admit_without_key(peer)
            _, back = await asyncio.get_running_loop().create_connection(_Back, sock=sock)
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

    # Who it is

    def _admit_without_key(self, peer: Peer) -> None:
        """Whoever needs no key is known from the start."""
        if self._doors.identify is not None:
            with contextlib.suppress(AtollError):
                self.admit(self._doors.identify(peer, None))

    def admit(self, who: Principal) -> None:
        """Its caller is known: what it holds is its owner's from now on."""
        if self.known or self.transport is None:
            return
        holder = accounts.owner(who.owner)
        try:
            place = self._doors.books.lease(accounts.CONNECTIONS, 1, holder)
            if self._messages is not None:
                self._held = self._doors.books.lease(accounts.MEMORY, self._messages.held, holder)
        except Exhausted as full:
            self.cut(str(full))
            return
        self.known = True
        self._doors.strangers -= 1
        if self._place is not None:
            self._place.end()
        self._place = place
        self._forget_clock()
        if self._messages is not None:
            self._watch_messages()
            if not self._paused:
                self.transport.resume_reading()

    def refuse(self) -> None:
        """One more call of nobody's."""
        self._refused += 1
        if not self.known and self._refused >= STRANGER_CALLS:
            self.cut("its callers are not known")

    def _expire(self) -> None:
        self._clock = None
        self.cut("nobody on it is known")

    # What it sends

    def data_received(self, data: bytes) -> None:
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
                self.cut(str(full))
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
        self._be_content()

    def connection_lost(self, reason: Exception | None) -> None:
        self._be_content()
        self._forget_clock()
        super().connection_lost(reason)
        self._doors.leave(self)
        if self._place is not None:
            self._place.end()
            self._place = None
            self._doors.strangers -= not self.known
        if self._held is not None:
            self._held.end()

    def cut(self, why: str = "its answers are not taken") -> None:
        """End it at once."""
        _log.warning("the gRPC connection of %s was cut: %s", self.peer and self.peer.address, why)
        self.drop()

    def _await_reader(self) -> None:
        if self.transport is not None:
            self._untaken = self.transport.get_write_buffer_size()
            self._stall = asyncio.get_running_loop().call_later(STALL_SECONDS, self._look_at_reader)

    def _look_at_reader(self) -> None:
        if self.transport is not None and self.transport.get_write_buffer_size() < self._untaken:
            self._await_reader()
        else:
            self.cut()

    def _be_content(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


class _Back(_Half):
    """The side that faces the gRPC server."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)


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


def _stranger(transport: asyncio.Transport) -> accounts.Holder:
    """The holder of a connection on which nobody is known yet."""
    sock = transport.get_extra_info("socket")
    if sock.family == socket.AF_UNIX:
        return accounts.Holder("stranger", UNIX)
    name = transport.get_extra_info("peername")
    return accounts.stranger(name[0] if name else "")


def _peer(transport: asyncio.Transport) -> Peer:
    sock = transport.get_extra_info("socket")
    if sock.family == socket.AF_UNIX:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, gid = struct.unpack("3i", raw)
        return Peer(UNIX, uid, gid, pid=pid)
    theirs, ours = transport.get_extra_info("peername")[:2], transport.get_extra_info("sockname")[:2]
    channel = transport.get_extra_info("ssl_object")
    der = channel.getpeercert(binary_form=True) if channel is not None else None
    finger = hashlib.sha256(der).hexdigest() if der else None
    shown = f"[{theirs[0]}]:{theirs[1]}" if ":" in theirs[0] else f"{theirs[0]}:{theirs[1]}"
    return Peer(shown, loopback_owner(theirs, ours), None, finger)
