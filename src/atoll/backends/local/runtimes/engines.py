"""The programs that run OCI bundles, and how each is called.

runc and crun act from outside, as root, and move the sandbox into namespaces made ahead. `direct` is no program of its own: the
launcher starts the agent itself, from the same configuration that runc would get. gVisor's runsc is started inside those
namespaces, as the sandbox's own root: neither its kernel nor its file server ever has a privileged id on the host.
"""

from dataclasses import dataclass

from atoll.backends.local.paths import Paths

RUNTIMES = {
    "gvisor": ("runsc-systrap", "runsc-ptrace"),
    "container": ("runc", "crun", "direct"),
}  # strongest first, and of each the engines that there are
AUTO = {**RUNTIMES, "container": ("direct", "runc", "crun")}  # in the order in which they are tried unasked
DIRECT = "direct"
ENGINES = tuple(name for names in RUNTIMES.values() for name in names)
HANDED_FD = 3  # where the launcher leaves the agent's listening socket


@dataclass(frozen=True, slots=True)
class Engine:
    """One of them, as found on this machine."""

    name: str
    program: str

    @property
    def runtime(self) -> str:
        return next(runtime for runtime, names in RUNTIMES.items() if self.name in names)

    @property
    def inside(self) -> bool:
        """Runs in the sandbox's own namespaces, with no right on the host."""
        return self.runtime == "gvisor"

    @property
    def direct(self) -> bool:
        """The launcher is the engine."""
        return self.name == DIRECT

    def run(self, paths: Paths, box: str, stage: str, *, networked: bool) -> list[str]:
        """Start the bundle, detached. `networked`: it has a network, or may be given one later."""
        if self.direct:
            return []
        return self._runsc(box, stage, networked) if self.inside else self._runc(paths, box)

    def _runc(self, paths: Paths, box: str) -> list[str]:
        run = paths.run(box)
        return [
            *(self.program, "--root", str(paths.engine / self.name), "--log", str(run / "engine.log")),
            *("run", "--detach", "--preserve-fds", "1", "--bundle", str(run), "--pid-file", str(run / "pid"), box),
        ]

    def _runsc(self, box: str, stage: str, networked: bool) -> list[str]:
        platform = self.name.removeprefix("runsc-")
        # The network namespace is the sandbox's own already. Without a network there is gVisor's own loopback: then its kernel may not
        # even make a socket of the host, and its filter for that is built in a quarter of the time.
        network = "host" if networked else "none"
        return [
            *(self.program, f"--root={stage}/state", f"--platform={platform}", "--ignore-cgroups"),
            # Writes land on the sandbox's limited disk, not in memory.
            *(f"--network={network}", "--host-uds=open", "--overlay2=none"),
            *("run", "--detach", f"--bundle={stage}/bundle", f"--pid-file={stage}/state/pid", box),
        ]


def order_of(runtime: str, chosen: str = "auto", *, rootless: bool = False) -> tuple[str, ...]:
    """The engines to try for a runtime. `chosen` is the operator's for `container`; one that is named is never replaced."""
    if runtime == "container" and chosen != "auto":
        return (chosen,)
    return tuple(name for name in AUTO[runtime] if not (rootless and name == DIRECT))


def program_of(engine: str) -> str:
    """What to look for on PATH."""
    return engine.partition("-")[0]
