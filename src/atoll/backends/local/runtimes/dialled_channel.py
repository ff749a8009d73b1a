"""Where an agent that dials comes in: the daemon listens, lets in only who knows the sandbox's secret, and keeps the newest.

The socket is visible inside the sandbox, so anybody there can knock. Who knocks is looked at before one byte of theirs is
taken, few at a time and not for long; only a caller with the agent's secret is handed on.
"""

import asyncio
import hmac
import os
import select
import socket
from contextlib import suppress
from pathlib import Path

from atoll.guest import wire

SOCKET = "agent.sock"
KNOCKS = 16  # that are looked at at the same time
LOOK_TIME = 5.0
FRESH = 3.0  # the agent waits 5 s for an answer to its hello
_LOOK_AGAIN = 0.01


class Door:
    """The listening side of one sandbox's channel. `close` leaves the sandbox alone: its agent dials again and again."""

    def __init__(self, directory: Path, agent_secret: str) -> None:
        self._secret = agent_secret
        self._listener = _listen(directory)
        self._guests: dict[asyncio.Task[bool], socket.socket] = {}
        self._arrived: socket.socket | None = None
        self._since = 0.0
        self._someone = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._knock)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The agent's newest connection, or its next one; its hello is still to be read."""
        while True:
            if self._listener.fileno() < 0:
                raise ConnectionError("the sandbox's channel is closed")
            arrived, self._arrived = self._arrived, None
            if arrived is None:
                self._someone.clear()
                await self._someone.wait()
            elif asyncio.get_running_loop().time() - self._since > FRESH or _hung_up(arrived):
                arrived.close()  # the agent is about to give it up, and dials again
            else:
                return await asyncio.open_unix_connection(sock=arrived)

    def renew(self, agent_secret: str) -> None:
        """Let in who knows this secret, from the next knock on."""
        self._secret = agent_secret

    async def arrived(self) -> None:
        """Wait until the agent has come in."""
        while self._arrived is None:
            self._someone.clear()
            await self._someone.wait()

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            with suppress(RuntimeError):  # the loop is closed already
                asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
        for task in list(self._guests):
            task.cancel()
        if self._arrived is not None:
            self._arrived.close()
            self._arrived = None
        self._someone.set()

    def _knock(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except OSError:
            return
        guest.setblocking(False)
        if len(self._guests) >= KNOCKS:
            oldest = next(iter(self._guests))  # whoever says nothing makes room; the agent speaks at once
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._look(guest), name="agent-knocks")
        self._guests[task] = guest
        task.add_done_callback(self._seen)

    def _seen(self, task: asyncio.Task[bool]) -> None:
        guest = self._guests.pop(task)
        if task.cancelled() or not task.result():
            guest.close()

    async def _look(self, guest: socket.socket) -> bool:
        """Let the agent in. Whether this is it is told from its hello, which stays in the socket for the one who gets the connection."""
        deadline = asyncio.get_running_loop().time() + LOOK_TIME
        while (known := self._judge(guest)) is None:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(_LOOK_AGAIN)
        if not known:
            return False
        if self._arrived is not None:
            self._arrived.close()
        self._arrived, self._since = guest, asyncio.get_running_loop().time()
        self._someone.set()
        return True

    def _judge(self, guest: socket.socket) -> bool | None:
        """None: cannot be said yet."""
        try:
            seen = guest.recv(wire.HEAD_BYTES + wire.MAX_HELLO, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            return False
        if len(seen) < wire.HEAD_BYTES:
            return None if seen else False
        length, kind = int.from_bytes(seen[:4], "big"), seen[8]
        if kind != wire.HELLO or length > wire.MAX_HELLO:
            return False
        if len(seen) < wire.HEAD_BYTES + length:
            return None
        try:
            secret = wire.message(seen[wire.HEAD_BYTES : wire.HEAD_BYTES + length]).get("secret")
        except wire.WireError:
            return False
        return isinstance(secret, str) and hmac.compare_digest(secret.encode(), self._secret.encode())


def _hung_up(guest: socket.socket) -> bool:
    poller = select.poll()
    poller.register(guest, select.POLLRDHUP)
    return bool(poller.poll(0))


def _listen(directory: Path) -> socket.socket:
    """A fresh socket in the directory. Who may pass through the directories above it is what limits the callers; the sandbox
    sees this one directory alone, read-only."""
    here = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            os.unlink(SOCKET, dir_fd=here)
        path = f"/proc/self/fd/{here}/{SOCKET}"  # a home with a long name would not fit otherwise
        listener.bind(path)
        os.chmod(path, 0o666)
        listener.listen(KNOCKS)
        listener.setblocking(False)
        return listener
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(here)
