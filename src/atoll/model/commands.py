"""Commands: what is to run, and what came of it."""

from typing import Annotated, Literal, NamedTuple, TypedDict

from msgspec import UNSET, Meta, UnsetType, field

from atoll.model.fields import (
    COMMAND_ID,
    MAX_ARGS,
    MAX_CODE,
    MAX_OUTPUT,
    MAX_STDIN,
    MIB,
    USER,
    Answer,
    Mode,
    Request,
    Rows,
    TimeoutMs,
    check_env,
    check_path,
    unbase64,
)
from atoll.model.sandboxes import CreateSandbox, check_no_request_id


class PtySize(Request, kw_only=True):
    """A terminal. Without `echo` what is typed is not written back, unless a program turns that on again."""

    rows: Rows = 24
    cols: Rows = 80
    echo: bool = True
    term: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.+-]{1,64}$")] | None = None


class Spec(Request, kw_only=True):
    """Fields that exec and run share."""

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
        if (given := len(self.stdin_bytes() or b"")) > MAX_STDIN:
            raise ValueError(f"stdin is {given} bytes, at most {MAX_STDIN} can be given at once: use stdin_stream")

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
    merge_stderr: bool = False

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
        if len(self.code.encode("utf-8", "surrogatepass")) > MAX_CODE:
            raise ValueError(f"the code is larger than {MAX_CODE} bytes")
        if any("\0" in arg for arg in self.args):
            raise ValueError("args must not contain NUL")
        self.check()


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
    command: ExecSpec
    files: Annotated[list[InitialFile], Meta(max_length=1000)] = []
    any_host: bool = False
    keep: bool = False

    def __post_init__(self) -> None:
        check_no_request_id(self.sandbox)


class Blocked(TypedDict):
    """An attempt that the network policy refused, or holds until somebody has approved it."""

    name: str
    address: str
    port: int
    protocol: str
    reason: str
    note: str


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
    error_code: str | None = None
    duration_ms: int
    cpu_ms: int
    max_rss_kb: int
    blocked: list[Blocked] = []


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


class Gap(Answer, kw_only=True):
    """Output of a stream that is no longer kept: so many bytes from this offset on."""

    stream: Literal["stdout", "stderr"]
    offset: int
    bytes: int


class CommandInfo(Answer, kw_only=True):
    """A command and the part of its output that is kept; `stdout_start` is the offset `stdout` begins at. `pty`: it has a terminal."""

    command_id: str
    sandbox_id: str
    status: Literal["running", "completed", "timed_out", "cancelled", "failed", "lost"]
    background: bool
    pty: bool = False
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
    error_code: str | None = None
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


class Pin(Request, kw_only=True):
    """`mode` wants warm sandboxes of a compatibility mode too, `count` at least so many of them."""

    mode: str | None = None
    count: Annotated[int, Meta(ge=0, le=1000)] = 0
