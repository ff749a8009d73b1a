"""What core knows of a backend: the values that go in and come out, and the two protocols.

A backend makes sandboxes, finds them again after a restart, and leaves nothing of them behind. It knows nothing of
owners, commands or transports; those are core's. Everything of a sandbox is derivable from its id, so that a sandbox
whose record was lost can still be buried.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

EndKind = Literal["exit", "oom", "killed", "lost", "unknown"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sandbox may use; names are those of the API."""

    cpus: float = 1.0
    memory_mb: int = 512
    pids: int = 512
    files: int = 4096
    disk_mb: int = 4096
    shm_mb: int = 256  # of /dev/shm, which is memory too

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Limits":
        known = {name: value[name] for name in Limits.__slots__ if name in value}
        return Limits(**known)


@dataclass(frozen=True, slots=True)
class Rootfs:
    """The read-only layers a sandbox starts from, top-most first."""

    lowers: tuple[str, ...]
    usr: tuple[str, ...] = ()  # a stack of its own for /usr: the machine's, in the `host` image


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory or file of the host inside the sandbox. `source` is absolute and free of symbolic links; it is opened with
    the rights of `uid`, `gid`, and root inside acts on it as that user and as nobody else."""

    source: str
    target: str
    read_only: bool
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class BoxSpec:
    """All that is needed to make one sandbox."""

    id: str
    rootfs: Rootfs
    runtime: str = "auto"
    limits: Limits = field(default_factory=Limits)
    required: frozenset[str] = frozenset()  # names of limits that must be held, else creating is refused
    hostname: str = "sandbox"
    boot: Mapping[str, Any] = field(
        default_factory=dict
    )  # keys of the boot message; the backend adds id, channel and secrets
    mounts: tuple[Mount, ...] = ()
    workspace: str | None = None  # id of the sandbox whose workspace this one shares; None: its own
    disk: Mapping[str, Any] | None = None  # record of the stopped sandbox of this id, whose disk is used again
    network: Callable[[int], Awaitable[None]] | None = None  # called with a network namespace fd; None: loopback only
    network_later: bool = False  # may be given a network once it has started, as a spare is when it is claimed
    read_only_root: bool = False
    seccomp: str = "default"  # a filter's name: default, moderate, ai-agent or restrictive
    no_capabilities: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """How a sandbox ended."""

    kind: EndKind
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """From the host's counters; None where this host does not count."""

    memory_bytes: int | None
    memory_peak_bytes: int | None
    cpu_us: int | None
    pids: int | None
    disk_bytes: int | None
    disk_total_bytes: int | None
    oom_kills: int | None


@dataclass(frozen=True, slots=True)
class RuntimeStatus:
    """Whether a runtime works here, from really having started a sandbox with it."""

    name: str
    works: bool
    why: str = ""
    fix: str = ""
    version: str = ""
    engine: str = ""
    warning: str = ""  # a version with known holes, and which of them are open
    optional: bool = True  # a machine without it is well, as long as another one works


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What sandboxes of one runtime can do and need, so that nobody has to ask for its name."""

    freezes_idle: bool = False  # an idle one costs processor time: core freezes it
    resizes: frozenset[str] = frozenset()  # limits that can be changed while it runs
    oom_shows_as_failure: bool = False  # out of memory, a program may fail in any way, not only be killed


class Box(Protocol):
    """One living sandbox."""

    @property
    def id(self) -> str: ...

    @property
    def record(self) -> dict[str, Any]: ...  # JSON-able; all that adopt() needs; no secrets but the two of the hello

    @property
    def capabilities(self) -> Capabilities: ...

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...

    async def wait(self) -> Ended: ...  # resolves once, never raises

    async def kill(self) -> None: ...  # returns when no process is left

    async def freeze(self) -> None: ...

    async def thaw(self) -> None: ...

    async def usage(self) -> Usage: ...

    async def update_limits(self, limits: Limits) -> None: ...

    def enforced(self) -> dict[str, bool]: ...


class Backend(Protocol):
    """A place where sandboxes live."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...  # leaves the sandboxes running

    async def create(self, spec: BoxSpec) -> Box: ...  # all or nothing

    async def adopt(
        self, record: dict[str, Any], *, keep_disk: bool = False
    ) -> Box | None: ...  # None: dead, now buried

    async def destroy(self, record: dict[str, Any], *, keep_disk: bool = False) -> None: ...  # idempotent, verified

    async def sweep(self, known: set[str]) -> list[str]: ...

    def disk_used(self, box: str) -> int | None: ...  # bytes its disk takes on the home now; None: none are kept there

    async def runtimes(self) -> list[RuntimeStatus]: ...

    async def pick(self, runtime: str) -> str: ...

    def capabilities(self, runtime: str) -> Capabilities: ...  # of one that `pick` has named
