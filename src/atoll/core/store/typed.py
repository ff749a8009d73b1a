"""What the store's rows hold, field by field. They are plain dicts; these types are for readers and the type checker."""

from typing import Any, Literal, NotRequired, TypedDict

Fields = dict[str, Any]  # a request or answer of the model, as JSON holds it


class HeldLimit(TypedDict):
    """A limit of a sandbox, and whether this machine holds it; None: not known yet."""

    value: Any
    enforced: bool | None


class KeptExposure(TypedDict):
    """A port that is exposed. `token` is the secret in its URL, `key` the id of the key it belongs to."""

    host: str
    token: str
    started_at: float
    key: NotRequired[str]


class SandboxRecord(TypedDict, total=False):
    """What a sandbox's row keeps besides its columns. Of one that has ended: limits and policy."""

    limits: dict[str, HeldLimit]
    policy: Fields
    uid: int
    gid: int
    image: str | None  # its digest
    box: Fields  # the backend's own record
    link: Fields  # of a box of version 0.1, which kept it here
    exposed: dict[str, KeptExposure]  # by port
    notes: dict[str, Fields]  # by surface
    left_s: float | None  # of the lifetime, while it is stopped
    kept_bytes: int  # of its disk, while it is stopped


class SandboxChange(TypedDict, total=False):
    """Columns of a sandbox's row that change."""

    state: str
    runtime: str
    record: SandboxRecord
    expires_at: float | None
    last_active: float
    ended_at: float | None
    end_kind: str | None
    end_detail: str | None
    end_by: str | None


class SandboxRow(TypedDict):
    """A row of `sandbox`."""

    id: str
    owner: str
    name: str | None
    state: str
    runtime: str
    image: str
    spec: Fields  # CreateSandbox
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


class NewCommand(TypedDict):
    """A command that is being started. `spec` is what matters of it after a restart of the daemon."""

    id: str
    argv: list[str]
    language: str | None
    background: bool
    body: str
    spec: Fields
    started_at: float


class CommandFacts(TypedDict):
    """What a caller is told of a command."""

    id: str
    sandbox_id: str
    argv: list[str]
    language: str | None
    background: bool
    pid: int | None
    started_at: float
    ended_at: float | None
    status: Literal["running", "completed", "timed_out", "cancelled", "failed", "lost"]
    exit: Fields | None
    spec: Fields


class CommandRow(CommandFacts):
    body: str


class EventRow(TypedDict):
    seq: int
    sandbox_id: str
    owner: str
    at: float
    kind: str
    data: Fields


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
