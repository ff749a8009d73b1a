"""Requests and answers around a user's work: sub-agents, manifests, secrets, approvals, snapshots."""

from typing import Annotated, TypedDict, final

from msgspec import Meta, field

from atoll.model.fields import Answer, Entries, Request, Seconds
from atoll.model.sandboxes import CreateSandbox, LimitsSpec, check_no_request_id


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
    entries: Entries = []

    def __post_init__(self) -> None:
        check_no_request_id(self.sandbox)


@final
class EntryBegun(TypedDict):
    """The progress of a manifest."""

    entry: int
    of: int
    does: str


class SetSecret(Request, kw_only=True):
    key: Annotated[str, Meta(min_length=1, max_length=63)]
    value: Annotated[str, Meta(max_length=65536)]


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


class SaveSnapshot(Request, kw_only=True):
    """`full`: what was changed outside /workspace too. `force`: replace one of the same name."""

    name: Annotated[str, Meta(min_length=1, max_length=300)]
    full: bool = False
    force: bool = False


class RestoreSnapshot(Request, kw_only=True):
    """The sandbox to make. Image and limits left unsaid are the usual ones; a full snapshot brings its image's name."""

    sandbox: CreateSandbox = field(default_factory=CreateSandbox)

    def __post_init__(self) -> None:
        check_no_request_id(self.sandbox)


class SaveCheckpoint(Request, kw_only=True):
    """Without a name one is chosen. `force`: replace one of the same name."""

    name: Annotated[str, Meta(min_length=1, max_length=63)] | None = None
    force: bool = False


class RestoreCheckpoint(Request, kw_only=True):
    """What of the new sandbox is other than in the first; `network=False` takes its network away."""

    name: str | None = None
    lifetime_s: Seconds | None = None
    idle_timeout_s: Seconds | None = None
    network: bool = True

    def __post_init__(self) -> None:
        CreateSandbox(name=self.name)


class Fork(Request, kw_only=True):
    """How many sandboxes are to go on from this moment."""

    count: Annotated[int, Meta(ge=1, le=32)] = 1


class CheckpointInfo(Answer, kw_only=True):
    """`sandbox_id` is the sandbox that was saved, `size_bytes` what the checkpoint takes on disk."""

    name: str
    created_at: float
    sandbox_id: str
    runtime: str
    image: str
    size_bytes: int


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
