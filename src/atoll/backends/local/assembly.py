"""Makes one sandbox, step by step. Every step is named, so that a journal can follow and a test can break it anywhere."""

import asyncio
import json
import math
import os
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.backends.contract import BoxSpec, Mount
from atoll.backends.local import binaries, bundle
from atoll.backends.local.box import ContainerBox
from atoll.backends.local.kernel import children, disks, filters
from atoll.backends.local.kernel.cgroups import SPARE_PIDS, Group
from atoll.backends.local.launch import NET_NS_FD, USER_NS_FD, Launcher, boot_log
from atoll.backends.local.runtimes import direct
from atoll.backends.local.runtimes.engines import HANDED_FD, Engine
from atoll.backends.local.runtimes.gvisor import (
    DIAL_DIRECTORY,
    DIAL_TARGET,
    MEMORY_TARGETS,
    GvisorBox,
    beside_mb,
    find_gofer,
    host_tasks,
    memory_limit,
)
from atoll.backends.local.runtimes.gvisor_channel import SOCKET, Door
from atoll.errors import AtollError, Conflict, FailedPrecondition, Internal, InvalidArgument, Unsupported

if TYPE_CHECKING:
    from atoll.backends.local.backend import LocalBackend

STEPS = ("group", "ids", "disk", "prepared", "network", "bundle", "started", "limited")
_BACKLOG = 8
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
_RESERVED = ("proc", "sys", "dev", ".atoll")


class Assembly:
    """The making of one sandbox. What it leaves behind on failure the backend buries by id."""

    def __init__(self, backend: "LocalBackend", spec: BoxSpec, engine: Engine, workspace: Path | None) -> None:
        self._backend = backend
        self._spec = spec
        self._engine = engine
        self._workspace = workspace
        self._paths = backend.paths
        self._run = backend.paths.run(spec.id)
        self._door: Door | None = None
        self._secrets = {"agent_secret": secrets.token_hex(16), "host_secret": secrets.token_hex(16)}

    async def make(self) -> ContainerBox:
        try:
            return await self._make()
        except BaseException:
            if self._door is not None:
                self._door.close()
            raise

    async def _make(self) -> ContainerBox:
        spec, backend = self._spec, self._backend
        binds = [_bind(mount.target, mount.read_only, _host_source(mount)) for mount in spec.mounts]
        if not _HOSTNAME.fullmatch(spec.hostname):
            raise InvalidArgument(f"not a host name: {spec.hostname[:64]!r}")
        group = backend.groups.create(spec.id)
        self._run.mkdir(mode=0o700)
        self._step("group")
        base = self._take_ids()
        self._step("ids")
        launcher = await self._prepare(base)
        try:
            self._step("disk")
            self._step("prepared")
            if spec.network is not None:
                await spec.network(launcher.net)
            self._step("network")
            await self._start(launcher, base, binds, group)
        finally:
            await launcher.close()
        init = self._find_init(base)
        self._step("started")
        inside = self._engine.inside
        tasks, beside = (host_tasks(spec.limits.pids), beside_mb(spec.limits)) if inside else (None, 0)
        enforced = {**group.apply(spec.limits, tasks, beside), "disk_mb": self._holds_disk}
        enforced |= {"files": True, "shm_mb": True}
        enforced["pids"] |= self._engine.inside  # gVisor counts them itself
        if missing := sorted(name for name in spec.required if not enforced.get(name, False)):
            init.close()
            raise Unsupported(
                f"this host cannot enforce {', '.join(missing)}", hint="leave the limit out, or see `atoll doctor`"
            )
        self._step("limited")
        record = {**self._record(base, init.pid, enforced), "loop": launcher.device}
        if self._door is not None:
            record |= {"agent_first": True, "gofer": find_gofer(init.pid)}
            return GvisorBox(record, self._paths, group, init, self._door)
        return ContainerBox(record, self._paths, group, init)

    async def _prepare(self, base: int) -> Launcher:
        """Namespaces and disk, side by side."""
        launching = asyncio.create_task(Launcher.prepare(base, self._backend.id_count))
        try:
            await self._make_disk()
            return await asyncio.shield(launching)
        except BaseException:
            launching.cancel()
            with suppress(asyncio.CancelledError, AtollError, OSError):
                launcher = await launching
                await launcher.close()
            raise

    def _step(self, name: str) -> None:
        self._backend.on_step(self._spec.id, name)

    def _take_ids(self) -> int:
        """A stopped sandbox's files carry its range: it gets the same one again, or does not start."""
        if self._spec.disk is None:
            return self._backend.ids.take(self._spec.id)
        base = int(self._spec.disk["base"])
        if not self._backend.ids.hold(base, self._spec.id):
            raise Conflict("the user ids of this sandbox are in use by another one")
        return base

    async def _make_disk(self) -> None:
        path = self._paths.disk(self._spec.id)
        if self._spec.disk is not None:
            if not path.exists() and self._backend.standing.rootless:
                raise FailedPrecondition(
                    "the files of this sandbox are gone: its disk was limited, so it was in memory"
                )
            if not path.exists():
                raise Internal("the disk of this sandbox is gone")
            return
        if self._disk_in_memory:
            disks.check_memory(self._spec.limits.disk_mb)
        path.parent.mkdir(mode=0o700)
        if self._disk_in_memory:
            return
        if self._backend.standing.rootless:
            path.mkdir(mode=0o700)
            return
        await self._backend.disks.create(path, self._spec.limits.disk_mb)

    @property
    def _disk_in_memory(self) -> bool:
        """An ordinary user can mount no disk image: what is to be limited is in memory, and else in a directory."""
        return self._backend.standing.rootless and "disk_mb" in self._spec.required

    @property
    def _holds_disk(self) -> bool:
        return self._disk_in_memory or not self._backend.standing.rootless

    async def _start(self, launcher: Launcher, base: int, binds: list[dict[str, Any]], group: Group) -> None:
        spec, rootless = self._spec, self._backend.standing.rootless
        stage = self._paths.stage()
        watched = group.memory_files() if self._engine.inside else []
        binds = [*self._own_binds(bool(watched)), *binds]
        inside = self._inside_config(stage, binds) if self._engine.inside else None
        config = self._config(stage, launcher, base) if inside is None else b""
        if inside is None and not self._engine.direct:
            (self._run / "config.json").write_bytes(config)
            passable(self._paths.engine / self._engine.name)
        self._step("bundle")
        networked = spec.network is not None or spec.network_later
        handed = self._listen if inside is None else self._pid_file
        sources: list[Callable[[], int]] = [self._agent, *([] if inside is None else [self._dial_directory])]
        if self._engine.direct:
            sources.append(self._pid_file)
        sources += [partial(os.open, path, os.O_PATH | os.O_CLOEXEC) for path in watched]
        given: list[Callable[[], int]] = [partial(self._boot_message, watches=bool(watched)), self._log, handed]
        with ExitStack() as stack:
            fds = [self._keep(stack, fd) for fd in (*given, *sources)]
            order = {
                "stage": stage,
                "disk": self._disk(),
                "shift": not rootless,
                "overlays": self._overlays(),
                "binds": binds,
                "mountpoints": list(bundle.MOUNTPOINTS)
                + (["tmp"] if spec.read_only_root or self._engine.inside else []),
                "read_only_root": spec.read_only_root,
                "groups": self._doors(group),
                "inside": inside,
                "argv": self._engine.run(self._paths, spec.id, stage, networked=networked),
                "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            }
            if inside is not None:
                cpus = math.ceil(spec.limits.cpus)
                order["seen"] = {"cpus": cpus, "memory": spec.limits.memory_mb << 20}
            if self._engine.direct:
                order["direct"] = direct.order(config, spec.seccomp, len(fds) - 1)
            status = await launcher.start(order, fds)
        if status.code != 0:
            said = boot_log(self._run / "boot.log") or boot_log(self._run / "engine.log")
            raise Internal(f"{self._engine.name} could not start the sandbox: {said or status}")

    def _filter(self) -> str | None:
        """What the agent installs before it listens: everything where the engine does not, and what the host's files need."""
        set_id = all(mount.read_only for mount in self._spec.mounts)
        if self._engine.inside:
            return filters.program(self._spec.seccomp, set_id=set_id).hex()
        return None if set_id else filters.no_set_id().hex()

    def _doors(self, group: Group) -> list[str]:
        """The groups to be in before the engine starts; runc joins them itself."""
        if self._engine.direct:
            return direct.doors(self._backend.groups, self._spec.id)
        return group.doors() if self._engine.inside or self._backend.standing.rootless else []

    def _disk(self) -> dict[str, Any]:
        if self._disk_in_memory:
            return {"tmpfs": self._spec.limits.disk_mb << 20}
        return {"image": str(self._paths.disk(self._spec.id)), "fresh": self._spec.disk is None}

    def _config(self, stage: str, launcher: Launcher, base: int) -> bytes:
        spec = self._spec
        user_ns, net_ns = (direct.USER_NS, direct.NET_NS) if self._engine.direct else self._made_ahead(launcher)
        return bundle.configuration(
            root=f"{stage}/root",
            hostname=spec.hostname,
            base=base,
            count=self._backend.id_count,
            user_ns=user_ns,
            net_ns=net_ns,
            cgroup=None if self._backend.standing.rootless else self._backend.groups.path(spec.id),
            filter=spec.seccomp,
            no_capabilities=spec.no_capabilities,
            read_only_root=spec.read_only_root,
            shm_mb=spec.limits.shm_mb,
        )

    def _made_ahead(self, launcher: Launcher) -> tuple[str, str]:
        """The paths of the two namespaces that the launcher holds for an engine."""
        users = self._run / "users"  # runc from 1.1.15 on takes the map of N for that of a path /proc/N/fd/M
        users.unlink(missing_ok=True)
        users.symlink_to(f"/proc/{launcher.pid}/fd/{USER_NS_FD}")
        return str(users), f"/proc/{launcher.pid}/fd/{NET_NS_FD}"

    def _inside_config(self, stage: str, binds: list[dict[str, Any]]) -> str:
        spec = self._spec
        passable(self._run / DIAL_DIRECTORY)
        self._door = Door(self._run / DIAL_DIRECTORY, self._secrets["agent_secret"])
        shared = [(bind["target"], bind["read_only"]) for bind in binds]
        if not spec.read_only_root:
            shared.append(("/tmp", False))  # else gVisor puts memory there, beside the disk and its limit
        return bundle.inside_configuration(
            root=f"{stage}/root",
            hostname=spec.hostname,
            shared=shared,
            no_capabilities=spec.no_capabilities,
            read_only_root=spec.read_only_root,
            shm_mb=spec.limits.shm_mb,
        )

    @staticmethod
    def _keep(stack: ExitStack, make: Callable[[], int]) -> int:
        fd = make()
        stack.callback(os.close, fd)
        return fd

    def _overlays(self) -> list[dict[str, Any]]:
        rootfs = self._spec.rootfs
        overlays = [{"target": "", "lowers": list(rootfs.lowers), "name": "root"}]
        if rootfs.usr:
            overlays.append({"target": "usr", "lowers": list(rootfs.usr), "name": "usr"})
        return overlays

    def _own_binds(self, watched: bool) -> list[dict[str, Any]]:
        """Descriptors count from the three that the engine itself gets."""
        if self._workspace is None:
            workspace: dict[str, Any] = {"disk": "workspace"}
        else:
            workspace = {"image": str(self._workspace), "directory": "workspace"}
        binds = [
            {"source": workspace, "target": "/workspace", "read_only": False, "idmap": True},
            {"source": {"fd": 3}, "target": bundle.AGENT, "read_only": True, "idmap": False},
        ]
        further = [DIAL_TARGET, *(MEMORY_TARGETS if watched else ())] if self._engine.inside else []
        binds += [
            {"source": {"fd": fd}, "target": target, "read_only": True, "idmap": False}
            for fd, target in enumerate(further, start=4)
        ]
        return binds

    # Descriptors for the agent

    def _boot_message(self, *, watches: bool) -> int:
        spec = self._spec
        limits = spec.limits
        rlimits = {"nofile": [limits.files, limits.files], "core": [0, 0], **spec.boot.get("rlimits", {})}
        if self._engine.inside or self._backend.standing.rootless:
            processes = limits.pids + SPARE_PIDS
            rlimits["nproc"] = [processes, processes]
        message = {
            **spec.boot,
            **self._secrets,
            "sandbox": spec.id,
            "listen_fd": None if self._engine.inside else HANDED_FD,
            "dial": f"{DIAL_TARGET}/{SOCKET}" if self._engine.inside else None,
            "rlimits": rlimits,
            "filter": self._filter(),
            "memory": memory_limit(limits) if watches else None,
        }
        fd = os.memfd_create("boot", os.MFD_CLOEXEC)
        os.write(fd, json.dumps(message).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def _log(self) -> int:
        return os.open(self._run / "boot.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _pid_file(self) -> int:
        """Where the launcher writes who keeps an engine that is inside."""
        return os.open(self._run / "pid", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _dial_directory(self) -> int:
        return os.open(self._run / DIAL_DIRECTORY, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def _listen(self) -> int:
        directory = os.open(self._run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"/proc/self/fd/{directory}/agent.sock")  # a home with a long name would not fit otherwise
            listener.listen(_BACKLOG)
            return listener.detach()
        finally:
            listener.close()
            os.close(directory)

    @staticmethod
    def _agent() -> int:
        return os.open(binaries.guest(), os.O_PATH | os.O_CLOEXEC)

    # What came of it

    def _find_init(self, base: int) -> children.Watched:
        """Hold the sandbox's first process, and look whether it really has the sandbox's id."""
        pid = int((self._run / "pid").read_text())
        init = children.Watched(pid)
        owner = os.stat(f"/proc/{pid}/ns").st_uid if init.over else _uid(pid)
        if owner != base:
            init.close()
            raise Internal(f"the sandbox's init runs as {owner}, not as {base}: {boot_log(self._run / 'boot.log')}")
        return init

    def _record(self, base: int, pid: int, enforced: dict[str, bool]) -> dict[str, Any]:
        return {
            "id": self._spec.id,
            "runtime": self._engine.runtime,
            "engine": self._engine.name,
            "pid": pid,
            "started": children.start_time(pid),
            "base": base,
            "limits": self._spec.limits.to_json(),
            "enforced": enforced,
            "workspace": self._spec.workspace if self._workspace else None,
            "needs": ["filter"] if self._filter() else [],
            **self._secrets,
        }


def _uid(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return -1


def _host_source(mount: Mount) -> dict[str, Any]:
    return {"path": mount.source, "uid": mount.uid, "gid": mount.gid}


def _bind(target: str, read_only: bool, source: dict[str, Any]) -> dict[str, Any]:
    parts = [part for part in target.split("/") if part]
    if not target.startswith("/") or not parts or "." in parts or ".." in parts or "\0" in target:
        raise InvalidArgument(f"not a place to mount on: {target[:200]!r}")
    if parts[0] in _RESERVED:
        raise InvalidArgument(f"/{parts[0]} is not a place to mount on")
    return {"source": source, "target": target, "read_only": read_only, "idmap": True}


def passable(directory: Path) -> None:
    """A directory that the sandbox's own ids may pass through, whatever the daemon's umask is."""
    directory.mkdir(exist_ok=True)
    directory.chmod(0o711)
