"""The contract between core and backends: the values that go in and come out, and the two protocols.

A backend makes sandboxes, finds them again after a restart, and leaves nothing of them behind. It knows nothing of
owners, commands or transports; those are core's. Everything of a sandbox is derivable from its id, so that a sandbox
whose record was lost can still be buried.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, Protocol, runtime_checkable

from atoll.egress import EgressEvent
from atoll.errors import Unsupported
from atoll.guest import GuestClient
from atoll.model import Policy

Record = Mapping[str, object]  # JSON for the store; only the backend that made it reads it
EndKind = Literal["exit", "oom", "killed", "lost", "unknown"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a sandbox; names are those of the API."""

    cpus: float = 1.0
    memory_mb: int = 512
    pids: int = 512
    files: int = 4096
    disk_mb: int = 4096
    shm_mb: int = 256  # of /dev/shm, which is memory too

    def to_json(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Limits":
        known = {name: value[name] for name in Limits.__slots__ if name in value}
        return Limits(**known)


@dataclass(frozen=True, slots=True)
class Image:
    """The image a sandbox starts from, by reference. How its files come to the sandbox is the backend's business.

    The digest decides; the name is for people, and for a backend that fetches the image itself. `Image()` is an empty one.
    """

    name: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory or file of the caller's inside the sandbox: the one path that crosses, named by the caller and allowed by core.

    `source` is absolute and free of symbolic links; it is opened with the rights of `uid`, `gid`, and root inside acts on it as
    that user and as nobody else. Below it, an empty directory lies over every directory of `hidden`, and what is in `guarded`
    is read-only.
    """

    source: str
    target: str
    read_only: bool
    uid: int
    gid: int
    hidden: tuple[str, ...] = ()
    guarded: tuple[str, ...] = ()
    volume: str = ""  # in place of a source: the volume of this id


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the files of a sandbox are.

    `own`: on a new disk. `kept`: on the disk of the stopped sandbox of this id, of which `disk` is the record. `shared`:
    /workspace is that of the sandbox `of`, and the rest is on a disk of its own, which is a kept one if `disk` is given.
    """

    kind: Literal["own", "kept", "shared"] = "own"
    of: str = ""
    disk: Record | None = None


@dataclass(frozen=True, slots=True)
class First:
    """A command of the image that a warm sandbox has run before anybody asks for it. It returns when what it started is ready."""

    argv: tuple[str, ...]
    user: str = ""


@dataclass(frozen=True, slots=True)
class BoxSpec:
    """All that is needed to make one sandbox."""

    id: str
    image: Image = field(default_factory=Image)
    runtime: str = "auto"
    limits: Limits = field(default_factory=Limits)
    required: frozenset[str] = frozenset()  # names of limits that must be held, else creating is refused
    hostname: str = ""  # empty: a name made of the id
    boot: Mapping[str, Any] = field(default_factory=dict)  # keys of the boot message: environment, deadline, warm
    base_env: Mapping[str, str] = field(default_factory=dict)  # of that environment, what is nobody's in particular
    mounts: tuple[Mount, ...] = ()
    workspace: Workspace = field(default_factory=Workspace)
    policy: Policy = field(default_factory=Policy)  # what it may reach; in force before any of its code runs
    read_only_root: bool = False
    seccomp: str = "default"  # a filter's name: default, moderate, ai-agent or restrictive
    no_capabilities: bool = False
    first: First | None = None  # goes with the image
    memory: "Memory | None" = None  # it goes on from there, as a sandbox of its own


@dataclass(frozen=True, slots=True)
class Memory:
    """A saved memory to start from: what `save_memory` answered, and the key it was sealed with; none if it was not."""

    record: Record
    key: bytes = field(default=b"", repr=False)


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
    """Abilities and needs of one runtime's sandboxes, so that nobody has to ask for its name."""

    freezes_idle: bool = False  # an idle one costs processor time: core freezes it
    resizes: frozenset[str] = frozenset()  # limits that can be changed while it runs
    oom_shows_as_failure: bool = False  # out of memory, a program may fail in any way, not only be killed
    host_mounts: bool = False  # directories of the caller's inside it
    host_ports: bool = False  # ports of the caller's machine from inside
    shared_workspace: bool = False  # two sandboxes on one workspace
    memory: bool = False  # memory and processes can be saved, and sandboxes started from them
    spares: bool = True  # unused ones may wait for a caller
    keeps_disk: bool = True  # files can be kept while it is stopped
    policy: Literal["broker", "cluster", "none"] = "none"  # what enforces a list of hosts

    def check(
        self,
        runtime: str,
        *,
        mounts: bool = False,
        ports: bool = False,
        shared: bool = False,
        hosts: bool = False,
        kept: bool = False,
        memory: bool = False,
    ) -> None:
        """Raise Unsupported when one of these is asked of a runtime that cannot do it."""
        wanted = (
            (mounts and not self.host_mounts, "mounts no directories of the host", "copy the files into it"),
            (ports and not self.host_ports, "reaches no ports of the host", "leave them out"),
            (shared and not self.shared_workspace, "shares no workspace with another sandbox", ""),
            (kept and not self.keeps_disk, "keeps no files of a stopped sandbox", "copy them out of it"),
            (hosts and self.policy == "none", "enforces no list of hosts", "use --no-network"),
            (memory and not self.memory, "saves no memory", "keep its files with a snapshot"),
        )
        for lacking, what, instead in wanted:
            if lacking:
                hint = "choose another runtime" + (f", or {instead}" if instead else "")
                raise Unsupported(f"the runtime {runtime} {what}", hint=hint)


@dataclass(frozen=True, slots=True)
class BoxFacts:
    """Facts about a living sandbox, for people and for the decisions of core."""

    id: str
    runtime: str
    engine: str = ""
    limits: Limits = field(default_factory=Limits)
    enforced: Mapping[str, bool] = field(default_factory=dict)  # name of a limit: whether it is held here
    shown: Mapping[str, Any] = field(default_factory=dict)  # more for people, by the API's names; core does not look


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of a sandbox by host, and how much was refused."""

    hosts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    refused: int = 0
    open: int = 0


@dataclass(frozen=True, slots=True)
class NetworkStatus:
    """Whether a list of hosts can be enforced here."""

    works: bool
    why: str = ""
    fix: str = ""
    off: bool = False  # nobody wants a network here: sandboxes get none, and that is no failure
    shown: Mapping[str, Any] = field(default_factory=dict)  # more for people


async def _ask_nobody(sandbox: str, name: str, port: int) -> str:
    return "needs approval, and this daemon has none to ask"


@dataclass(slots=True)
class NetworkEvents:
    """Notices of a backend about its sandboxes' networks."""

    on_blocked: Callable[[EgressEvent], None] = lambda event: None
    on_traffic: Callable[[str, Traffic], None] = lambda sandbox, traffic: None  # the last count, when the network goes
    on_ask: Callable[[str, str, int], Awaitable[str]] = _ask_nobody  # sandbox, name, port; why not, or nothing
    on_left: Callable[[str], None] = lambda sandbox: None


class Box(Protocol):
    """One living sandbox."""

    @property
    def id(self) -> str: ...

    @property
    def record(self) -> Record: ...  # all that adopt() needs; no secrets but the two of the hello

    @property
    def facts(self) -> BoxFacts: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def client(self) -> GuestClient: ...  # of its agent; connects by itself, and again

    async def wait(self) -> Ended: ...  # resolves once, never raises

    async def kill(self) -> None: ...  # returns when no process is left, and then no network

    async def freeze(self) -> None: ...

    async def thaw(self) -> None: ...

    async def save_memory(self, name: str, key: bytes = b"", *, end: bool = False) -> Record: ...

    # Memory, processes and disk of one moment, under this name (the form of an id), sealed where there is a key: all or nothing.
    # It goes on afterwards, its connections to the outside reset or not as the runtime can. With `end` it has ended at that
    # moment, no copy of its disk is made, and only this sandbox can go on from there, on its kept disk.

    async def usage(self) -> Usage: ...

    async def update_limits(self, limits: Limits) -> None: ...  # those of `capabilities.resizes`

    async def set_policy(self, policy: Policy) -> None: ...  # on return nothing that it does not allow is open

    async def traffic(self) -> Traffic: ...  # when it returns, every refusal until now has been told


class Backend(Protocol):
    """A place where sandboxes live."""

    async def start(self, events: NetworkEvents) -> None: ...

    async def close(self) -> None: ...  # leaves the sandboxes running

    def reserve(self, spec: BoxSpec) -> str: ...  # the id it will have: spec.id, or that of a warm one set aside for it

    async def create(self, spec: BoxSpec) -> Box: ...

    # All or nothing. Its agent has answered, its boot message and its policy are in force, and whether it was warm cannot be told.

    async def release(self, box: str) -> None: ...  # gives back a reservation that is not used; none is no error

    async def adopt(self, record: Record, policy: Policy, *, keep_disk: bool = False) -> Box | None: ...

    # None: dead, now buried. It has its network again after `reconnect`.

    async def reconnect(
        self,
    ) -> set[str]: ...  # once, after all adoptions: the ids that have lost their network for good

    async def destroy(self, record: Record, *, keep_disk: bool = False) -> None: ...

    # Idempotent, verified; `{"id": id}` does for what was half made. The network goes too.

    async def sweep(self, known: set[str], *, keep_disk: bool = False) -> list[str]: ...

    # Destroys what has our mark and is not known; with `keep_disk` what runs of it, and its disk stays.

    async def forget_memory(self, name: str) -> None: ...  # a saved memory; none of this name is no error

    async def sweep_memories(self, known: set[str]) -> list[str]: ...  # removes what nobody knows, half saved ones too

    def memory_used(self, name: str) -> int: ...  # bytes that a saved memory takes on the home; 0 where it takes none

    def disk_used(self, box: str) -> int | None: ...  # bytes its disk takes on the home now; None: none are kept there

    async def runtimes(self) -> list[RuntimeStatus]: ...

    async def pick(self, runtime: str) -> str: ...

    def capabilities(self, runtime: str) -> Capabilities: ...  # of one that `pick` has named

    async def network(self) -> NetworkStatus: ...

    def prewarm(
        self, spec: BoxSpec, count: int = 0
    ) -> None: ...  # keep warm ones of this kind from now on, at least so many

    def warm_for(self, spec: BoxSpec) -> int: ...  # how many would serve this one now

    def warmth(self) -> Mapping[str, object]: ...  # for `daemon status`

    async def drain(self) -> None: ...  # gives all warm sandboxes up


@runtime_checkable
class KeepsChanges(Protocol):
    """A backend that can tell what a stopped sandbox has changed in its image's files."""

    def changes(self, record: Record) -> Callable[[BinaryIO], None]: ...

    # Returns what writes them as the tar of an image layer. It blocks, and wants a thread that nothing else runs in.


@runtime_checkable
class HoldsVolumes(Protocol):
    """A backend that keeps disks which belong to no sandbox."""

    async def create_volume(self, volume: str, size_mb: int) -> None: ...

    async def remove_volume(self, volume: str) -> None: ...  # idempotent; nothing is left of it
