"""The doors in front of the gRPC server: TLS on TCP and a Unix socket, each connection known before its first byte.

gRPC's Python server can either insist on client certificates or not ask for them, and never says who is at the other end of
a Unix socket. So connections are accepted here: TLS with an optional client certificate, the peer's uid, the owner of a
loopback socket. The plain HTTP/2 stream then goes to the server over a private Unix socket from an address of its own,
which gRPC reports as the peer of every call on it. An address that is not in the book was not opened by a door.
"""

from __future__ import annotations

import asyncio
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

from atoll.core.access.credentials import Peer, loopback_owner

MAX_CONNECTIONS = 2048
HANDSHAKE_SECONDS = 10.0
CONNECT_SECONDS = 10.0
STALL_SECONDS = 60.0  # for so long an answer over TCP may wait for its reader
_log = logging.getLogger(__name__)


class Doors:
    """All listeners of one gRPC server, and who came through them. `ready` is awaited before a connection is passed on."""

    def __init__(self, inner: Path, ready: Callable[[], Awaitable[None]] | None = None) -> None:
        self.inner = inner
        self.ready = ready
        self.guests: dict[str, Peer] = {}
        self._servers: list[asyncio.AbstractServer] = []
        self._fronts: set[_Front] = set()

    def who(self, address: str) -> Peer | None:
        """The peer behind what gRPC calls its peer; None for a connection that came past the doors."""
        return self.guests.get(address.removeprefix("unix-abstract:"))

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

    def enter(self, front: _Front) -> bool:
        if len(self._fronts) >= MAX_CONNECTIONS:
            _log.warning("more than %d gRPC connections; one was refused", MAX_CONNECTIONS)
            return False
        self._fronts.add(front)
        return True

    def drop(self, address: str) -> None:
        """Cut a connection, by what gRPC calls its peer."""
        name = address.removeprefix("unix-abstract:")
        for front in [front for front in self._fronts if front.name == name]:
            front.cut()

    def leave(self, front: _Front) -> None:
        self._fronts.discard(front)
        self.guests.pop(front.name, None)


class _Half(asyncio.Protocol):
    """One side of a connection that is passed through. Each side stops reading while the other cannot take more."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Half | None = None
        self._early: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early.append(data)
        else:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

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
        self._doors = doors
        self._task: asyncio.Task[None] | None = None
        self._peer: Peer | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._untaken = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # uvloop's transports are not of that class, only of that shape
        if not self._doors.enter(self):
            stream.abort()
            return
        self.transport = stream
        stream.pause_reading()
        self._task = asyncio.ensure_future(self._connect(stream))

    async def _connect(self, transport: asyncio.Transport) -> None:
        try:
            peer = self._peer = _peer(transport)
            if self._doors.ready is not None:
                await self._doors.ready()
            self.name = f"atoll-{secrets.token_hex(16)}"
            sock = await _dial(self._doors.inner, self.name)
            self._doors.guests[self.name] = peer
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

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._peer is not None and self._peer.address != "unix" and self._stall is None:
            self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._be_content()

    def connection_lost(self, reason: Exception | None) -> None:
        self._be_content()
        super().connection_lost(reason)
        self._doors.leave(self)

    def cut(self) -> None:
        """Its answers are not taken."""
        _log.warning("the gRPC connection of %s was cut: its answers are not taken", self._peer and self._peer.address)
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


def _peer(transport: asyncio.Transport) -> Peer:
    sock = transport.get_extra_info("socket")
    if sock.family == socket.AF_UNIX:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, gid = struct.unpack("3i", raw)
        return Peer("unix", uid, gid, pid=pid)
    theirs, ours = transport.get_extra_info("peername")[:2], transport.get_extra_info("sockname")[:2]
    channel = transport.get_extra_info("ssl_object")
    der = channel.getpeercert(binary_form=True) if channel is not None else None
    finger = hashlib.sha256(der).hexdigest() if der else None
    shown = f"[{theirs[0]}]:{theirs[1]}" if ":" in theirs[0] else f"{theirs[0]}:{theirs[1]}"
    return Peer(shown, loopback_owner(theirs, ours), None, finger)
