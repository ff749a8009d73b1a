"""A living sandbox run by gVisor: what the host sees is gVisor's kernel (the sentry) and its file server (the gofer).

True differences from a container are listed in SECURITY.md. The ones that matter here: the agent cannot inherit a socket
and dials one instead; a process inside is no process of the host, so the number of those is limited inside and the control
group is a backstop; when memory runs out the host would end gVisor's kernel, so the agent ends the largest program before that.
"""

import mmap
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from atoll.backends.contract import Limits
from atoll.backends.local import bundle
from atoll.backends.local.assembly import Boot
from atoll.backends.local.box import LocalRecord
from atoll.backends.local.kernel import filters
from atoll.backends.local.kernel.cgroups import Group
from atoll.backends.local.kernel.children import Watched
from atoll.backends.local.launch import Bind, EngineOrder, Launcher
from atoll.backends.local.runtimes.base import LOCAL, Engine, Runtime
from atoll.backends.local.runtimes.dialled import DIAL_TARGET, INTERIM, DialledAssembly, DialledBox
from atoll.backends.local.runtimes.dialled_channel import SOCKET
from atoll.backends.local.runtimes.gvisor_memory import Runsc
from atoll.backends.local.seen import Seen
from atoll.errors import AtollError

MEMORY_TARGETS = tuple(f"/.atoll/memory/{name}" for name in ("usage", "stat"))  # as `Group.memory_files` has them
# Memory of gVisor's own kernel. Measured with the builds of 2024 and of 2026, which hardly differ: 16 MB when new, 20 after a few programs,
# 35 after walking over thousands of files.
KERNEL_MB = 32
# Memory that programs can take beyond their limit before the agent has ended one of them. A system call that is under way is not cut
# short, so it may fill as much as the program could ever have, and at most 2 GiB.
_RESERVE_MB = (384, 2176)


def host_tasks(pids: int) -> int:
    """gVisor needs up to ten tasks of the host for one process inside, and some for itself."""
    return 64 + 10 * pids


def _reserve_mb(limits: Limits) -> int:
    least, most = _RESERVE_MB
    return max(least, min(limits.memory_mb, most))


def beside_mb(limits: Limits) -> int:
    """Return the memory the host allows beside that of programs: gVisor's own kernel, and the reserve."""
    return KERNEL_MB + _reserve_mb(limits)


def memory_limit(limits: Limits) -> dict[str, int]:
    """In bytes, for the agent: what may be used, and the reserve in which it ends a program."""
    return {"most": (limits.memory_mb + KERNEL_MB) << 20, "reserve": _reserve_mb(limits) << 20}


class GvisorBox(DialledBox):
    """Its keeper has the sentry and the gofer below it."""

    def _servers(self) -> list[int]:
        server = self._record.get("gofer")
        return [] if server is None else [int(server)]

    def _disk(self) -> tuple[int | None, int | None]:
        # The kernel inside sees nothing of the disk by name; the root of its file server is the sandbox's.
        try:
            stat = os.statvfs(f"/proc/{self._record['gofer']}/root")
        except (OSError, KeyError):
            return None, None
        return (stat.f_blocks - stat.f_bfree) * stat.f_frsize, stat.f_blocks * stat.f_frsize

    @property
    def disk_root(self) -> str:
        return f"/proc/{self._record['gofer']}/root"

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        runsc = Runsc.of(self._record)
        await runsc.do("pause")
        try:
            yield
        finally:
            if not self._init.over and not self._killed:
                await runsc.do("resume")

    async def write_state(self, directory: Path) -> None:
        os.chown(directory, self._record["base"], self._record["base"])
        await Runsc.of(self._record).checkpoint(directory)

    async def settle(self) -> None:
        if (self._paths.run(self.id) / INTERIM).exists():
            with suppress(AtollError):  # it goes on already
                await Runsc.of(self._record).do("resume")
        await super().settle()

    @staticmethod
    def apply(group: Group, limits: Limits) -> dict[str, bool]:
        """gVisor counts processes itself."""
        return {**group.apply(limits, host_tasks(limits.pids), beside_mb(limits)), "pids": True}


class GvisorAssembly(DialledAssembly):
    """runsc is started inside the sandbox's namespaces."""

    box = GvisorBox
    agent_holds_pids = True

    def further(self, group: Group) -> list[tuple[str, Callable[[], int]]]:
        watched = group.memory_files()
        self._watches = bool(watched)
        flags = os.O_PATH | os.O_CLOEXEC
        files = [partial(os.open, path, flags) for path in watched]
        return [self.dial(), *zip(MEMORY_TARGETS, files, strict=False)]

    def write_bundle(self, stage: str, launcher: Launcher, base: int, binds: list[Bind]) -> None:
        spec = self.spec
        self.open_door()
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

    def order(self, stage: str, descriptors: int) -> EngineOrder:
        seen = Seen.all_of(self.spec.limits).to_json()
        # Its kernel hands memory calls to a process that waits for them in seccomp(2), where the host's kernel can do that. Freezing
        # interrupts that wait; after a second time without a call in between, builds of 2026 take the process for dead and end the
        # program. Without it they wait for a futex, which a freeze does not disturb.
        filter = filters.no_listener().hex()
        order: EngineOrder = {"inside": self._config, "argv": self._argv(stage), "seen": seen, "filter": filter}
        if self.memory is not None:
            order["memory"] = descriptors - 1  # the last one
        return order

    def descriptors(self) -> list[Callable[[], int]]:
        if self.memory is None:
            return []
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        return [partial(os.open, self.state_directory, flags)]

    def note(self, record: LocalRecord, init: Watched) -> None:
        super().note(record, init)
        record["gofer"] = _find_gofer(init.pid)
        record["state"] = f"{self._stage}/state"

    def _argv(self, stage: str) -> list[str]:
        self._stage = stage
        platform = self.engine.name.removeprefix("runsc-")
        # The network namespace is the sandbox's own already. Without a network there is gVisor's own loopback: then its kernel may not
        # even make a socket of the host, and its filter for that is built in a quarter of the time.
        network = "host" if self.networked else "none"
        return [
            *(self.engine.program, f"--root={stage}/state", f"--platform={platform}", "--ignore-cgroups"),
            # Writes land on the sandbox's limited disk, not in memory.
            *(f"--network={network}", "--host-uds=open", "--overlay2=none"),
            *(("run",) if self.memory is None else ("restore", f"--image-path={stage}/memory")),
            *("--detach", f"--bundle={stage}/bundle", f"--pid-file={stage}/state/pid", self.spec.id),
        ]

    def boot(self) -> Boot:
        memory = memory_limit(self.spec.limits) if self._watches else None
        return {"dial": f"{DIAL_TARGET}/{SOCKET}", "memory": memory}


def _find_gofer(keeper: int) -> int | None:
    """The file server below a keeper."""
    with suppress(OSError):
        for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"runsc-gofer\0"):
                    return int(pid)
    return None


class Gvisor(Runtime):
    """`gvisor`: system calls of the sandbox end in a kernel of its own, in user space."""

    name = "gvisor"
    engines = ("runsc-systrap", "runsc-ptrace")
    fix = "install gVisor of 2024 or later: scripts/install-runsc.sh, or the package runsc"
    package = "runsc"
    installer = "install-runsc.sh"
    # The agent holds the limits of memory and processes, and was told them when it started.
    capabilities = replace(
        LOCAL, freezes_idle=True, resizes=frozenset(["cpus"]), oom_shows_as_failure=True, memory=True
    )
    assembly = GvisorAssembly
    box = GvisorBox

    @classmethod
    def program(cls, engine: str) -> str:
        return engine.partition("-")[0]

    async def version(self, engine: Engine) -> str:
        """Return the version runsc reports; a build by `go install` says nothing of itself, and has its module's version inside."""
        return module_version(engine.program) or await super().version(engine)

    def fix_of(self, engine: str) -> str:
        """Names the compiler: the same version of gVisor works or crashes with the Go it was built with."""
        program = self.find(engine)
        compiler = built_with(program) if program else ""
        return f"{self.fix}, in another build than this one, made by {compiler}" if compiler else self.fix


def module_version(program: str) -> str:
    """The version of gVisor's module that a program was compiled from; empty when it does not say so."""
    version = _behind(program, b"\nmod\tgvisor.dev/gvisor\t").partition(b"\n")[0].partition(b"\t")[0]
    return "" if version.startswith(b"(") else _text(version)  # (devel): built from a checkout


def built_with(program: str) -> str:
    """The version of Go that a program was compiled with; empty when it does not say so."""
    found = _behind(program, b"\xff Go buildinf:")[18:]  # behind the rest of a header: a length, and go1.24.4
    return _text(found[1 : 1 + found[0]]) if found else ""


def _text(found: bytes) -> str:
    return found.decode("ascii") if found.isascii() else ""


def _behind(program: str, mark: bytes) -> bytes:
    """The 100 bytes of a program that follow a mark in it; empty when it has none."""
    with (
        suppress(OSError, ValueError),
        open(program, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        at = data.find(mark)
        if at >= 0:
            return data[at + len(mark) : at + len(mark) + 100]
    return b""
