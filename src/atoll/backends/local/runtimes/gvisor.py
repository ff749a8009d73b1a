"""A living sandbox run by gVisor: what the host sees is gVisor's kernel (the sentry) and its file server (the gofer).

True differences from a container are listed in SECURITY.md. The ones that matter here: the agent cannot inherit a socket
and dials one instead; a process inside is no process of the host, so the number of those is limited inside and the control
group is a backstop; when memory runs out the host would end gVisor's kernel, so the agent ends the largest program before that.
"""

import asyncio
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from atoll.backends.contract import Capabilities, Limits
from atoll.backends.local import bundle
from atoll.backends.local.assembly import Assembly, passable
from atoll.backends.local.box import LocalBox
from atoll.backends.local.kernel import filters
from atoll.backends.local.kernel.cgroups import Group
from atoll.backends.local.kernel.children import Status, Watched
from atoll.backends.local.launch import Launcher
from atoll.backends.local.paths import Paths
from atoll.backends.local.runtimes.base import LOCAL, Engine, Runtime
from atoll.backends.local.runtimes.gvisor_channel import SOCKET, Door
from atoll.backends.local.seen import Seen

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


class GvisorBox(LocalBox):
    """Held by the pidfd of its keeper, the first process of the pid namespace in which sentry and gofer are."""

    def __init__(
        self,
        record: dict[str, Any],
        paths: Paths,
        group: Group,
        init: Watched,
        capabilities: Capabilities,
        door: Door | None = None,
    ) -> None:
        self._door = door or Door(paths.run(record["id"]) / DIAL_DIRECTORY, record["agent_secret"])
        super().__init__(record, paths, group, init, capabilities)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._door.connect()

    def release(self) -> None:
        super().release()
        self._door.close()

    def _servers(self) -> list[int]:
        gofer = self._record.get("gofer")
        return [] if gofer is None else [int(gofer)]

    @staticmethod
    def apply(group: Group, limits: Limits) -> dict[str, bool]:
        """gVisor counts processes itself."""
        return {**group.apply(limits, host_tasks(limits.pids), beside_mb(limits)), "pids": True}

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


class GvisorAssembly(Assembly):
    """runsc is started inside the sandbox's namespaces, as the sandbox's own root: neither its kernel nor its file server ever has
    a privileged id on the host. The agent dials a socket that the daemon listens on."""

    box = GvisorBox
    agent_holds_pids = True
    _door: Door | None = None

    def abandon(self) -> None:
        if self._door is not None:
            self._door.close()

    def further(self, group: Group) -> list[tuple[str, Callable[[], int]]]:
        watched = group.memory_files()
        self._watches = bool(watched)
        flags = os.O_PATH | os.O_CLOEXEC
        dial = partial(os.open, self.run / DIAL_DIRECTORY, flags | os.O_DIRECTORY)
        files = [partial(os.open, path, flags) for path in watched]
        return [(DIAL_TARGET, dial), *zip(MEMORY_TARGETS, files, strict=False)]

    def write_bundle(self, stage: str, launcher: Launcher, base: int, binds: list[dict[str, Any]]) -> None:
        spec = self.spec
        passable(self.run / DIAL_DIRECTORY)
        self._door = Door(self.run / DIAL_DIRECTORY, self.secrets["agent_secret"])
        shared = [(bind["target"], bind["read_only"]) for bind in binds]
        if not spec.read_only_root:
            shared.append(("/tmp", False))  # else gVisor puts memory there, beside the disk and its limit
        self._config = bundle.inside_configuration(
            root=f"{stage}/root",
            hostname=spec.hostname,
            shared=shared,
            no_capabilities=spec.no_capabilities,
            read_only_root=spec.read_only_root,
            shm_mb=spec.limits.shm_mb,
        )

    def order(self, stage: str, descriptors: int) -> dict[str, Any]:
        seen = Seen.all_of(self.spec.limits).to_json()
        return {"inside": self._config, "argv": self._argv(stage), "seen": seen}

    def _argv(self, stage: str) -> list[str]:
        platform = self.engine.name.removeprefix("runsc-")
        # The network namespace is the sandbox's own already. Without a network there is gVisor's own loopback: then its kernel may not
        # even make a socket of the host, and its filter for that is built in a quarter of the time.
        network = "host" if self.networked else "none"
        return [
            *(self.engine.program, f"--root={stage}/state", f"--platform={platform}", "--ignore-cgroups"),
            # Writes land on the sandbox's limited disk, not in memory.
            *(f"--network={network}", "--host-uds=open", "--overlay2=none"),
            *("run", "--detach", f"--bundle={stage}/bundle", f"--pid-file={stage}/state/pid", self.spec.id),
        ]

    def handed(self) -> int:
        """Where the launcher writes who keeps gVisor."""
        return self.pid_file()

    def mountpoints(self) -> list[str]:
        return ["tmp"]

    def entered(self, group: Group) -> list[str]:
        return group.doors()

    def boot(self) -> dict[str, Any]:
        memory = memory_limit(self.spec.limits) if self._watches else None
        return {"dial": f"{DIAL_TARGET}/{SOCKET}", "memory": memory}

    def filter(self) -> str | None:
        """Everything: gVisor has no filter of its own for the programs inside."""
        return filters.program(self.spec.seccomp, set_id=self.only_reads_the_host).hex()

    def noted(self, init: Watched) -> dict[str, Any]:
        return {"agent_first": True, "gofer": find_gofer(init.pid)}

    def living(self, record: dict[str, Any], group: Group, init: Watched) -> LocalBox:
        return GvisorBox(record, self.paths, group, init, self.engine.runtime.capabilities, self._door)


class Gvisor(Runtime):
    """`gvisor`: system calls of the sandbox end in a kernel of its own, in user space."""

    name = "gvisor"
    engines = ("runsc-systrap", "runsc-ptrace")
    fix = "install the package runsc (gVisor), of 2024 or later"
    package = "runsc"
    # The agent holds the limits of memory and processes, and was told them when it started.
    capabilities = replace(LOCAL, freezes_idle=True, resizes=frozenset(["cpus"]), oom_shows_as_failure=True)
    assembly = GvisorAssembly
    box = GvisorBox

    @classmethod
    def program(cls, engine: str) -> str:
        return engine.partition("-")[0]

    async def version(self, engine: Engine) -> str:
        """What runsc says; a build by `go install` says nothing of itself, and has its module's version inside."""
        return module_version(engine.program) or await super().version(engine)

    def fix_of(self, engine: str) -> str:
        """Names the compiler: the same version of gVisor works or crashes with the Go it was built with."""
        program = self.find(engine)
        compiler = built_with(program) if program else ""
        return f"{self.fix}, in another build than this one, made by {compiler}" if compiler else self.fix


def module_version(program: str) -> str:
    """The version of gVisor's module that a program was compiled from; empty when it does not say so."""
    name = b"\nmod\tgvisor.dev/gvisor\t"
    with (
        suppress(OSError, ValueError),
        open(program, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        at = data.find(name)
        if at >= 0:
            line = data[at + len(name) : at + len(name) + 100]
            version = line.partition(b"\n")[0].partition(b"\t")[0].decode("ascii")
            return "" if version.startswith("(") else version  # (devel): built from a checkout
    return ""


def built_with(program: str) -> str:
    """The version of Go that a program was compiled with; empty when it does not say so."""
    magic, header = b"\xff Go buildinf:", 32
    with (
        suppress(OSError, ValueError),
        open(program, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        at = data.find(magic)
        if at >= 0:
            length = data[at + header]  # of a text that follows: go1.24.4
            return data[at + header + 1 : at + header + 1 + length].decode("ascii")
    return ""
