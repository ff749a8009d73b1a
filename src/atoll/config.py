"""The operator's settings: defaults, and `$ATOLL_HOME/config.toml` over them. An unknown key is an error, never ignored."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from atoll import errors
from atoll.ownership import writable_by_others


class Limits(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Default limits of a sandbox."""

    cpus: Annotated[float, Meta(gt=0, le=1024)] = 1.0
    memory_mb: Annotated[int, Meta(ge=8)] = 512
    pids: Annotated[int, Meta(ge=8)] = 512
    files: Annotated[int, Meta(ge=32)] = 4096
    disk_mb: Annotated[int, Meta(ge=8)] = 4096
    shm_mb: Annotated[int, Meta(ge=0)] = 0  # of /dev/shm; 0: half of the memory


class Sandboxes(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Defaults and ceilings of sandboxes. A time of 0 means none."""

    runtime: str = "auto"
    image: str = "host"
    idle_timeout_s: Annotated[float, Meta(ge=0)] = 30 * 60.0
    lifetime_s: Annotated[float, Meta(ge=0)] = 12 * 3600.0
    keep_s: Annotated[float, Meta(ge=0)] = 7 * 86400.0  # how long the disk of an idle automatic session is kept
    keep_disk_mb: Annotated[int, Meta(ge=0)] = 20_480  # of all such disks of one owner; the oldest go first
    doze_after_s: Annotated[float, Meta(ge=0)] = 30.0  # gVisor sandboxes with nothing running sleep until used
    max_count: Annotated[int, Meta(ge=1)] = 1000
    background_runs: Annotated[int, Meta(ge=1, le=1000)] = 5
    hosts: list[str] | None = None
    env: dict[str, str] = field(default_factory=dict)


class Daemon(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The process itself."""

    idle_exit_s: Annotated[float, Meta(ge=0)] = 600.0
    log_level: str = "info"


class Kubernetes(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The cluster in which sandboxes are pods (docs/kubernetes.md)."""

    namespace: Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = "sandbox-matrix"
    kubeconfig: str = ""  # empty: $KUBECONFIG, ~/.kube/config, or the service account of the gateway's pod
    context: str = ""
    key_file: str = ""  # empty: kubernetes.key in the home
    lease_s: Annotated[float, Meta(ge=60)] = 3600.0  # a sandbox lives so long after the last gateway
    stopped_s: Annotated[float, Meta(ge=3600)] = 30 * 86400.0  # a stopped one so long
    start_s: Annotated[float, Meta(gt=0)] = 120.0  # a claim may take so long to become ready
    unreachable_s: Annotated[float, Meta(gt=0)] = 30.0  # an agent may be away so long
    canary_s: Annotated[float, Meta(ge=1)] = 60.0  # between two looks whether network policies are enforced
    runtimes: dict[str, str] = field(default_factory=dict)  # runtime: RuntimeClass


class Backend(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Where sandboxes live, and how they are started."""

    kind: Literal["local", "kubernetes"] = "local"
    container_engine: Literal["auto", "runc", "crun", "direct"] = "auto"  # direct: the launcher itself
    kubernetes: Kubernetes = field(default_factory=Kubernetes)


class Microvm(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Virtual machines. Without KVM the processor can be emulated (`tcg`), which is slow."""

    accel: Literal["kvm", "tcg"] = "kvm"


class Security(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Checks and demands on the machine itself."""

    version_floor: Literal["warn", "refuse"] = "warn"  # engines with known holes
    approve_keys_without_terminal: bool = False  # whether any program of this user may make a key that can approve


class Warm(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Interpreters that have started before they are needed. `preload` names modules they have imported already."""

    python: bool = True
    pool: bool = True  # also in sandboxes nobody has claimed yet
    node: bool = True  # in a claimed sandbox, from its first run of Node on
    node_pool: bool = False  # also in sandboxes nobody has claimed yet
    preload: list[Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$", max_length=100)]] = field(
        default_factory=list
    )


class Storage(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Where records are kept, and how the home's disk is given out."""

    database_file: str = ""  # holds the connection string of a PostgreSQL (docs/scale.md); empty: atoll.db in the home

    # Disks of keys, and sizes that were asked for, are promised in full. The default size of a local user's sandbox counts
    # with one part in this; 1 promises that in full too.
    overcommit: Annotated[float, Meta(ge=1, le=1000)] = 64.0
    volume_mb: Annotated[int, Meta(ge=16)] = 1024  # of a volume for which no size is asked
    audit_mb: Annotated[int, Meta(ge=16)] = 1024  # the audit log's oldest segments beyond this go, and a record says so


class SandboxCaps(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The most one sandbox may hold on the host. 0 means no cap. Its own memory and disk have their own limits (`limits`)."""

    memory_mb: Annotated[int, Meta(ge=0)] = 128  # of the daemon's memory, for answers and output under way
    threads: Annotated[int, Meta(ge=0)] = 2
    disk_mb: Annotated[int, Meta(ge=0)] = 0
    elements: Annotated[int, Meta(ge=0)] = 4096  # rule elements of the router
    connections: Annotated[int, Meta(ge=0)] = 4096
    output_mb: Annotated[int, Meta(ge=0)] = 64  # output of background commands that is kept
    audit_mb: Annotated[int, Meta(ge=0)] = 0


class OwnerCaps(SandboxCaps, frozen=True, kw_only=True):
    """The most one owner may hold, with all its sandboxes."""

    memory_mb: Annotated[int, Meta(ge=0)] = 512
    threads: Annotated[int, Meta(ge=0)] = 4
    elements: Annotated[int, Meta(ge=0)] = 131072
    connections: Annotated[int, Meta(ge=0)] = 0
    output_mb: Annotated[int, Meta(ge=0)] = 1024
    audit_mb: Annotated[int, Meta(ge=0)] = 512  # of a key, in one day


class StrangerCaps(SandboxCaps, frozen=True, kw_only=True):
    """The most one address may hold before its caller is known."""

    memory_mb: Annotated[int, Meta(ge=0)] = 8
    threads: Annotated[int, Meta(ge=0)] = 1
    elements: Annotated[int, Meta(ge=0)] = 1
    connections: Annotated[int, Meta(ge=0)] = 256
    output_mb: Annotated[int, Meta(ge=0)] = 1


class TotalCaps(SandboxCaps, frozen=True, kw_only=True):
    """The most all together may hold. The last eighth is kept for those that hold nothing yet."""

    memory_mb: Annotated[int, Meta(ge=0)] = 1024
    threads: Annotated[int, Meta(ge=0)] = 16
    elements: Annotated[int, Meta(ge=0)] = 917504
    connections: Annotated[int, Meta(ge=0)] = 0
    output_mb: Annotated[int, Meta(ge=0)] = 0


class Accounts(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Caps of what a sandbox, an owner, a stranger and all together hold on the host (`accounts.py`)."""

    sandbox: SandboxCaps = SandboxCaps()
    owner: OwnerCaps = OwnerCaps()
    stranger: StrangerCaps = StrangerCaps()
    total: TotalCaps = TotalCaps()

    def caps(self) -> dict[str, dict[str, int]]:
        """The same as `accounts.Accounts` takes them, in bytes."""
        found: dict[str, dict[str, int]] = {}
        for role in ("sandbox", "owner", "stranger", "total"):
            table: dict[str, int] = msgspec.to_builtins(getattr(self, role))
            found[role] = {
                name.removesuffix("_mb"): value << 20 if name.endswith("_mb") else value
                for name, value in table.items()
            }
        return found


class Egress(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Private networks that are open for named hosts, name servers to ask instead of the machine's, and `egress/limits.py`."""

    private: dict[str, list[str]] = field(default_factory=dict)
    servers: list[str] = field(default_factory=list)
    limits: dict[str, Annotated[int, Meta(ge=1)]] = field(default_factory=dict)


class Images(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Allowed images and their sources."""

    allow: list[str] | UnsetType = UNSET  # patterns; without this every image
    custom: dict[str, str] = field(default_factory=dict)  # names of the operator's own
    insecure_registries: list[str] = field(default_factory=list)
    ca_file: str = ""
    key_pull_mb: Annotated[int, Meta(ge=0)] = 8192  # of the images that one key may bring here
    prefer: Literal["host", "catalog"] = "host"
    build_hosts: list[str] | UnsetType = UNSET  # what the steps of a build may reach; without this package registries
    build_context_mb: Annotated[int, Meta(ge=1)] = 2048  # of a build's files, unpacked
    build_cache_mb: Annotated[int, Meta(ge=0)] = 10_240  # of one owner's layers; the least used go first
    build_memory_mb: Annotated[int, Meta(ge=64)] = 2048  # of the sandbox that a step runs in
    build_disk_mb: Annotated[int, Meta(ge=64)] = 8192  # that one step may write
    build_timeout_s: Annotated[float, Meta(gt=0)] = 3600.0  # of a whole build
    builds: Annotated[int, Meta(ge=1)] = 2  # of one owner at once


class Grpc(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """`listen` is what `atoll serve` opens on TCP."""

    listen: tuple[str, ...] = ("127.0.0.1:50051",)
    advertised: str = ""


class Gateway(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Addresses under which other machines reach this one."""

    grpc: Grpc = Grpc()
    expose_base_url: str = ""  # of exposed ports, where a proxy stands in front


class Pool(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """How many spares each kind of sandbox keeps, at least and at most."""

    floor: Annotated[int, Meta(ge=0, le=256)] = 2
    ceiling: Annotated[int, Meta(ge=0, le=256)] = 8


class Config(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """All of config.toml."""

    limits: Limits = Limits()
    sandboxes: Sandboxes = Sandboxes()
    daemon: Daemon = Daemon()
    security: Security = Security()
    backend: Backend = Backend()
    microvm: Microvm = Microvm()
    warm: Warm = Warm()
    accounts: Accounts = Accounts()
    storage: Storage = Storage()
    egress: Egress = Egress()
    images: Images = Images()
    gateway: Gateway = Gateway()
    pool: Pool = Pool()


def load(home: Path) -> Config:
    """The settings for this state directory. A file others may write is refused."""
    path = home / "config.toml"
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()) or writable_by_others(status):
                raise errors.PermissionDenied(
                    f"{path} can be written by others, so it is not trusted", hint=f"chmod go-w {path}"
                )
            text = file.read().decode()
    except FileNotFoundError:
        return Config()
    except UnicodeDecodeError:
        raise errors.InvalidArgument(f"{path} is not UTF-8") from None
    return parse(text, str(path))


def parse(text: str, where: str = "config.toml") -> Config:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise errors.InvalidArgument(f"{where}: {error}") from None
    _refuse_unknown(raw, Config, where, "")
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise errors.InvalidArgument(f"{where}: {error}") from None


def _refuse_unknown(raw: Mapping[str, object], kind: type[Struct], where: str, prefix: str) -> None:
    fields = {f.name: f.type for f in msgspec.structs.fields(kind)}
    for key, value in raw.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"; did you mean `{prefix}{near[0]}`?" if near else f"; known are {', '.join(sorted(fields))}"
            raise errors.InvalidArgument(f"{where}: unknown key `{prefix}{key}`{hint}")
        inner = fields[key]
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, Struct):
            _refuse_unknown(value, inner, where, f"{prefix}{key}.")


def show(config: Config) -> Mapping[str, object]:
    """Every setting with its present value, as JSON."""
    plain: Mapping[str, object] = msgspec.to_builtins(config)
    return plain
