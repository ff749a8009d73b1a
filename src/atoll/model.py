"""The words of the REST surface: what is asked and what is answered, field by field, with every range checked here.

Requests refuse unknown fields. `decode` is the only way in: it turns whatever is wrong with a request into
InvalidArgument. Answers leave out nothing, so that clients can rely on each field.
"""

import base64
import re
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from atoll import errors

MINUTE, HOUR, DAY = 60, 3600, 86400
KIB, MIB = 1024, 1024 * 1024

MAX_TIMEOUT_MS = DAY * 1000
MAX_CODE = 32 * MIB
MAX_OUTPUT = 16 * MIB
MAX_ENV = 1024
MAX_ARGS = 64 * 1024
BACKGROUND_RUNS = 5

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@+-]{0,199}\Z")
COMMAND_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31})?\Z")
RUNTIMES = ("auto", "container", "gvisor", "microvm", "kata", "firecracker", "runc", "runsc")

Runtime = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Natural = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(gt=0, le=10 * 365 * DAY)]
Mode = Annotated[int, Meta(ge=0, le=0o7777)]
TimeoutMs = Annotated[int, Meta(ge=0, le=MAX_TIMEOUT_MS)]
Rows = Annotated[int, Meta(ge=1, le=4096)]
Port = Annotated[int, Meta(ge=1, le=65535)]

T = TypeVar("T")


class Request(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all that is asked."""


class Answer(Struct, kw_only=True):
    """Base of all that is answered."""


# Sandboxes


class LimitsSpec(Request, kw_only=True):
    """What one sandbox may use. None means the operator's default."""

    cpus: Annotated[float, Meta(ge=0.01, le=1024)] | None = None
    memory_mb: Annotated[int, Meta(ge=8, le=16 * MIB)] | None = None
    pids: Annotated[int, Meta(ge=8, le=4_000_000)] | None = None
    files: Annotated[int, Meta(ge=32, le=1_048_576)] | None = None
    disk_mb: Annotated[int, Meta(ge=8, le=64 * MIB)] | None = None


class Mount(Request, kw_only=True):
    """A directory of the host, seen inside at `target`."""

    source: str
    target: str
    read_only: bool = False

    def __post_init__(self) -> None:
        for path in (self.source, self.target):
            if not path.startswith("/") or "\0" in path or ".." in path.split("/") or len(path) > 4096:
                raise ValueError(f"a mount needs absolute paths without `..`, not {path!r:.200}")


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
    hosts: list[str] | None = None
    network: bool = True
    host_ports: Annotated[list[Port], Meta(max_length=64)] = []
    idle_timeout_s: Seconds | None = None
    lifetime_s: Seconds | None = None
    workdir: str = "/workspace"
    labels: dict[str, str] = field(default_factory=dict)
    alias: str | None = None
    mounts: Annotated[list[Mount], Meta(max_length=64)] = []
    read_only_root: bool = False
    persistent: bool = False
    program: Annotated[str, Meta(max_length=4096)] | None = None
    security: dict[str, bool | str] = field(default_factory=dict)
    start: bool = True
    secrets: Annotated[list[SecretRef], Meta(max_length=32)] = []
    require_approval: Annotated[list[str], Meta(max_length=32)] = []

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
        if len(self.labels) > 64 or any(len(k) > 256 or len(v) > 4096 for k, v in self.labels.items()):
            raise ValueError("at most 64 labels, keys of 256 and values of 4096 characters")
        if self.hosts is not None and (len(self.hosts) > 1000 or any(not 0 < len(h) <= 300 for h in self.hosts)):
            raise ValueError("hosts must be at most 1000 names of at most 300 characters")


class SubAgent(Request, kw_only=True):
    """A sandbox beside another one, on the same /workspace. What is left unsaid is the parent's; nothing may be wider."""

    name: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    limits: LimitsSpec = field(default_factory=LimitsSpec)
    hosts: list[str] | None = None
    network: bool = True
    labels: dict[str, str] = field(default_factory=dict)


class CreateFromManifest(Request, kw_only=True):
    """A sandbox filled by a manifest: YAML text, and entries in the same form, which come after it."""

    sandbox: CreateSandbox = field(default_factory=CreateSandbox)
    manifest: str = ""
    entries: Annotated[list[dict[str, Any]], Meta(max_length=1000)] = []


class InitialFile(Request, kw_only=True):
    """A file that is there before the command starts."""

    path: str
    content_b64: str
    mode: Mode = 0o644

    def __post_init__(self) -> None:
        check_path("path", self.path)
        if not self.path.startswith("/") or ".." in self.path.split("/"):
            raise ValueError(f"a file needs an absolute path without `..`, not {self.path!r:.200}")


class RunOnce(Request, kw_only=True):
    """A sandbox for one command. `any_host`: with nothing said about hosts it may reach every public one, else what
    package tools need. `keep` leaves it running."""

    sandbox: CreateSandbox = field(default_factory=CreateSandbox)
    command: "ExecSpec"
    files: Annotated[list[InitialFile], Meta(max_length=1000)] = []
    any_host: bool = False
    keep: bool = False


class PullImage(Request, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=512)]


class BuildImage(Request, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=63)]
    debian: Annotated[list[str], Meta(min_length=1, max_length=1000)]


class OpenAgentkernel(Request, kw_only=True):
    """Serve agentkernel's HTTP interface for as long as this request stays open."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 18888
    key: str | None = None
    any_host: bool = False
    allow_host_access: bool = False
    legacy_exit_errors: bool = False
    runtime: Runtime = "auto"


class Extend(Request, kw_only=True):
    """A new end: so many seconds from now; None takes the end away. With `idle_timeout_s` the idle limit changes too."""

    lifetime_s: Seconds | UnsetType | None = UNSET
    idle_timeout_s: Seconds | UnsetType | None = UNSET


class End(Answer, kw_only=True):
    kind: str
    detail: str
    by: str
    at: float


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
    limits: dict[str, dict[str, Any]]
    policy: dict[str, Any]
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


# Commands


class PtySize(Request, kw_only=True):
    rows: Rows = 24
    cols: Rows = 80
    term: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.+-]{1,64}$")] | None = None


class Spec(Request, kw_only=True):
    """What exec and run have in common."""

    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    stdin: str | None = None
    stdin_b64: str | None = None
    stdin_stream: bool = False
    timeout_ms: TimeoutMs | None = None
    background: bool = False
    output_limit: Annotated[int, Meta(ge=0, le=MAX_OUTPUT)] | None = None
    id: str | None = None

    def check(self) -> None:
        check_env(self.env)
        if self.cwd is not None:
            check_path("cwd", self.cwd)
        if self.id is not None and not COMMAND_ID.match(self.id):
            raise ValueError("id must be 1 to 64 letters, digits, `_` or `-`")
        if sum((self.stdin is not None, self.stdin_b64 is not None, self.stdin_stream)) > 1:
            raise ValueError("only one of stdin, stdin_b64 and stdin_stream")
        self.stdin_bytes()

    def stdin_bytes(self) -> bytes | None:
        if self.stdin is not None:
            return self.stdin.encode()
        if self.stdin_b64 is not None:
            return unbase64("stdin_b64", self.stdin_b64)
        return None

    @property
    def limit_ms(self) -> int:
        """Its time limit; 0 is none. Unsaid, it is 30 s, and none for what runs in the background."""
        if self.timeout_ms is not None:
            return self.timeout_ms
        return 0 if self.background else 30_000

    @property
    def kept(self) -> int:
        """Bytes of each stream that are kept for the result."""
        if self.output_limit is not None:
            return self.output_limit
        return 10 * MIB if self.background else MIB


class ExecSpec(Spec, kw_only=True):
    argv: Annotated[list[str], Meta(min_length=1, max_length=MAX_ARGS)] | None = None
    command: Annotated[str, Meta(min_length=1)] | None = None
    user: str | None = None
    umask: Annotated[int, Meta(ge=0, le=0o777)] | None = None
    pty: PtySize | None = None

    def __post_init__(self) -> None:
        if (self.argv is None) == (self.command is None):
            raise ValueError("exactly one of argv and command is needed")
        for part in self.argv or [self.command or ""]:
            if "\0" in part:
                raise ValueError("a command must not contain NUL")
        if self.argv is not None and not self.argv[0]:
            raise ValueError("the program's name is empty")
        if self.command is not None and not self.command.strip():
            raise ValueError("the command is empty")
        if self.user is not None and not USER.match(self.user):
            raise ValueError("user must be a name or number, optionally with `:group`")
        self.check()


class RunSpec(Spec, kw_only=True):
    code: str
    language: Annotated[str, Meta(max_length=32)] = "bash"
    args: Annotated[list[str], Meta(max_length=MAX_ARGS)] = []

    def __post_init__(self) -> None:
        if not self.code.strip():
            raise ValueError("the code is empty")
        if len(self.code) > MAX_CODE:
            raise ValueError(f"the code is larger than {MAX_CODE} characters")
        if any("\0" in arg for arg in self.args):
            raise ValueError("args must not contain NUL")
        self.check()


class ExecResult(Answer, kw_only=True):
    command_id: str
    sandbox_id: str
    status: Literal["completed", "timed_out", "cancelled", "failed"]
    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str
    stdout_b64: str | UnsetType = UNSET
    stderr_b64: str | UnsetType = UNSET
    stdout_bytes: int
    stderr_bytes: int
    truncated: bool
    stdout_truncated: bool
    stderr_truncated: bool
    timed_out: bool
    oom: bool
    duration_ms: int
    cpu_ms: int
    max_rss_kb: int
    blocked: list[dict[str, Any]] = []


class Started(Answer, kw_only=True):
    """The first word of a stream. `stdout_start`, `stderr_start`: the offsets it begins at."""

    command_id: str
    sandbox_id: str
    pid: int | None
    stdout_start: int = 0
    stderr_start: int = 0


class Chunk(NamedTuple):
    """A piece of output: channel 1 is stdout, 2 stderr."""

    channel: int
    data: bytes
    offset: int


class CommandInfo(Answer, kw_only=True):
    """A command and the part of its output that is kept; `stdout_start` is the offset `stdout` begins at."""

    command_id: str
    sandbox_id: str
    status: Literal["running", "completed", "timed_out", "cancelled", "failed", "lost"]
    background: bool
    language: str | None
    argv: list[str]
    pid: int | None
    started_at: float
    ended_at: float | None
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = ""
    stderr: str = ""
    stdout_b64: str | UnsetType = UNSET
    stderr_b64: str | UnsetType = UNSET
    stdout_start: int = 0
    stderr_start: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    truncated: bool = False
    timed_out: bool = False
    oom: bool = False
    duration_ms: int = 0
    cpu_ms: int = 0
    max_rss_kb: int = 0


class Signal(Request, kw_only=True):
    signal: Annotated[int, Meta(ge=0, le=64)]
    group: Literal["process", "session", "tree", "foreground"] = "tree"


class Resize(Request, kw_only=True):
    rows: Rows
    cols: Rows


class Stop(Request, kw_only=True):
    force: bool = False


# Secrets


class SetSecret(Request, kw_only=True):
    key: Annotated[str, Meta(min_length=1, max_length=63)]
    value: Annotated[str, Meta(max_length=65536)]


# Approvals


class AskApproval(Request, kw_only=True):
    action: Annotated[str, Meta(min_length=1, max_length=4096)]


class WaitApproval(Request, kw_only=True):
    """Without a timeout it waits until the approval expires."""

    timeout_s: Annotated[float, Meta(ge=0, le=3600)] | None = None


class DecideApproval(Request, kw_only=True):
    """`answer` is what a terminal showed; keys need none."""

    approved: bool
    reason: Annotated[str, Meta(max_length=4096)] = ""
    answer: Annotated[str, Meta(max_length=100)] | None = None


class ApprovalInfo(Answer, kw_only=True):
    """`status`: pending, approved, rejected, expired, withdrawn, or used when its approval was taken."""

    id: str
    sandbox_id: str
    owner: str
    kind: str
    action: str
    status: str
    requested_at: float
    expires_at: float
    decided_at: float | None
    decided_by: str | None
    reason: str | None


# Snapshots


class SaveSnapshot(Request, kw_only=True):
    """`full`: what was changed outside /workspace too. `force`: replace one of the same name."""

    name: Annotated[str, Meta(min_length=1, max_length=300)]
    full: bool = False
    force: bool = False


class RestoreSnapshot(Request, kw_only=True):
    """The sandbox to make. Image and limits left unsaid are the usual ones; a full snapshot brings its image's name."""

    sandbox: CreateSandbox = field(default_factory=CreateSandbox)


class SnapshotInfo(Answer, kw_only=True):
    """`stored_bytes` is what saving it newly took on disk. `skipped` names sockets, devices and what vanished meanwhile."""

    name: str
    created_at: float
    sandbox_id: str
    tenant: str
    image: str
    full: bool
    size_bytes: int
    file_count: int
    stored_bytes: int
    skipped: list[str]


class SnapshotFile(Answer, kw_only=True):
    path: str
    type: str
    mode: int
    uid: int
    gid: int
    mtime: float
    size: int
    target: str


class SnapshotDetails(SnapshotInfo, kw_only=True):
    """Also its files, at most 10,000, and how its content is shared with other snapshots."""

    files: list[SnapshotFile]
    chunks: int
    shared_chunks: int
    missing_chunks: int


# Files: the fields of the guest protocol, with `<name>_b64` beside each name that may be any bytes


class ListFiles(Request, kw_only=True):
    path: str = ""
    path_b64: str | None = None
    recursive: bool = False
    since: Annotated[float, Meta(ge=0, le=2**53)] | None = None
    depth: Natural | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    files_only: bool = False


class PathOnly(Request, kw_only=True):
    path: str = ""
    path_b64: str | None = None


class StatFile(PathOnly, kw_only=True):
    follow: bool = True


class MakeDirectory(PathOnly, kw_only=True):
    parents: bool = False
    mode: Mode | None = None
    exist_ok: bool = False


class RemoveFile(PathOnly, kw_only=True):
    recursive: bool = False
    missing_ok: bool = False


class TwoPaths(Request, kw_only=True):
    src: str = ""
    src_b64: str | None = None
    dst: str = ""
    dst_b64: str | None = None
    overwrite: bool = False


class MoveFile(TwoPaths, kw_only=True):
    pass


class CopyFile(TwoPaths, kw_only=True):
    recursive: bool = False


class ChangeMode(PathOnly, kw_only=True):
    mode: Mode | None = None
    uid: Annotated[int, Meta(ge=0, le=65534)] | None = None
    gid: Annotated[int, Meta(ge=0, le=65534)] | None = None
    recursive: bool = False
    follow: bool = True


class MakeLink(PathOnly, kw_only=True):
    target: str = ""
    target_b64: str | None = None


class Grep(PathOnly, kw_only=True):
    pattern: Annotated[str, Meta(min_length=1, max_length=64 * KIB)]
    recursive: bool = True
    ignore_case: bool = False
    include: list[str] = []
    exclude: list[str] = []
    max_matches: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    max_line_bytes: Annotated[int, Meta(ge=1, le=MIB)] | None = None


class Sed(Request, kw_only=True):
    pattern: Annotated[str, Meta(min_length=1, max_length=64 * KIB)]
    replacement: Annotated[str, Meta(max_length=MIB)]
    files: list[str] | None = None
    path: str | None = None
    path_b64: str | None = None
    recursive: bool = True
    include: list[str] = []
    exclude: list[str] = []
    regex: bool = True
    first_only: bool = False
    ignore_case: bool = False


# Network


class ChangeHosts(Request, kw_only=True):
    """`hosts` replaces the list ([] is no host); `add` and `remove` change it; none of them restores the default list."""

    hosts: Annotated[list[str], Meta(max_length=1024)] | None = None
    add: Annotated[list[str], Meta(max_length=1024)] = []
    remove: Annotated[list[str], Meta(max_length=1024)] = []

    def __post_init__(self) -> None:
        if self.hosts is not None and (self.add or self.remove):
            raise ValueError("either hosts, or add and remove")


class HostsInfo(Answer, kw_only=True):
    """`network` is `hosts` or `none`; `used` counts connections and bytes per host, `refused` what was not let out."""

    sandbox_id: str
    network: str
    hosts: list[str]
    default: bool
    host_ports: list[int]
    used: dict[str, dict[str, int]]
    refused: int
    open: int


class Expose(Request, kw_only=True):
    port: Port
    host: str = "127.0.0.1"


class Exposure(Answer, kw_only=True):
    """A port inside that answers at `url`; `site_url` is the same under a name of its own, for browsers."""

    sandbox_id: str
    port: int
    host: str
    url: str
    site_url: str
    started_at: float


# Checks


def check_env(env: dict[str, str]) -> None:
    if len(env) > MAX_ENV:
        raise ValueError(f"more than {MAX_ENV} environment variables")
    for key, value in env.items():
        if not key or "=" in key or "\0" in key or "\0" in value or len(key) > 256:
            raise ValueError(f"environment variable {key!r:.80} is not valid: no `=` in names, no NUL, no empty name")
    if sum(map(len, env.values())) > 512 * KIB:
        raise ValueError("the environment is larger than 512 KiB")


def check_path(what: str, path: str) -> None:
    if not path:
        raise ValueError(f"{what} is empty")
    if "\0" in path:
        raise ValueError(f"{what} contains NUL")
    if len(path.encode("utf-8", "surrogateescape")) > 4096:
        raise ValueError(f"{what} is longer than 4096 bytes")


def unbase64(what: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError(f"{what} is not base64") from None


def decode(kind: type[T], body: bytes | bytearray | memoryview) -> T:
    """A request from JSON, or InvalidArgument saying which field is wrong."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise errors.InvalidArgument(_reason(kind, str(error))) from None


def convert(kind: type[T], fields: dict[str, Any]) -> T:
    """A request from plain values (other surfaces, stored specs)."""
    try:
        return msgspec.convert(fields, type=kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise errors.InvalidArgument(_reason(kind, str(error))) from None


def _reason(kind: type[Any], text: str) -> str:
    """The decoder's words; for an unknown field with the nearest one there is."""
    found = re.search(r"unknown field `([^`]*)`", text)
    if found is None:
        return text[:500]
    import difflib

    near = difflib.get_close_matches(found[1], [f.name for f in msgspec.structs.fields(kind)], 1)
    return text[:300] + (f"; did you mean `{near[0]}`?" if near else "")


encode = msgspec.json.Encoder().encode


def shown(data: bytes) -> tuple[str, str | UnsetType]:
    """Bytes as text, and as base64 only when the text has lost something."""
    try:
        return data.decode(), UNSET
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace"), base64.b64encode(data).decode()
