"""Drives `atoll-launch`, the program that makes one sandbox's namespaces and mounts and then becomes its engine.

A launcher can wait in its first phase with namespaces made; closing its socket ends it and leaves nothing.
"""

import array
import asyncio
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from atoll.backends.local import binaries
from atoll.backends.local.kernel import children
from atoll.backends.local.kernel.children import Status, Watched
from atoll.backends.local.kernel.ids import COUNT
from atoll.errors import (
    AtollError,
    DiskFull,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Timeout,
    Unsupported,
)

TIMEOUT = 120.0  # on a slow machine; an engine or launcher that ends is told at once
USER_NS_FD, NET_NS_FD = 4, 5  # where the launcher leaves them for the engine

_IDMAP_FIX = (
    "ATOLL_HOME and /usr must be on a file system with idmapped mounts (ext4, xfs, btrfs), on Linux 5.19 or newer"
)


class BindSource(TypedDict, total=False):
    """A directory of the sandbox's disk, one of another's disk, a descriptor, a device, or a path opened with somebody's rights."""

    disk: str
    image: str
    directory: str
    fd: int
    path: str
    device: str
    uid: int
    gid: int


class Bind(TypedDict):
    source: BindSource
    target: str
    read_only: bool
    idmap: bool


class Disk(TypedDict, total=False):
    """An image, new or of a stopped sandbox, or memory of so many bytes."""

    image: str
    fresh: bool
    of: int  # the first user id of the sandbox whose files are on it
    tmpfs: int


class Overlay(TypedDict):
    target: str
    lowers: list[str]
    name: str


class EngineOrder(TypedDict, total=False):
    """The part of an order that starts the engine."""

    inside: str | None  # the configuration of one that runs in the sandbox's namespaces
    argv: list[str]
    filter: str  # of the engine's own system calls, as a program in hexadecimal digits
    direct: Mapping[str, object]  # the launcher itself is the engine
    memory: int  # among the descriptors: the directory of a saved memory
    jail: list[int]  # an engine inside that stays and sees the tree alone; which of the descriptors it is given
    seen: Mapping[str, object]


class Order(EngineOrder):
    """The launcher's order (`launcher/src/order.rs`)."""

    stage: str
    disk: Disk
    shift: bool
    overlays: list[Overlay]
    binds: list[Bind]
    mountpoints: list[str]
    read_only_root: bool
    groups: list[str]
    env: list[str]


class Failure(TypedDict, total=False):
    step: str
    message: str
    errno: int | None


class Answer(TypedDict, total=False):
    ready: bool
    mounted: bool
    loop: int | None
    error: Failure


class Launcher:
    """One launcher process; use `start` at most once."""

    def __init__(self, process: Watched, channel: socket.socket, net: int) -> None:
        self._process = process
        self._channel = channel
        self.net = net  # the sandbox's network namespace
        self.device: int | None = None  # the loop device under the sandbox's disk

    @staticmethod
    async def prepare(base: int, count: int = COUNT) -> "Launcher":
        """Spawn one and wait until its namespaces are made."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        ours.setblocking(False)
        try:
            launcher = Launcher(Watched(_spawn(base, count, theirs.fileno())), ours, -1)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            await launcher._answer("ready")
        except BaseException:
            await launcher.close()
            raise
        return launcher

    @property
    def pid(self) -> int:
        """Also the engine's, later."""
        return self._process.pid

    async def start(self, order: Order, fds: Sequence[int], limit: float = TIMEOUT) -> Status:
        """Send the order, wait until the engine has ended."""
        packed = array.array("i", fds)
        message = json.dumps(order, separators=(",", ":")).encode()
        try:
            self._channel.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])
        except OSError as error:
            raise Internal(f"the launcher does not take its order: {error.strerror}") from error
        device = (await self._answer("mounted")).get("loop")
        self.device = device if isinstance(device, int) else None
        try:
            async with asyncio.timeout(limit):
                return await self._process.wait()
        except TimeoutError:
            raise Timeout(f"the engine did not start the sandbox within {limit:.0f} s") from None

    async def close(self) -> None:
        """End it, if it still is a launcher or an engine at work, and wait until it is gone."""
        self._channel.close()
        if self.net >= 0:
            os.close(self.net)
            self.net = -1
        if not self._process.over:
            self._process.signal(signal.SIGKILL)
            await self._process.wait()
            await children.reap_orphans(children.in_session(self.pid))

    async def _answer(self, wanted: str) -> Answer:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._channel.fileno(), readable.set)
        try:
            async with asyncio.timeout(TIMEOUT):
                await readable.wait()
        except TimeoutError:
            raise Timeout(f"the launcher did not answer within {TIMEOUT:.0f} s") from None
        finally:
            loop.remove_reader(self._channel.fileno())
        message, fds, _, _ = socket.recv_fds(self._channel, 65536, 1)
        if fds:
            self.net = fds[0]
        if not message:
            raise Internal("the launcher died without a word")
        answer: Answer = json.loads(message)
        if wanted not in answer:
            raise _failure(answer.get("error", {}))
        return answer


def _spawn(base: int, count: int, channel: int) -> int:
    program = str(binaries.launcher())
    actions = [
        (os.POSIX_SPAWN_DUP2, channel, 0),
        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
    ]
    return os.posix_spawn(program, [program, str(base), str(count)], {}, file_actions=actions)


def _failure(error: Failure) -> AtollError:
    """The launcher's failure as one of ours."""
    step, message, number = error.get("step", ""), str(error.get("message", "")), error.get("errno")
    if step == "idmap":
        return Unsupported(f"this host cannot shift user ids: {message}", hint=_IDMAP_FIX)
    if step == "bind":
        kinds: dict[Any, type[AtollError]] = {
            2: NotFound,
            13: PermissionDenied,
            40: InvalidArgument,
            None: InvalidArgument,
        }
        return kinds.get(number, Internal)(f"cannot mount: {message}")
    if step == "mountpoint":
        return InvalidArgument(f"cannot mount inside the sandbox: {message}", hint="no symbolic link may be on the way")
    if number == 28:
        return DiskFull(f"no space left while making the sandbox: {message}")
    return Internal(f"making the sandbox failed at {step}: {message}", details={"step": step, "errno": number})


def boot_log(path: Path, limit: int = 2000) -> str:
    """The end of what the engine and the agent wrote while starting."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit).decode(errors="replace").strip()
    except OSError:
        return ""
