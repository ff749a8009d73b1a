"""Shell sessions: a shell that stays, and the commands that run in it one after another."""

from typing import Annotated, Literal

from msgspec import Meta, field

from atoll.model.commands import ExecResult
from atoll.model.fields import (
    COMMAND_ID,
    MAX_CODE,
    MAX_OUTPUT,
    MAX_STDIN,
    USER,
    Answer,
    Request,
    TimeoutMs,
    check_env,
    check_path,
    unbase64,
)


class OpenShell(Request, kw_only=True):
    """A session: its language, and where and as whom it starts."""

    language: Annotated[str, Meta(max_length=32)] = "bash"
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        check_env(self.env)
        if self.cwd is not None:
            check_path("cwd", self.cwd)
        if self.user is not None and not USER.match(self.user):
            raise ValueError("user must be a name or number, optionally with `:group`")
        if self.id is not None and not COMMAND_ID.match(self.id):
            raise ValueError("id must be 1 to 64 letters, digits, `_` or `-`")


class ShellRun(Request, kw_only=True):
    """A command of a session."""

    command: Annotated[str, Meta(min_length=1)]
    stdin: str | None = None
    stdin_b64: str | None = None
    timeout_ms: TimeoutMs = 30_000
    output_limit: Annotated[int, Meta(ge=0, le=MAX_OUTPUT)] = 1024 * 1024
    background: bool = False
    id: str | None = None

    def __post_init__(self) -> None:
        if not self.command.strip():
            raise ValueError("the command is empty")
        if "\0" in self.command:
            raise ValueError("a command must not contain NUL")
        if len(self.command.encode("utf-8", "surrogatepass")) > MAX_CODE:
            raise ValueError(f"the command is larger than {MAX_CODE} bytes")
        if self.id is not None and not COMMAND_ID.match(self.id):
            raise ValueError("id must be 1 to 64 letters, digits, `_` or `-`")
        if self.stdin is not None and self.stdin_b64 is not None:
            raise ValueError("only one of stdin and stdin_b64")
        given = self.stdin.encode() if self.stdin is not None else unbase64("stdin_b64", self.stdin_b64 or "")
        if len(given) > MAX_STDIN:
            raise ValueError(f"stdin is {len(given)} bytes, at most {MAX_STDIN} can be given")


class ShellInfo(Answer, kw_only=True):
    """A session. `command_id` is the command that runs in it now."""

    shell_id: str
    sandbox_id: str
    language: str
    state: Literal["idle", "running", "ended"]
    started_at: float
    command_id: str | None = None
    exit_code: int | None = None


class ShellResult(ExecResult, kw_only=True):
    """How a command of a session ended. `shell_ended`: the session ended with it, as after `exit`."""

    shell_id: str
    shell_ended: bool
