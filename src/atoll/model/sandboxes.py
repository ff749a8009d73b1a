"""Sandboxes and images: what is asked of a new one, and what is told of one."""

import re
from typing import Annotated, Literal, TypedDict

from msgspec import UNSET, Meta, UnsetType, field

from atoll.model.fields import ALIAS, MIB, NAME, Answer, Entries, Port, Request, Runtime, Seconds, check_env, check_path
from atoll.model.network import StoredPolicy


class LimitsSpec(Request, kw_only=True):
    """The limits of one sandbox. None means the operator's default."""

    cpus: Annotated[float, Meta(ge=0.01, le=1024)] | None = None
    memory_mb: Annotated[int, Meta(ge=8, le=16 * MIB)] | None = None
    pids: Annotated[int, Meta(ge=8, le=4_000_000)] | None = None
    files: Annotated[int, Meta(ge=32, le=1_048_576)] | None = None
    disk_mb: Annotated[int, Meta(ge=8, le=64 * MIB)] | None = None
    shm_mb: Annotated[int, Meta(ge=1, le=16 * MIB)] | None = None  # of /dev/shm; None: half of the memory


class Mount(Request, kw_only=True):
    """A directory of the host, seen inside at `target`."""

    source: str
    target: str
    read_only: bool = False

    def __post_init__(self) -> None:
        for path in (self.source, self.target):
            if not path.startswith("/") or "\0" in path or ".." in path.split("/") or len(path) > 4096:
                raise ValueError(f"a mount needs absolute paths without `..`, not {path!r:.200}")


class VolumeMount(Request, kw_only=True):
    """A volume of the caller's, seen inside at `target`."""

    name: Annotated[str, Meta(min_length=1, max_length=63)]
    target: str
    read_only: bool = False

    def __post_init__(self) -> None:
        path = self.target
        if not path.startswith("/") or "\0" in path or ".." in path.split("/") or not 1 < len(path) <= 4096:
            raise ValueError(f"a volume needs an absolute path without `..`, not {path!r:.200}")


class CreateVolume(Request, kw_only=True):
    """A new volume; without a size it has the operator's default."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
    size_mb: Annotated[int, Meta(ge=16, le=16 * MIB)] | None = None


class VolumeInfo(Answer, kw_only=True):
    """A volume, and the sandboxes that have it."""

    id: str
    name: str
    size_mb: int
    created_at: float
    used_by: list[str] = []


class SecretRef(Request, kw_only=True):
    """A secret of the caller's as an environment variable of every command."""

    name: Annotated[str, Meta(min_length=1, max_length=63)]
    key: Annotated[str, Meta(min_length=1, max_length=63)]
    env: Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]


class CreateSandbox(Request, kw_only=True):
    name: str | None = None
    runtime: Runtime = "auto"
    image: Annotated[str, Meta(min_length=1, max_length=512)] = "host"
    profile: str | None = None
    mode: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    limits: LimitsSpec = field(default_factory=LimitsSpec)
    hosts: list[str] | None = None  # replaces the list it would have
    more_hosts: list[str] = []  # is added to that list
    network: bool = True
    host_ports: Annotated[list[Port], Meta(max_length=64)] = []
    idle_timeout_s: Seconds | None = None
    lifetime_s: Seconds | None = None
    at_expiry: Literal["destroy", "pause", "stop"] = "destroy"  # what becomes of it when its lifetime is over
    workdir: str = "/workspace"
    labels: dict[str, str] = field(default_factory=dict)
    alias: str | None = None
    mounts: Annotated[list[Mount], Meta(max_length=64)] = []
    volumes: Annotated[list[VolumeMount], Meta(max_length=16)] = []
    read_only_root: bool = False
    persistent: bool = False
    keep: bool = False  # stopped when idle, its disk kept for a while, started again by the next use
    program: Annotated[str, Meta(max_length=4096)] | None = None
    security: dict[str, bool | str] = field(default_factory=dict)
    start: bool = True
    secrets: Annotated[list[SecretRef], Meta(max_length=32)] = []
    require_approval: Annotated[list[str], Meta(max_length=32)] = []
    # Chosen at random by the caller. A create that is repeated with it returns the sandbox of the first.
    request_id: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{16,64}$")] | None = None

    def __post_init__(self) -> None:
        if self.name is not None and (not NAME.match(self.name) or ".." in self.name):
            raise ValueError("name must be 1 to 63 letters, digits, `_`, `.` or `-`, starting with a letter or digit")
        if self.alias is not None and (not ALIAS.match(self.alias) or ".." in self.alias):
            raise ValueError("alias must be 1 to 200 letters, digits or `_.:@+-`, starting with a letter or digit")
        check_env(self.env)
        check_path("workdir", self.workdir)
        if not self.workdir.startswith("/"):
            raise ValueError("workdir must be an absolute path")
        if len({secret.env for secret in self.secrets}) < len(self.secrets):
            raise ValueError("two secrets have the same environment variable")
        targets = [*(one.target for one in self.mounts), *(one.target for one in self.volumes)]
        if self.volumes and len(set(targets)) < len(targets):
            raise ValueError("two mounts have the same place")
        if len(self.labels) > 64 or any(len(k) > 256 or len(v) > 4096 for k, v in self.labels.items()):
            raise ValueError("at most 64 labels, keys of 256 and values of 4096 characters")
        hosts = [*(self.hosts or ()), *self.more_hosts]
        if len(hosts) > 1000 or any(not 0 < len(host) <= 300 for host in hosts):
            raise ValueError("hosts must be at most 1000 names of at most 300 characters")


def check_no_request_id(spec: CreateSandbox) -> None:
    """ValueError for a request that does more than create: it cannot be repeated."""
    if spec.request_id is not None:
        raise ValueError("request_id belongs to a create and nothing else")


class Extend(Request, kw_only=True):
    """A new end: so many seconds from now; None takes the end away. With `idle_timeout_s` the idle limit changes too."""

    lifetime_s: Seconds | UnsetType | None = UNSET
    idle_timeout_s: Seconds | UnsetType | None = UNSET


class End(Answer, kw_only=True):
    kind: str
    detail: str
    by: str
    at: float


class HeldLimit(TypedDict):
    """A limit of a sandbox, and whether this machine holds it; None: not known yet."""

    value: float
    enforced: bool | None


class SandboxInfo(Answer, kw_only=True):
    id: str
    name: str | None
    owner: str
    state: str
    runtime: str
    image: str
    created_at: float
    expires_at: float | None
    idle_timeout_s: float | None
    last_active: float
    limits: dict[str, HeldLimit]
    policy: StoredPolicy
    hosts: list[str] | None
    env_keys: list[str]
    background_runs: int
    labels: dict[str, str]
    workdir: str
    pid: int | None
    end: End | None
    parent_id: str | None = None
    secret_env_vars: list[str] = []
    require_approval: list[str] = []
    unrecorded: list[str] | UnsetType = UNSET  # of an ending: where it could not be written down yet (`store`, `audit`)


Tenant = Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,62})?$")]


class ObtainSession(Request, kw_only=True):
    """The session of a tenant, found or made of `sandbox`. Without a tenant: the caller's own, which `before` names.

    `holder` tells the sessions of several machines of one tenant apart. `before` is the session the caller had. A new one is
    filled by `manifest` and `entries` before anybody gets it.
    """

    tenant: Tenant = ""
    holder: Annotated[str, Meta(max_length=64)] = ""
    before: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    sandbox: CreateSandbox = field(default_factory=CreateSandbox)
    manifest: str = ""
    entries: Entries = []

    def __post_init__(self) -> None:
        if ".." in self.tenant:
            raise ValueError("a tenant's name has no `..`")
        if self.manifest or self.entries:
            check_no_request_id(self.sandbox)


class Replaced(Answer, kw_only=True):
    """A session that is gone: why it ended, and what is lost with it."""

    id: str
    reason: str
    lost: str


class SessionInfo(Answer, kw_only=True):
    sandbox: SandboxInfo
    created: bool
    replaced: Replaced | None = None


class Metric(Answer, kw_only=True):
    """A sandbox's use of CPU and memory at one moment. `cpu_percent`: of one CPU, since the sample before."""

    at: float
    cpus: int
    cpu_percent: float
    memory_bytes: int
    memory_total_bytes: int
    disk_bytes: int
    disk_total_bytes: int


class PullImage(Request, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=512)]


class DetectImage(Request, kw_only=True):
    """A question: which image a command means in a directory with these files; the file's own `runtime` and the Procfile's text."""

    program: Annotated[str, Meta(max_length=4096)] = ""
    runtime: Annotated[str, Meta(max_length=64)] = ""
    names: Annotated[list[Annotated[str, Meta(max_length=255)]], Meta(max_length=10_000)] = []
    procfile: Annotated[str, Meta(max_length=65_536)] = ""


class BuildImage(Request, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=63)]
    debian: Annotated[list[str], Meta(min_length=1, max_length=1000)]


class BuildFile(Request, kw_only=True):
    """An image from a Dockerfile's text and the files that were uploaded as `context`."""

    context: Annotated[str, Meta(pattern=r"^[a-z0-9]{1,64}$")]
    dockerfile: Annotated[str, Meta(min_length=1, max_length=262_144)]
    name: Annotated[str, Meta(max_length=512)] = ""
    args: dict[str, str] = field(default_factory=dict)
    target: Annotated[str, Meta(max_length=128)] = ""
    no_cache: bool = False
    runtime: Runtime = "auto"

    def __post_init__(self) -> None:
        check_env(self.args)


TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")


class NewTemplate(Request, kw_only=True):
    """A template by name, new or known, and what its sandboxes have unless they ask for something else."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")]
    cpus: Annotated[float, Meta(ge=0.01, le=1024)] | None = None
    memory_mb: Annotated[int, Meta(ge=8, le=16 * MIB)] | None = None


class TemplateStep(Request, kw_only=True):
    """One step of a template: RUN, COPY, ENV, WORKDIR or USER with its arguments."""

    kind: Annotated[str, Meta(max_length=16)]
    args: Annotated[list[Annotated[str, Meta(max_length=65_536)]], Meta(max_length=512)] = []
    files_hash: Annotated[str, Meta(pattern=r"^([a-z0-9]{1,64})?$")] = ""


class BuildTemplate(Request, kw_only=True):
    """How a template is made: its base, its steps, the program that its sandboxes start and how that shows it is ready."""

    from_image: Annotated[str, Meta(max_length=512)] = ""
    from_template: Annotated[str, Meta(max_length=256)] = ""
    steps: Annotated[list[TemplateStep], Meta(max_length=256)] = []
    force: bool = False
    start: Annotated[str, Meta(max_length=65_536)] = ""
    ready: Annotated[str, Meta(max_length=65_536)] = ""
    tags: Annotated[list[Annotated[str, Meta(max_length=63)]], Meta(max_length=50)] = []


class OpenAgentkernel(Request, kw_only=True):
    """Serve agentkernel's HTTP interface for as long as this request stays open."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 18888
    key: str | None = None
    any_host: bool = False
    allow_host_access: bool = False
    legacy_exit_errors: bool = False
    runtime: Runtime = "auto"


class OpenE2b(Request, kw_only=True):
    """Serve E2B's interface for as long as this request stays open. `domain`: the name that answers give."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 3676
    domain: Annotated[str, Meta(pattern=r"^[A-Za-z0-9.:-]{1,253}$")] | None = None
    runtime: Runtime = "auto"
