"""Makes one sandbox, step by step. Every step is named, so that a journal can follow and a test can break it anywhere."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypedDict, cast

from atoll.backends.contract import BoxSpec
from atoll.backends.local import binaries, bundle, mounts
from atoll.backends.local.box import LocalBox, LocalRecord
from atoll.backends.local.kernel import children, disks
from atoll.backends.local.kernel.cgroups import SPARE_PIDS, Group
from atoll.backends.local.launch import Bind, BindSource, Disk, EngineOrder, Launcher, Order, Overlay, boot_log
from atoll.backends.local.layers import Rootfs
from atoll.backends.local.memory import fit
from atoll.backends.local.memory.files import DISK, SEALED, STATE
from atoll.backends.local.memory.save import MemoryRecord, Secrets, contents, new_secrets, ours
from atoll.backends.local.memory.seal import unseal
from atoll.errors import AtollError, Conflict, FailedPrecondition, Internal, InvalidArgument, Unsupported

if TYPE_CHECKING:
    from atoll.backends.local.backend import LocalBackend
    from atoll.backends.local.runtimes.base import Engine

STEPS = ("group", "ids", "disk", "prepared", "network", "bundle", "started", "limited")
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")


class Boot(TypedDict, total=False):
    """The part of the boot message in which runtimes differ."""

    listen_fd: int
    dial: str
    cpus: int
    memory: Mapping[str, int] | None


class Assembly:
    """The making of one sandbox. What it leaves behind on failure the backend buries by id.

    Each runtime has a subclass with all that it does differently: the methods without an underscore.
    """

    box: ClassVar[type[LocalBox]]
    agent_holds_pids: ClassVar[bool] = False  # the number of processes is limited by the agent, not by the host

    def __init__(
        self,
        backend: "LocalBackend",
        spec: BoxSpec,
        engine: "Engine",
        rootfs: Rootfs,
        workspace: Path | None,
        *,
        spare: bool = False,
    ) -> None:
        self.backend = backend
        self.spec = spec
        self.engine = engine
        self.rootfs = rootfs
        self._workspace = workspace
        self._spare = spare  # may be given a network once it has started
        self.paths = backend.paths
        self.run = backend.paths.run(spec.id)
        self.memory = None if spec.memory is None else ours(spec.memory)
        self.secrets: Secrets = new_secrets()
        if self.memory is not None:
            self.secrets = {"agent_secret": self.memory["agent_secret"], "host_secret": self.memory["host_secret"]}

    async def make(self) -> LocalBox:
        try:
            return await self._make()
        except BaseException:
            self.abandon()
            raise

    # Decisions of a runtime

    def abandon(self) -> None:
        """Close what this object holds itself, after a failure."""

    def further(self, group: Group) -> list[tuple[str, Callable[[], int]]]:
        """Files of the host that the sandbox sees read-only beside its agent: the place inside, and how each is opened."""
        return []

    def write_bundle(self, stage: str, launcher: Launcher, base: int, binds: list[Bind]) -> None:
        """Prepare what the engine reads."""
        raise NotImplementedError

    def order(self, stage: str, descriptors: int) -> EngineOrder:
        """The part of the launcher's order that starts the engine; so many descriptors are sent along."""
        raise NotImplementedError

    def handed(self) -> int:
        """The descriptor that the engine passes on."""
        raise NotImplementedError

    def descriptors(self) -> list[Callable[[], int]]:
        """How further descriptors for the launcher are opened."""
        return []

    def mountpoints(self) -> list[str]:
        """Directories that must be there beside the usual ones."""
        return ["tmp"] if self.spec.read_only_root else []

    def entered(self, group: Group) -> list[str]:
        """The files of groups to be in before the engine starts; runc joins them itself."""
        return group.doors() if self.backend.standing.rootless else []

    def boot(self) -> Boot:
        """The part of the boot message that says how agent and daemon meet."""
        raise NotImplementedError

    def filter(self) -> str | None:
        """Return the system call filter that the agent installs before it listens."""
        raise NotImplementedError

    def note(self, record: LocalRecord, init: children.Watched) -> None:
        """Add to the record of a started sandbox."""

    def living(self, record: LocalRecord, group: Group, init: children.Watched) -> LocalBox:
        return self.box(record, self.paths, group, init, self.engine.runtime.capabilities)

    # For them

    @property
    def networked(self) -> bool:
        """It has a network, or may be given one later."""
        if self.memory is not None:
            return self.memory["networked"]
        return self.spec.policy.network != "none" or self._spare

    @property
    def only_reads_the_host(self) -> bool:
        """Nothing inside can write to a directory of the host, so that programs with set-id bits do no harm there."""
        return all(mount.read_only for mount in self.spec.mounts)

    @property
    def reads_only(self) -> bool:
        """Whether the tree that the launcher puts together can be written to only where something is mounted."""
        return self.spec.read_only_root

    def pid_file(self) -> int:
        """Where the launcher writes which process is the sandbox's first."""
        return os.open(self.run / "pid", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    # The steps

    async def _make(self) -> LocalBox:
        spec, backend = self.spec, self.backend
        self._fit = fit.of_spec(spec) if self.engine.runtime.capabilities.memory else {}
        if self.memory is not None:
            await asyncio.to_thread(self._compare, self.memory)
        binds = [bind for mount in spec.mounts for bind in mounts.binds(mount, self.paths.home)]
        if not _HOSTNAME.fullmatch(spec.hostname):
            raise InvalidArgument(f"not a host name: {spec.hostname[:64]!r}")
        group = backend.groups.create(spec.id)
        self.run.mkdir(mode=0o700)
        self._step("group")
        base = self._take_ids()
        self._step("ids")
        launcher = await self.prepare(base)
        try:
            self._step("disk")
            self._step("prepared")
            if spec.policy.network != "none":
                await backend.links.attach(spec.id, launcher.net, spec.policy)
            self._step("network")
            await self.start(launcher, base, binds, group)
        finally:
            await launcher.close()
        init = self._find_init(base)
        self._step("started")
        enforced = {**self.box.apply(group, spec.limits), "disk_mb": self._holds_disk, "files": True, "shm_mb": True}
        if missing := sorted(name for name in spec.required if not enforced.get(name, False)):
            init.close()
            raise Unsupported(
                f"this host cannot enforce {', '.join(missing)}", hint="leave the limit out, or see `atoll doctor`"
            )
        self._step("limited")
        record = self._record(base, init.pid, enforced)
        record["loop"] = launcher.device
        self.note(record, init)
        return self.living(record, group, init)

    async def prepare(self, base: int) -> Launcher:
        """Namespaces and disk, side by side."""
        launching = asyncio.create_task(Launcher.prepare(base, self.backend.id_count))
        try:
            await self.make_disk()
            return await asyncio.shield(launching)
        except BaseException:
            launching.cancel()
            with suppress(asyncio.CancelledError, AtollError, OSError):
                launcher = await launching
                await launcher.close()
            raise

    def _compare(self, memory: MemoryRecord) -> None:
        """FailedPrecondition when this memory cannot go on here; NotFound when it is gone."""
        fit.check(memory["fit"], {**self._fit, **fit.of_engine(self.engine.name, self.engine.program)})
        self.backend.memories.find(memory["name"])

    def _bring_memory(self) -> None:
        """Put the files of a saved memory in place: the disk, and the state where it was sealed."""
        assert self.spec.memory is not None and self.memory is not None
        place, name, key = self.backend.memories.find(self.memory["name"]), self.memory["name"], self.spec.memory.key
        disk = self.paths.disk(self.spec.id) if self.memory["disk"] else None
        if self.memory["sealed"]:
            self.state_directory.mkdir(mode=0o700)
            unseal(place / SEALED, contents(self.state_directory, disk), key, name)
        elif disk is not None:
            disks.copy_sparse(place / DISK, disk)

    @property
    def state_directory(self) -> Path:
        """Where the state of the memory that it starts from lies."""
        assert self.memory is not None
        if self.memory["sealed"]:
            return self.run / "memory"
        return self.backend.memories.place(self.memory["name"]) / STATE

    def _step(self, name: str) -> None:
        self.backend.on_step(self.spec.id, name)

    def _take_ids(self) -> int:
        """A stopped sandbox's files carry its range: it gets the same one again, or does not start."""
        if self.spec.workspace.disk is None:
            return self.backend.ids.take(self.spec.id)
        base = cast("LocalRecord", self.spec.workspace.disk)["base"]
        if not self.backend.ids.hold(base, self.spec.id):
            raise Conflict("the user ids of this sandbox are in use by another one")
        return base

    async def make_disk(self) -> None:
        path = self.paths.disk(self.spec.id)
        if self.memory is not None:
            if self.backend.standing.rootless:
                raise Unsupported("a saved memory is started by root's daemon alone", hint="use root's daemon")
            if self.memory["disk"]:
                path.parent.mkdir(mode=0o700)
            elif self.spec.workspace.disk is None or self.memory.get("of") != self.spec.id:
                raise FailedPrecondition("this memory belongs to the sandbox that was paused, and to no other")
            return await asyncio.to_thread(self._bring_memory)
        if self.spec.workspace.disk is not None:
            if not path.exists() and self.backend.standing.rootless:
                raise FailedPrecondition(
                    "the files of this sandbox are gone: its disk was limited, so it was in memory"
                )
            if not path.exists():
                raise Internal("the disk of this sandbox is gone")
            return
        if self._disk_in_memory:
            disks.check_memory(self.spec.limits.disk_mb)
        path.parent.mkdir(mode=0o700)
        if self._disk_in_memory:
            return
        if self.backend.standing.rootless:
            path.mkdir(mode=0o700)
            return
        await self.backend.disks.create(path, self.spec.limits.disk_mb)

    @property
    def _disk_in_memory(self) -> bool:
        """An ordinary user can mount no disk image: what is to be limited is in memory, and else in a directory."""
        return self.backend.standing.rootless and "disk_mb" in self.spec.required

    @property
    def _holds_disk(self) -> bool:
        return self._disk_in_memory or not self.backend.standing.rootless

    async def start(self, launcher: Launcher, base: int, binds: list[Bind], group: Group) -> None:
        stage, further = self.paths.stage(), self.further(group)
        binds = [*self.own_binds([target for target, _ in further]), *binds]
        self.write_bundle(stage, launcher, base, binds)
        self._step("bundle")
        given: list[Callable[[], int]] = [self._boot_message, self.log, self.handed]
        sources = [self._agent, *(opened for _, opened in further), *self.descriptors()]
        with ExitStack() as stack:
            fds = [self._keep(stack, fd) for fd in (*given, *sources)]
            order: Order = {
                "stage": stage,
                "disk": self.disk(),
                "shift": not self.backend.standing.rootless,
                "overlays": self.overlays(),
                "binds": binds,
                "mountpoints": [*bundle.MOUNTPOINTS, *self.mountpoints()],
                "read_only_root": self.reads_only,
                "groups": self.entered(group),
                "inside": None,
                "argv": [],
                "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                **self.order(stage, len(fds)),
            }
            status = await launcher.start(order, fds)
        if status.code != 0:
            said = self.said() or boot_log(self.run / "engine.log")
            raise Internal(f"{self.engine.name} could not start the sandbox: {said or status}")

    def disk(self) -> Disk:
        if self._disk_in_memory:
            return {"tmpfs": self.spec.limits.disk_mb << 20}
        disk: Disk = {"image": str(self.paths.disk(self.spec.id)), "fresh": self.spec.workspace.disk is None}
        if (of := self._disk_base) is not None:
            disk["of"] = of
        return disk

    @property
    def _disk_base(self) -> int | None:
        """The first user id of the files on its disk, where that may be another sandbox's."""
        if self.memory is not None:
            return self.memory["base"]
        kept = self.spec.workspace.disk
        return None if kept is None else cast("LocalRecord", kept).get("disk_base")

    @staticmethod
    def _keep(stack: ExitStack, make: Callable[[], int]) -> int:
        fd = make()
        stack.callback(os.close, fd)
        return fd

    def overlays(self) -> list[Overlay]:
        rootfs = self.rootfs
        overlays: list[Overlay] = [{"target": "", "lowers": list(rootfs.lowers), "name": "root"}]
        if rootfs.usr:
            overlays.append({"target": "usr", "lowers": list(rootfs.usr), "name": "usr"})
        return overlays

    def own_binds(self, further: list[str]) -> list[Bind]:
        """Descriptors count from the three that the engine itself gets."""
        if self._workspace is None:
            workspace: BindSource = {"disk": "workspace"}
        else:
            workspace = {"image": str(self._workspace), "directory": "workspace"}
        return [
            {"source": workspace, "target": "/workspace", "read_only": False, "idmap": True},
            *[
                Bind(source={"fd": fd}, target=target, read_only=True, idmap=False)
                for fd, target in enumerate([bundle.AGENT, *further], start=3)
            ],
        ]

    # Descriptors for the agent

    def message(self) -> bytes:
        """What the agent is told once, as it starts."""
        spec = self.spec
        limits = spec.limits
        rlimits = {"nofile": [limits.files, limits.files], "core": [0, 0], **spec.boot.get("rlimits", {})}
        if self.agent_holds_pids or self.backend.standing.rootless:
            processes = limits.pids + SPARE_PIDS
            rlimits["nproc"] = [processes, processes]
        message = {
            **spec.boot,
            **self.secrets,
            "sandbox": spec.id,
            "listen_fd": None,
            "dial": None,
            "memory": None,
            **self.boot(),
            "rlimits": rlimits,
            "filter": self.filter(),
        }
        return json.dumps(message).encode()

    def _boot_message(self) -> int:
        if self.memory is not None:
            return os.memfd_create("boot", os.MFD_CLOEXEC)  # it has had one
        fd = os.memfd_create("boot", os.MFD_CLOEXEC)
        os.write(fd, self.message())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def said(self) -> str:
        """The end of what the engine and the agent wrote while they started."""
        return boot_log(self.run / "boot.log")

    def log(self) -> int:
        return os.open(self.run / "boot.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    @staticmethod
    def _agent() -> int:
        return os.open(binaries.guest(), os.O_PATH | os.O_CLOEXEC)

    # Results

    def _find_init(self, base: int) -> children.Watched:
        """Hold the sandbox's first process, and look whether it really has the sandbox's id."""
        pid = int((self.run / "pid").read_text())
        init = children.Watched(pid)
        owner = os.stat(f"/proc/{pid}/ns").st_uid if init.over else _uid(pid)
        if owner != base:
            init.close()
            raise Internal(f"the sandbox's init runs as {owner}, not as {base}: {boot_log(self.run / 'boot.log')}")
        return init

    def _record(self, base: int, pid: int, enforced: dict[str, bool]) -> LocalRecord:
        of = self._disk_base
        other: LocalRecord = {"id": self.spec.id} if of is None else {"id": self.spec.id, "disk_base": of}
        return {
            **other,
            "networked": self.networked,
            "fit": self._fit,
            "program": self.engine.program,
            "runtime": self.engine.runtime.name,
            "engine": self.engine.name,
            "pid": pid,
            "started": children.start_time(pid),
            "base": base,
            "limits": self.spec.limits.to_json(),
            "enforced": enforced,
            "workspace": self.spec.workspace.of if self._workspace else None,
            "needs": ["filter"] if self.filter() else [],
            "link": self.backend.links.link(self.spec.id),
            "agent_secret": self.secrets["agent_secret"],
            "host_secret": self.secrets["host_secret"],
        }


def _uid(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return -1


def passable(directory: Path) -> None:
    """A directory that the sandbox's own ids may pass through, whatever the daemon's umask is."""
    directory.mkdir(exist_ok=True)
    directory.chmod(0o711)
