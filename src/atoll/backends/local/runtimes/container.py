"""Sandboxes on the host's own kernel, by namespaces, a filter of system calls and control groups.

runc and crun act from outside, as root, and move the sandbox into namespaces made ahead. `direct` is no program of its own: the
launcher starts the agent itself, from the same configuration that runc would get.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import atoll
from atoll.backends.local import binaries, bundle
from atoll.backends.local.assembly import Assembly, Boot, passable
from atoll.backends.local.box import SOCKET, LocalBox
from atoll.backends.local.kernel import filters
from atoll.backends.local.kernel.cgroups import Group
from atoll.backends.local.launch import NET_NS_FD, USER_NS_FD, Bind, EngineOrder, Launcher
from atoll.backends.local.runtimes import direct
from atoll.backends.local.runtimes.base import LOCAL, Engine, Runtime
from atoll.backends.local.seen import Seen

DIRECT = "direct"
HANDED_FD = 3  # where the launcher leaves the agent's listening socket
_BACKLOG = 8


class OutsideAssembly(Assembly):
    """An OCI engine outside the sandbox starts the bundle; the agent inherits the socket it listens on."""

    box = LocalBox

    def write_bundle(self, stage: str, launcher: Launcher, base: int, binds: list[Bind]) -> None:
        user_ns, net_ns = self._namespaces(launcher)
        (self.run / "config.json").write_bytes(self._config(stage, base, user_ns, net_ns))
        passable(self.paths.engine / self.engine.name)

    def order(self, stage: str, descriptors: int) -> EngineOrder:
        run = self.run
        return {
            "argv": [
                *(self.engine.program, "--root", str(self.paths.engine / self.engine.name)),
                *("--log", str(run / "engine.log"), "run", "--detach", "--preserve-fds", "1"),
                *("--bundle", str(run), "--pid-file", str(run / "pid"), self.spec.id),
            ],
            "seen": self._seen.to_json(),
        }

    def handed(self) -> int:
        directory = os.open(self.run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")  # a home with a long name would not fit otherwise
            listener.listen(_BACKLOG)
            return listener.detach()
        finally:
            listener.close()
            os.close(directory)

    def boot(self) -> Boot:
        return {"listen_fd": HANDED_FD, "cpus": self._seen.cpus}

    def filter(self) -> str | None:
        """The engine installs the filter. What the host's writable files need beside it is the agent's."""
        return None if self.only_reads_the_host else filters.no_set_id().hex()

    @cached_property
    def _seen(self) -> Seen:
        return Seen.held_by(self.backend.groups.open(self.spec.id), self.spec.limits)

    def _config(self, stage: str, base: int, user_ns: str, net_ns: str) -> bytes:
        spec, backend = self.spec, self.backend
        return bundle.configuration(
            root=f"{stage}/root",
            hostname=spec.hostname,
            base=base,
            count=backend.id_count,
            user_ns=user_ns,
            net_ns=net_ns,
            seen=self._seen,
            cgroup=None if backend.standing.rootless else backend.groups.path(spec.id),
            filter=spec.seccomp,
            no_capabilities=spec.no_capabilities,
            read_only_root=spec.read_only_root,
            shm_mb=spec.limits.shm_mb,
        )

    def _namespaces(self, launcher: Launcher) -> tuple[str, str]:
        """The paths of the two namespaces that the launcher holds for an engine."""
        users = self.run / "users"  # runc from 1.1.15 on takes the map of N for that of a path /proc/N/fd/M
        users.unlink(missing_ok=True)
        users.symlink_to(f"/proc/{launcher.pid}/fd/{USER_NS_FD}")
        return str(users), f"/proc/{launcher.pid}/fd/{NET_NS_FD}"


class ContainerAssembly(OutsideAssembly):
    """As above, or with the launcher itself as the engine."""

    @property
    def _direct(self) -> bool:
        return self.engine.name == DIRECT

    def write_bundle(self, stage: str, launcher: Launcher, base: int, binds: list[Bind]) -> None:
        if not self._direct:
            super().write_bundle(stage, launcher, base, binds)
            return
        self._direct_config = self._config(stage, base, direct.USER_NS, direct.NET_NS)

    def order(self, stage: str, descriptors: int) -> EngineOrder:
        if not self._direct:
            return super().order(stage, descriptors)
        # The file for the process id is the last of the descriptors.
        started = direct.order(self._direct_config, self.spec.seccomp, descriptors - 1)
        return {"direct": started, "seen": self._seen.to_json()}

    def descriptors(self) -> list[Callable[[], int]]:
        return [self.pid_file] if self._direct else []

    def entered(self, group: Group) -> list[str]:
        return direct.doors(self.backend.groups, self.spec.id) if self._direct else super().entered(group)


class Container(Runtime):
    """`container`: works on every Linux machine."""

    name = "container"
    engines = (DIRECT, "runc", "crun")
    fix = "install the package runc"
    package = "runc"
    optional = False
    capabilities = replace(LOCAL, resizes=frozenset(["cpus", "memory_mb", "pids"]))
    assembly = ContainerAssembly
    box = LocalBox

    def order(self, *, rootless: bool) -> tuple[str, ...]:
        found = super().order(rootless=rootless)
        return tuple(name for name in found if not (rootless and name == DIRECT and self._chosen == "auto"))

    @classmethod
    def program(cls, engine: str) -> str:
        return "" if engine == DIRECT else engine

    def find(self, engine: str) -> str | None:
        return str(binaries.launcher()) if engine == DIRECT else super().find(engine)

    async def version(self, engine: Engine) -> str:
        return atoll.__version__ if engine.name == DIRECT else await super().version(engine)

    def fix_of(self, engine: str) -> str:
        return "leave [backend] container_engine out, and runc is used" if engine == DIRECT else self.fix

    def told_when_refused(self, engine: str) -> bool:
        return engine == DIRECT
