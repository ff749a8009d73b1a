"""Requests of `SandboxClient` and their answers; shared by the blocking and the async client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.client.calls import new_command_id
from atoll.errors import InvalidArgument
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb

CREATE_SECONDS = 120.0
CREATE_ATTEMPTS = 4  # the first ones after a loss may still meet the broken connection
CALL_SECONDS = 300.0
CONFIRM_SECONDS = 330.0
SLACK_SECONDS = 15.0
LANGUAGES = {
    "python": "python", "python3": "python", "py": "python",
    "node": "node", "nodejs": "node", "js": "node", "javascript": "node",
    "ts": "typescript", "typescript": "typescript",
}  # fmt: skip


@dataclass(frozen=True)
class Replaced:
    """A default session that is gone: its id, why it ended, and what is lost with it."""

    session_id: str
    reason: str
    lost: str


@dataclass(frozen=True)
class ExecResult:
    """How a command ended. A nonzero exit and a timeout (status `timed_out`, exit code -1) are results, not errors."""

    stdout: str
    stderr: str
    exit_code: int
    status: str = "completed"
    duration_ms: int = 0
    truncated: bool = False
    session_id: str = ""
    run_id: str = ""
    raw_stdout: bytes = field(default=b"", repr=False)
    raw_stderr: bytes = field(default=b"", repr=False)
    session_replaced: Replaced | None = None  # the default session before this run was gone

    @property
    def ok(self) -> bool:
        return self.status == "completed" and self.exit_code == 0


@dataclass(frozen=True)
class FileEntry:
    """One file; its fields can be had by name or as of a dict."""

    path: str
    modified: int
    type: str = "file"
    size: int = 0

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)


@dataclass(frozen=True)
class Session:
    """A session as GetSession and ListSessions return it."""

    session_id: str
    phase: str
    runtime_class: str
    pod_ip: str
    tenant_id: str
    expires_at: int
    env_keys: tuple[str, ...]
    secret_env_vars: tuple[str, ...]
    background_runs: int
    allowed_hosts: tuple[str, ...]


@dataclass(frozen=True)
class Approval:
    approval_id: str
    approved: bool
    status: str = ""
    reason: str = ""


def seconds(timeout: float) -> int:
    """K8E counts whole seconds; less than one would mean the default."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 86400:
        raise InvalidArgument(f"timeout must be a number of seconds from 1 to 86400, not {timeout!r}")
    return max(1, int(timeout))


def run_request(session_id: str, code: str, language: str, timeout: float) -> Any:
    """Code goes to its interpreter byte for byte; nothing is quoted. An unknown language is the shell, as in K8E."""
    known = LANGUAGES.get(language.lower())
    if known is None:
        return command_request(session_id, code, timeout, language=language)
    return pb.ExecRequest(session_id=session_id, code=code, language=known, timeout=seconds(timeout))


def command_request(
    session_id: str,
    command: str,
    timeout: float,
    *,
    language: str = "",
    background: bool = False,
    workdir: str = "",
    user: str = "",
) -> Any:
    limit = 0 if background and not timeout else seconds(timeout)
    return pb.ExecRequest(
        session_id=session_id, command=command, timeout=limit, language=language, background=background,
        workdir=workdir, user=user,
    )  # fmt: skip


def create_request(
    runtime_class: str,
    allowed_hosts: Iterable[str] | None,
    tenant_id: str,
    session_id: str,
    env: Mapping[str, str] | None,
    options: Mapping[str, Any],
) -> Any:
    if isinstance(allowed_hosts, str):
        raise InvalidArgument("allowed_hosts is a list of names, not one string")
    try:
        return pb.CreateSessionRequest(
            runtime_class=runtime_class,
            allowed_hosts=list(allowed_hosts or ()),
            tenant_id=tenant_id,
            session_id=session_id,
            env=dict(env or {}),
            **{"request_id": new_command_id(), **options},
        )
    except (TypeError, ValueError) as bad:
        raise InvalidArgument(str(bad)) from None


def write_request(session_id: str, path: str, content: str | bytes, mode: str) -> Any:
    if isinstance(content, str):
        try:
            return pb.WriteFileRequest(session_id=session_id, path=path, content=content, mode=mode)
        except UnicodeEncodeError:
            raise InvalidArgument("the content is not valid Unicode; give it as bytes") from None
    return pb.WriteFileRequest(session_id=session_id, path=path, content_bytes=bytes(content), mode=mode)


def exec_result(answer: Any) -> ExecResult:
    return ExecResult(
        answer.stdout or answer.stdout_bytes.decode("utf-8", "replace"),
        answer.stderr or answer.stderr_bytes.decode("utf-8", "replace"),
        answer.exit_code,
        answer.status or "completed",
        answer.duration_ms,
        answer.truncated,
        getattr(answer, "session_id", ""),
        answer.run_id,
        answer.stdout_bytes or answer.stdout.encode(),
        answer.stderr_bytes or answer.stderr.encode(),
    )


def replaced(answer: Any) -> Replaced:
    return Replaced(answer.session_id, answer.reason, answer.lost)


def with_replaced(done: ExecResult, before: Replaced | None) -> ExecResult:
    """The result, with what became of the session before, if anything."""
    return done if before is None else replace(done, session_replaced=before)


def pip_result(answer: Any) -> ExecResult:
    return ExecResult(answer.output, "", answer.exit_code, raw_stdout=answer.output_bytes or answer.output.encode())


def files(answer: Any) -> list[FileEntry]:
    return [FileEntry(one.path, one.modified, one.type or "file", one.size) for one in answer.files]


def session(one: Any) -> Session:
    return Session(
        one.session_id, one.phase, one.runtime_class, one.pod_ip, one.tenant_id, one.expires_at, tuple(one.env_keys),
        tuple(one.secret_env_vars), one.background_runs, tuple(one.allowed_hosts),
    )  # fmt: skip


def approval(answer: Any) -> Approval:
    return Approval(answer.approval_id, answer.approved, answer.status, answer.reason)


def file_text(answer: Any) -> str:
    text: str = answer.content or answer.content_bytes.decode("utf-8", "replace")
    return text


def file_bytes(answer: Any) -> bytes:
    exact: bytes = answer.content_bytes or answer.content.encode()
    return exact


def strings(items: Iterable[str]) -> list[str]:
    """One string is one item, not its letters."""
    return [items] if isinstance(items, str) else list(items)
