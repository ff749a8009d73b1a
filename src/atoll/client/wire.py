"""Requests and answers of the daemon, key by key: types for readers and the type checker, never imported at run time.

Answers are of a daemon that may be older or newer than this client, so that every key may be missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from ..model import Blocked, HeldLimit, StoredPolicy


class EndWire(TypedDict, total=False):
    """How a sandbox ended."""

    kind: str
    detail: str
    by: str
    at: float


class SandboxWire(TypedDict, total=False):
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
    end: EndWire | None
    parent_id: str | None
    secret_env_vars: list[str]
    require_approval: list[str]
    unrecorded: list[str]


class CommandWire(TypedDict, total=False):
    """The result of a command, or a command as the daemon knows it now."""

    command_id: str
    sandbox_id: str
    status: str
    background: bool
    pty: bool
    language: str | None
    argv: list[str]
    pid: int | None
    started_at: float
    ended_at: float | None
    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str
    stdout_b64: str
    stderr_b64: str
    stdout_start: int
    stderr_start: int
    stdout_bytes: int
    stderr_bytes: int
    truncated: bool
    stdout_truncated: bool
    stderr_truncated: bool
    timed_out: bool
    oom: bool
    error_code: str | None
    duration_ms: int
    cpu_ms: int
    max_rss_kb: int
    blocked: list[Blocked]


class ShellWire(TypedDict, total=False):
    shell_id: str
    language: str
    state: str
    command_id: str | None
    started_at: float


class FileWire(TypedDict, total=False):
    name: str
    path: str
    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None


class ProcessWire(TypedDict, total=False):
    pid: int
    ppid: int
    comm: str
    state: str
    cmdline: Any
    rss_kb: int
    uid: int


class MatchWire(TypedDict, total=False):
    path: str
    line: int
    content: str


class EditedWire(TypedDict, total=False):
    """The result for one file; `error` says why it was left as it was."""

    path: str
    replacements: int
    error: Any


class ExposedWire(TypedDict, total=False):
    sandbox_id: str
    port: int
    host: str
    url: str
    site_url: str
    started_at: float


class EventWire(TypedDict, total=False):
    """Something that happened to a sandbox; each kind has some of the keys from `name` on."""

    seq: int
    sandbox_id: str
    at: float
    kind: str
    name: str
    address: str
    port: int
    protocol: str
    reason: str
    note: str
    detail: str
    by: str
    command_id: str
    status: str
    exit_code: int | None
    duration_ms: int
    oom: bool
    limit_mb: int
    path: str
    runtime: str
    image: str
    hosts: Any
    refused: int
    approval_id: str


class TranscriptWire(TypedDict, total=False):
    sandbox_id: str
    output: str
    offset: int
    next_offset: int
    truncated_before: bool
    eof: bool


class SnapshotWire(TypedDict, total=False):
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


class CheckpointWire(TypedDict):
    name: str
    created_at: float
    sandbox_id: str
    runtime: str
    image: str
    size_bytes: int


class MountFields(TypedDict):
    source: str
    target: str
    read_only: bool


class SandboxFields(TypedDict, total=False):
    """The request for a new sandbox."""

    name: str | None
    runtime: str | None
    image: str
    program: str | None
    profile: str | None
    mode: str | None
    env: Mapping[str, str] | None
    limits: Mapping[str, float] | None
    hosts: Sequence[str] | None
    more_hosts: Sequence[str] | None
    network: bool
    host_ports: Sequence[int]
    idle_timeout_s: float | None
    lifetime_s: float | None
    workdir: str
    labels: Mapping[str, str] | None
    alias: str | None
    mounts: Sequence[MountFields] | None
    volumes: Sequence[Mapping[str, object]] | None
    read_only_root: bool
    persistent: bool
    keep: bool
    security: Mapping[str, bool | str] | None
    start: bool
    secrets: Sequence[Mapping[str, str]]
    require_approval: Sequence[str]
    request_id: str
