"""A living sandbox run by gVisor: what the host sees is gVisor's kernel (the sentry) and its file server (the gofer).

True differences from a container are listed in SECURITY.md. The ones that matter here: the agent cannot inherit a socket
and dials one instead; a process inside is no process of the host, so the number of those is limited inside and the control
group is a backstop; when memory runs out the host would end gVisor's kernel, so the agent ends the largest program before that.
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.backends.contract import Limits
from atoll.backends.local.box import ContainerBox
from atoll.backends.local.kernel.cgroups import Group
from atoll.backends.local.kernel.children import Status, Watched
from atoll.backends.local.paths import Paths
from atoll.backends.local.runtimes.gvisor_channel import Door

DIAL_DIRECTORY = "dial"  # of the run directory; mounted read-only into the sandbox
DIAL_TARGET = "/.atoll/host"
MEMORY_TARGETS = tuple(f"/.atoll/memory/{name}" for name in ("usage", "stat"))  # as `Group.memory_files` has them
KERNEL_MB = 32  # of gVisor's own kernel when it does little
# What programs can take beyond their limit before the agent has ended one of them. A system call that is under way is not cut
# short, so it may fill as much as the program could ever have, and at most 2 GiB.
_RESERVE_MB = (384, 2176)
_SIGNALS = 128


def host_tasks(pids: int) -> int:
    """gVisor needs up to ten tasks of the host for one process inside, and some for itself."""
    return 64 + 10 * pids


def _reserve_mb(limits: Limits) -> int:
    least, most = _RESERVE_MB
    return max(least, min(limits.memory_mb, most))


def beside_mb(limits: Limits) -> int:
    """What the host allows beside the memory of programs: gVisor's own kernel, and the reserve."""
    return KERNEL_MB + _reserve_mb(limits)


def memory_limit(limits: Limits) -> dict[str, int]:
    """In bytes, for the agent: what may be used, and the reserve in which it ends a program."""
    return {"most": (limits.memory_mb + KERNEL_MB) << 20, "reserve": _reserve_mb(limits) << 20}


def find_gofer(keeper: int) -> int | None:
    """The file server among what the keeper has around it; it names itself."""
    with suppress(OSError):
        for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"runsc-gofer\0"):
                    return int(pid)
    return None


class GvisorBox(ContainerBox):
    """Held by the pidfd of its keeper, the first process of the pid namespace in which sentry and gofer are."""

    def __init__(self, record: dict[str, Any], paths: Paths, group: Group, init: Watched, door: Door) -> None:
        self._door = door
        super().__init__(record, paths, group, init)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._door.connect()

    async def update_limits(self, limits: Limits) -> None:
        """Processes and memory are fixed too: the agent holds those limits, and was told them when it started."""
        kept = Limits.from_json(self._record["limits"])
        fixed = {"pids": kept.pids, "memory_mb": kept.memory_mb}
        await super().update_limits(Limits(**{**limits.to_json(), **fixed}))

    def release(self) -> None:
        super().release()
        self._door.close()

    def _servers(self) -> list[int]:
        gofer = self._record.get("gofer")
        return [] if gofer is None else [int(gofer)]

    def _apply(self, limits: Limits) -> dict[str, bool]:
        return {**self._group.apply(limits, host_tasks(limits.pids), beside_mb(limits)), "pids": True}

    def _disk(self) -> tuple[int | None, int | None]:
        # The sentry sees nothing of the disk by name; the gofer's root is the sandbox's.
        try:
            stat = os.statvfs(f"/proc/{self._record['gofer']}/root")
        except (OSError, KeyError):
            return None, None
        return (stat.f_blocks - stat.f_bfree) * stat.f_frsize, stat.f_blocks * stat.f_frsize

    def _status(self, status: Status) -> Status:
        """The keeper cannot die of the signal the sentry died of, and says it by its code, as a shell does."""
        if status.code is not None and status.code > _SIGNALS:
            return Status(None, status.code - _SIGNALS)
        return status

    def _on_end(self, ended: asyncio.Future[Status]) -> None:
        super()._on_end(ended)
        self._door.close()
