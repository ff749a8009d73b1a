"""Being a parent: what is started detached comes back to the daemon, which watches it by pidfd and reaps only what is
its own.

No waitpid(-1) and no SIGCHLD handler: those would steal the children of the event loop and of libraries.
"""

import asyncio
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.backends.local.kernel.ids import COUNT

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Status:
    """How a process ended; both are None when it was not our child to ask."""

    code: int | None
    signal: int | None


def become_subreaper() -> None:
    """Orphans of our descendants become our children. Where the kernel refuses, sandboxes are watched all the same."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Watched:
    """A process held by pidfd: its number cannot come to mean another one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self.ended: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._fd, self._readable)

    async def wait(self) -> Status:
        return await asyncio.shield(self.ended)

    @property
    def over(self) -> bool:
        return self.ended.done()

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, also if nobody has collected it yet."""
        if self._fd < 0:
            return True
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(0))

    def signal(self, number: int) -> None:
        if self._fd < 0:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Stop watching. Does not touch the process."""
        if self._fd >= 0:
            with suppress(RuntimeError):  # the loop is closed already
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _readable(self) -> None:
        status = reap(self._fd)
        self.close()
        if not self.ended.done():
            self.ended.set_result(status)


def reap(pidfd: int) -> Status:
    """Collect an ended process if it is our child."""
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return Status(None, None)
    if info is None:
        return Status(None, None)
    if info.si_code == os.CLD_EXITED:
        return Status(info.si_status, None)
    return Status(None, info.si_status)


def start_time(pid: int) -> str | None:
    """When it started, in ticks since boot, with the boot it belongs to; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else f"{boot}/{fields[19].decode()}"


def is_older(pid: int, moment: float) -> bool:
    """Whether the process was there at that moment; to the second, as the kernel's clock of starts has no better zero."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    ticks = int(stat[stat.rindex(b")") + 2 :].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK") <= moment + 1


async def kill_recorded(pid: int, started: str | None, timeout: float = 30.0) -> None:
    """End a process that a record names, if it still is that process, and wait until it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except (ProcessLookupError, ValueError):
        return
    try:
        if started is None or start_time(pid) != started:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        deadline = time.monotonic() + timeout
        while start_time(pid) == started and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
        reap(fd)
    finally:
        os.close(fd)


async def reap_orphans(
    belongs: Callable[[int], bool], timeout: float = 10.0, others: Collection[int] = frozenset()
) -> None:
    """Collect what fell to us from a launcher or an engine that was cut short. Those are dying or dead when this is called,
    and nobody else here waits for them. `others` are children of which that is known not to be so: with a thousand sandboxes
    looking at each takes a second."""
    deadline = time.monotonic() + timeout
    pause = 0.0005
    while _collect(belongs, others) and time.monotonic() < deadline:
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.05)


def _collect(belongs: Callable[[int], bool], others: Collection[int]) -> bool:
    """One round; true when there may be more."""
    found = [pid for pid in _children() if pid not in others and belongs(pid)]
    for pid in found:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return bool(found)


def in_session(session: int) -> Callable[[int], bool]:
    """Children of a launcher: it leads a session of its own, and a sandbox's init has left that."""

    def belongs(pid: int) -> bool:
        try:
            return os.getsid(pid) == session
        except ProcessLookupError:
            return False

    return belongs


def in_group(group: str, base: int | None) -> Callable[[int], bool]:
    """Children of an engine. The dead still say which unified group they were in; where there is none, their user has to do."""

    def belongs(pid: int) -> bool:
        try:
            if f":{group}" in Path(f"/proc/{pid}/cgroup").read_text():
                return True
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return False
        uid = next((int(line.split()[1]) for line in status if line.startswith("Uid:")), 0)
        return base is not None and base <= uid < base + COUNT

    return belongs


def _children() -> set[int]:
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found.update(int(pid) for pid in path.read_text().split())
    return found
