"""Serving HTTP/1.1 on the daemon's Unix socket. The caller is whoever the kernel says is at the other end."""

import asyncio
import os
import select
import socket
from pathlib import Path
from typing import Any, cast

from uvicorn.server import ServerState

from atoll import errors
from atoll.core.access.principals import peer, peer_pid
from atoll.server.request_limits import BoundedHeads, settings

KEEP_ALIVE = 300
BACKLOG = 1024
HALF_CLOSED_CHECK = 0.5
LONGEST_NAME = 107  # sun_path holds 108 bytes with the closing zero


class Joint:
    """A transport that can hold one write back until the next, so that an answer's head and body leave together: one system call
    here and one wake-up at the caller instead of two."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._holding = False
        self._held = b""

    def hold(self) -> None:
        self._holding = True

    def write(self, data: bytes) -> None:
        if self._holding:
            self._holding, self._held = False, data
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class PeerProtocol(BoundedHeads):
    """uvicorn's protocol, which also knows its peer, and tells a half-closed connection from one that is gone."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket = transport.get_extra_info("socket")
        joint = Joint(transport)
        self.transport = cast(asyncio.Transport, joint)
        try:
            self.app_state = {
                **self.app_state,
                **{
                    "principal": peer(self._socket),
                    "pid": peer_pid(self._socket),
                    "joint": joint,
                    "gone": self._hung_up,
                },
            }
        except errors.PermissionDenied as error:
            self.refuse(b"403 Forbidden", error)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A caller may close its sending side and still wait for the answer; only a full close is a goodbye."""
        if self.cycle is None or self.cycle.response_complete or self._hung_up():
            return None
        self._watch_half_closed()
        return True

    def _watch_half_closed(self) -> None:
        if self.transport.is_closing():
            return
        if self._hung_up() or self.cycle.response_complete:
            self.transport.close()
        else:
            self.loop.call_later(HALF_CLOSED_CHECK, self._watch_half_closed)

    def _hung_up(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self._socket.fileno(), 0)
        except (OSError, ValueError):
            return True
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))


class Listener:
    """The Unix socket and the connections on it. `passed` is a socket of the service manager's, which stays when we leave."""

    def __init__(self, app: Any, path: Path, passed: socket.socket | None = None) -> None:
        self._path = path
        self._passed = passed
        self._config = settings(
            app,
            PeerProtocol,
            KEEP_ALIVE,
            ws="websockets-sansio",
            ws_max_size=4 * 1024 * 1024,
            ws_per_message_deflate=False,
            ws_ping_interval=None,  # the kernel tells when a Unix socket's peer is gone; a busy one must not count as gone
        )
        self.state = ServerState()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen. The caller holds the daemon's lock, so a socket file that is there belongs to nobody."""
        if self._passed is not None:
            sock = self._passed.dup()
        else:
            self._path.unlink(missing_ok=True)
            sock = _bind(self._path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._protocol, sock=sock, backlog=BACKLOG)

    def _protocol(self) -> PeerProtocol:
        return PeerProtocol(self._config, self.state, {})

    @property
    def connections(self) -> int:
        return len(self.state.connections)

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self.state.tasks)

    def hide(self) -> None:
        """Nobody new finds the socket; who is in the queue still gets in. A passed socket waits for the next daemon instead."""
        if self._passed is None:
            self._path.unlink(missing_ok=True)
        elif self._server is not None:
            self._server.close()

    async def close(self, patience: float) -> None:
        """No new connections; requests under way have `patience` seconds to be answered."""
        self.hide()
        if self._server is not None:
            self._server.close()
        for connection in list(self.state.connections):
            connection.shutdown()
        if self.state.tasks:
            await asyncio.wait(set(self.state.tasks), timeout=patience)
        for task in set(self.state.tasks):
            task.cancel()
        if self.state.tasks:
            await asyncio.wait(set(self.state.tasks), timeout=1)
        for connection in list(self.state.connections):
            connection.transport.close()


def _bind(path: Path) -> socket.socket:
    """A socket only its owner can use from its first moment on. A long path goes through its directory's descriptor."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    directory = -1
    mask = os.umask(0o177)
    try:
        name = str(path)
        if len(os.fsencode(name)) > LONGEST_NAME:
            directory = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
            name = f"/proc/self/fd/{directory}/{path.name}"
        sock.bind(name)
        return sock
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(mask)
        if directory >= 0:
            os.close(directory)
