"""The store's rows, field by field. They are plain dicts; these types are for readers and the type checker."""

from collections.abc import Mapping
from typing import Literal, NotRequired, TypedDict

from atoll.backends.contract import Record
from atoll.model import Blocked, HeldLimit, StoredPolicy

Ended = Literal["completed", "timed_out", "cancelled", "failed"]
Status = Ended | Literal["running", "lost"]
Notes = Mapping[str, object]  # of a surface, which alone reads them


class KeptExposure(TypedDict):
    """A port that is exposed. `token` is the secret in its URL, `key` the id of the key it belongs to."""

    host: str
    token: str
    started_at: float
    key: NotRequired[str]


class SandboxRecord(TypedDict, total=False):
    """The part of a sandbox's row besides its columns. An ended one keeps limits and policy."""

    limits: dict[str, HeldLimit]
    policy: StoredPolicy
    uid: int
    gid: int
    image: str | None  # its digest
    box: Record
    link: Mapping[str, object]  # of a box of version 0.1, which kept it here
    exposed: dict[str, KeptExposure]  # by port
    notes: dict[str, Notes]  # by surface
    left_s: float | None  # of the lifetime, while it is stopped
    kept_bytes: int  # of its disk, while it is stopped


class SandboxChange(TypedDict, total=False):
    """Columns of a sandbox's row that change."""

    state: str
    runtime: str
    record: SandboxRecord
    expires_at: float | None
    idle_timeout: float | None
    last_active: float
    ended_at: float | None
    end_kind: str | None
    end_detail: str | None
    end_by: str | None


class StoredSecret(TypedDict):
    env: str


class StoredMount(TypedDict):
    target: str


class StoredVolume(StoredMount):
    name: str


class StoredSpec(TypedDict, total=False):
    """The fields of a `CreateSandbox` in JSON that are read without decoding all of it."""

    limits: dict[str, float | None]
    mounts: list[StoredMount]
    volumes: list[StoredVolume]
    keep: bool
    hosts: list[str] | None
    env: dict[str, str]
    labels: dict[str, str]
    workdir: str
    alias: str | None
    secrets: list[StoredSecret]
    require_approval: list[str]


class SandboxRow(TypedDict):
    """A row of `sandbox`."""

    id: str
    owner: str
    name: str | None
    state: str
    runtime: str
    image: str
    spec: StoredSpec
    record: SandboxRecord
    created_at: float
    expires_at: float | None
    idle_timeout: float | None
    last_active: float
    parent_id: str | None
    ended_at: float | None
    end_kind: str | None
    end_detail: str | None
    end_by: str | None
    request_id: str | None
    request_hash: str | None


class CommandSpec(TypedDict, total=False):
    """The fields of a command's request that matter after its start and after a restart of the daemon."""

    kept: int  # bytes of each stream
    stdin_stream: bool
    cleanup: str | None  # a path inside that goes with the command
    pty: bool
    opens: str  # it is the process of the shell of this name
    shell: str  # it runs in the shell of this name
    user: str | None
    spawned: bool  # its output is passed on and not kept


class Conclusion(TypedDict, total=False):
    """The end of a command."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    oom: bool
    error_code: str | None
    duration_ms: int
    cpu_ms: int
    max_rss_kb: int


class CommandEnd(Conclusion, total=False):
    """How a command ended, and what of its output there is."""

    status: Ended
    stdout_bytes: int
    stderr_bytes: int
    stdout_truncated: bool
    stderr_truncated: bool
    blocked: list[Blocked]


class NewCommand(TypedDict):
    """A command that is being started."""

    id: str
    argv: list[str]
    language: str | None
    background: bool
    body: str
    spec: CommandSpec
    started_at: float


class CommandFacts(TypedDict):
    """A command as callers see it."""

    id: str
    sandbox_id: str
    argv: list[str]
    language: str | None
    background: bool
    pid: int | None
    started_at: float
    ended_at: float | None
    status: Status
    exit: CommandEnd | None
    spec: CommandSpec


class CommandRow(CommandFacts):
    body: str


class EventRow(TypedDict):
    seq: int
    sandbox_id: str
    owner: str
    at: float
    kind: str
    data: Mapping[str, object]


class ApprovalRow(TypedDict):
    """`sessions` are the login sessions that ran something in the sandbox."""

    id: str
    sandbox_id: str
    owner: str
    kind: str
    action: str
    digest: str
    status: str
    requested_at: float
    expires_at: float
    sessions: list[int]
    decided_at: NotRequired[float | None]
    decided_by: NotRequired[str | None]
    reason: NotRequired[str | None]
