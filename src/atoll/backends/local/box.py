"""A living sandbox run by an OCI engine, held by the pidfd of its init."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Required, TypedDict, TypeVar

from atoll.backends.contract import BoxFacts, Capabilities, Ended, Limits, Record, Traffic, Usage
from atoll.backends.local.kernel.cgroups import Group
from atoll.backends.local.kernel.children import Status, Watched
from atoll.backends.local.memory.files import Memories
from atoll.backends.local.memory.save import Secrets, new_secrets, save
from atoll.backends.local.network import Loopback, namespace_of
from atoll.backends.local.paths import Paths
from atoll.egress.router.router import LinkFields
from atoll.errors import SandboxGone, Unsupported
from atoll.guest import GuestClient
from atoll.model import Policy

KILL_TIMEOUT = 30.0
T = TypeVar("T")
SOCKET = "agent.sock"  # in the run directory; the agent listens on it


class LocalRecord(TypedDict, total=False):
    """The stored record of a sandbox on this machine; for a half-made one, its id alone."""

    id: Required[str]
    runtime: str
    engine: str
    pid: int
    started: str | None  # tells this process from a later one with its number
    base: int  # its first user id on the host
    limits: dict[str, float]
    enforced: dict[str, bool]
    workspace: str | None  # the sandbox whose workspace it shares
    needs: list[str]  # features that its agent must have
    link: LinkFields | None
    loop: int | None
    disk_base: int  # the first user id of the files on its disk, where that is another sandbox's
    networked: bool  # its kernel uses the network namespace
    fit: dict[str, str]  # what has to be equal where its memory is started from
    agent_first: bool  # the agent speaks first
    gofer: int | None  # gVisor's file server
    state: str  # where gVisor's engine keeps what it knows of the sandbox, in its mount namespace
    program: str  # of the engine
    agent_secret: str
    host_secret: str


class LocalBox:
    """As runc and crun run it: its init is a process of this kernel."""

    def __init__(
        self, record: LocalRecord, paths: Paths, group: Group, init: Watched, capabilities: Capabilities
    ) -> None:
        self.capabilities = capabilities
        self._record = record
        self.links = Loopback()  # set by the backend
        self.policy = Policy()
        self.client = GuestClient(
            self.connect,
            host_secret=record["host_secret"],
            agent_secret=record["agent_secret"],
            agent_first=bool(record.get("agent_first", False)),
            needs=record.get("needs", ()),
        )
        self._paths = paths
        self._group = group
        self._init = init
        self._killed = ""
        self._mounts: list[int] = []  # its mount namespaces, once it is being killed
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        init.ended.add_done_callback(self._on_end)

    @property
    def id(self) -> str:
        return self._record["id"]

    @property
    def record(self) -> LocalRecord:
        return self._record

    @property
    def facts(self) -> BoxFacts:
        record = self._record
        return BoxFacts(
            self.id, record["runtime"], record["engine"], Limits.from_json(record["limits"]), dict(record["enforced"]),
            {"pid": self.pid},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._init.pid

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await connect(self._paths.run(self.id))

    async def wait(self) -> Ended:
        return await asyncio.shield(self._ended)

    async def unless_it_ends(self, work: Awaitable[T]) -> T:
        """Return the result of the work; SandboxGone as soon as the sandbox ends."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        ended = self._ended.result()
        raise SandboxGone(
            f"the sandbox ended as soon as it had started: {ended.detail}",
            details={"sandbox_id": self.id, "reason": ended.kind, "detail": ended.detail},
        )

    def when_it_crashes(self, tell: Callable[[], None]) -> None:
        """Call `tell` when the sandbox ends by itself, and not for lack of memory."""

        def ended(future: asyncio.Future[Ended]) -> None:
            if not self._killed and future.result().kind in ("exit", "killed"):
                tell()

        self._ended.add_done_callback(ended)

    async def kill(self) -> None:
        """Its mounts are held until `unmount`: its last process would else stay until all of them are undone."""
        self._killed = self._killed or "killed by the daemon"
        self._hold_mounts()
        self._init.signal(signal.SIGKILL)  # its namespace dies with it, also where there is no control group
        self._group.send_kill()
        with suppress(TimeoutError):  # then the group says what does not die
            async with asyncio.timeout(KILL_TIMEOUT):
                await self.wait()
        if not self._group.is_empty():
            await self._group.kill()
        await self.links.detach(self.id)

    async def join(self, policy: Policy) -> None:
        """Give a started sandbox its network."""
        self.policy = policy
        if policy.network != "none":
            with namespace_of(self.pid) as netns:
                await self.links.attach(self.id, netns, policy)
            self._record["link"] = self.links.link(self.id)

    async def set_policy(self, policy: Policy) -> None:
        await self.links.update(self.id, policy)
        self.policy = policy

    async def traffic(self) -> Traffic:
        return await self.links.traffic(self.id)

    def _hold_mounts(self) -> None:
        if not self._mounts and not self._init.over:
            for pid in (self.pid, *self._servers()):
                with suppress(OSError):
                    self._mounts.append(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))

    def _servers(self) -> list[int]:
        """Other processes with mounts of their own."""
        return []

    def unmount(self) -> None:
        """Let go of the mounts of what was killed; takes as long as the kernel needs to write and undo them."""
        while self._mounts:
            os.close(self._mounts.pop())

    async def freeze(self) -> None:
        self._alive()
        await self._group.freeze(True)

    async def thaw(self) -> None:
        self._alive()
        await self._group.freeze(False)

    async def save_memory(self, name: str, key: bytes = b"", *, end: bool = False) -> Record:
        """Save memory, processes and disk as `memory/save.py` orders it; Unsupported where the runtime cannot."""
        self._alive()
        self.capabilities.check(self.facts.runtime, memory=True)
        if not self._paths.disk(self.id).is_file():
            raise Unsupported("memory is saved only with a disk image", hint="use root's daemon")
        if not self._record.get("fit"):
            raise Unsupported("this sandbox was made by an older atoll", hint="make it anew")
        return await save(self, Memories(self._paths.memories), name, key, end=end)

    @property
    def disk_image(self) -> Path:
        return self._paths.disk(self.id)

    @property
    def disk_root(self) -> str:
        """A path to a directory on its disk."""
        return f"/proc/{self.pid}/root"

    @asynccontextmanager
    async def hushed(self) -> AsyncIterator[Secrets]:
        """Cut the agent off, with secrets that are made for this and yielded; afterwards it has the sandbox's own again."""
        raise NotImplementedError
        yield

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Let nothing run in it."""
        raise NotImplementedError
        yield

    async def write_state(self, directory: Path) -> None:
        """Write memory and processes of a still sandbox to this directory."""
        raise NotImplementedError

    async def wake(self, boot: Mapping[str, Any]) -> None:
        """Make a sandbox that was started from a saved memory one of its own: secrets, id, end, environment."""
        fresh = new_secrets()
        await self.client.request("renew", **fresh, sandbox=self.id)
        await self.client.request("configure", **boot)
        self._take(fresh)
        self._record["agent_secret"], self._record["host_secret"] = fresh["agent_secret"], fresh["host_secret"]

    def _take(self, secrets: Secrets) -> None:
        """Know the agent by these from its next connection on."""
        self.client.renew(**secrets)

    async def settle(self) -> None:
        """Finish what a daemon before us was doing with it."""

    async def usage(self) -> Usage:
        memory, peak = self._group.memory()
        used, total = self._disk() if self._record["enforced"].get("disk_mb") else (None, None)
        return Usage(memory, peak, self._group.cpu_us(), self._group.count(), used, total, self._group.oom_kills())

    async def update_limits(self, limits: Limits) -> None:
        """Those that the runtime can change do so at once; the others were fixed when the sandbox started."""
        self._alive()
        wanted, can = limits.to_json(), self.capabilities.resizes
        chosen = {name: wanted[name] if name in can else kept for name, kept in self._record["limits"].items()}
        held = self.apply(self._group, Limits.from_json(chosen))
        self._record |= {"enforced": {**self._record["enforced"], **held}, "limits": chosen}

    @staticmethod
    def apply(group: Group, limits: Limits) -> dict[str, bool]:
        """Put limits in force; which of them the host holds."""
        return group.apply(limits)

    def release(self) -> None:
        """Stop watching; the sandbox goes on, and `wait` is for the next daemon to answer."""
        self._init.close()
        self.unmount()

    def _alive(self) -> None:
        if self._init.over:
            raise SandboxGone(f"sandbox {self.id} has ended", details={"reason": "exited"})

    def _disk(self) -> tuple[int | None, int | None]:
        # The root of its mount namespace itself, no name below it: nothing here is looked up in the sandbox's tree.
        try:
            stat = os.statvfs(f"/proc/{self.pid}/root")
        except OSError:
            return None, None
        return (stat.f_blocks - stat.f_bfree) * stat.f_frsize, stat.f_blocks * stat.f_frsize

    def _status(self, status: Status) -> Status:
        return status

    def _on_end(self, ended: asyncio.Future[Status]) -> None:
        self._ended.set_result(_how(self._status(ended.result()), self._group.oom_kills() or 0, self._killed))


def _how(status: Status, oom_kills: int, killed: str) -> Ended:
    """The truth as far as it can be known: who asked for the kill, then the kernel's counter, then the exit status."""
    if killed:
        return Ended("killed", killed)
    if status.code is not None:
        return Ended("exit", f"the agent exited with code {status.code}")
    if oom_kills and status.signal in (None, signal.SIGKILL):
        return Ended("oom", f"out of memory: the kernel killed {oom_kills} process{'es' if oom_kills > 1 else ''}")
    if status.signal is not None:
        return Ended("killed", f"killed by signal {status.signal}")
    return Ended("unknown", "it ended while no daemon was its parent")


async def connect(run: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To the agent's socket. By way of a descriptor: a home with a long name would not fit into a socket address."""
    directory = os.open(run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{SOCKET}")
    finally:
        os.close(directory)
