"""The base of every runtime of this machine: a name, engines that can be found and probed, what it can do, and how it starts a sandbox.

Everything that differs between runtimes is in the class of each. The rest of the backend asks these classes and never for a name.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.backends.contract import Capabilities
from atoll.backends.local import binaries

if TYPE_CHECKING:
    from atoll.backends.local.assembly import Assembly
    from atoll.backends.local.box import LocalBox, LocalRecord
    from atoll.backends.local.kernel.cgroups import Group
    from atoll.backends.local.kernel.children import Watched
    from atoll.backends.local.paths import Paths

# Abilities of every sandbox on this machine's file system and network.
LOCAL = Capabilities(host_mounts=True, host_ports=True, shared_workspace=True, policy="broker")


@dataclass(frozen=True, slots=True)
class Engine:
    """A program that runs sandboxes of a runtime, as found on this machine."""

    runtime: "Runtime"
    name: str
    program: str


class Runtime:
    """One way to isolate a sandbox."""

    name: ClassVar[str]
    engines: ClassVar[tuple[str, ...]]  # all there are, in the order in which they are tried
    fix: ClassVar[str]  # what to do where no engine works
    package: ClassVar[str] = ""  # of the distribution, with an engine in it
    installer: ClassVar[str] = ""  # a script of ours that installs an engine
    optional: ClassVar[bool] = True  # whether a machine without it is well, as long as another one works
    automatic: ClassVar[bool] = True  # whether `auto` may choose it
    capabilities: ClassVar[Capabilities]
    assembly: ClassVar[type["Assembly"]]  # makes its sandboxes
    box: ClassVar[type["LocalBox"]]  # a living one

    def __init__(self, engine: str = "auto") -> None:
        self._chosen = engine

    def order(self, *, rootless: bool) -> tuple[str, ...]:
        """The engines to try. One that the operator has chosen is never replaced."""
        return self.engines if self._chosen == "auto" else (self._chosen,)

    @classmethod
    def program(cls, engine: str) -> str:
        """The name of an engine's program; empty when it is one of ours."""
        return engine

    @classmethod
    def programs(cls) -> tuple[str, ...]:
        """The programs of the machine that can run it."""
        return tuple(dict.fromkeys(filter(None, map(cls.program, cls.engines))))

    def find(self, engine: str) -> str | None:
        """The path of an engine's program; None when it is not installed."""
        return binaries.system(self.program(engine))

    def lacking(self, engine: str) -> str:
        """Return what is missing where `find` finds nothing."""
        return "not installed"

    def keeps_failure(self, engine: str) -> bool:
        """Whether a failed probe is believed until this machine starts again, because every one takes its whole time."""
        return False

    def probe_limit(self, engine: str) -> float:
        """Seconds for a probe."""
        return 30.0

    async def version(self, engine: Engine) -> str:
        return await version_of(engine.program)

    def fix_of(self, engine: str) -> str:
        """Return advice for an engine that was found and does not work."""
        return self.fix

    def told_when_refused(self, engine: str) -> bool:
        """Whether people are told that this engine was tried in vain before another one that works."""
        return False

    def adopt(self, record: "LocalRecord", paths: "Paths", group: "Group", init: "Watched") -> "LocalBox":
        """A sandbox that a daemon before us has made."""
        return self.box(record, paths, group, init, self.capabilities)


async def version_of(program: str) -> str:
    """The first word that looks like a version in what `program --version` says; empty when there is none."""
    try:
        async with asyncio.timeout(10):
            process = await asyncio.create_subprocess_exec(
                program, "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
            )
            stdout, _ = await process.communicate()
    except (TimeoutError, OSError):
        return ""
    words = stdout.decode(errors="replace").split()
    return next((word for word in words if word.removeprefix("release-")[:1].isdigit()), "")
