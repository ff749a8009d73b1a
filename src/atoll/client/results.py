"""Results of calls: light value classes made from the daemon's JSON.

Unknown fields of a newer daemon are ignored, missing ones get a neutral value, so that client and daemon may differ by
a version. `wire` keeps the whole answer for whoever needs more.
"""

from __future__ import annotations

from .codec import unbase64

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Literal

    from ..model import Blocked, HeldLimit
    from .wire import CommandWire, EndWire, FileWire, MatchWire, ProcessWire, SandboxWire, ShellWire


class Value:
    """Base: shows itself with its fields, compares by them."""

    __slots__: tuple[str, ...] = ()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__ if name != "wire")
        return f"{type(self).__name__}({fields})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]


class Started(Value):
    """The first event of a stream: the command runs, and this is its id. Its stdout begins here at offset `stdout_start`."""

    __slots__ = ("command_id", "pid", "stdout_start")

    def __init__(self, command_id: str, pid: int | None, stdout_start: int = 0) -> None:
        self.command_id = command_id
        self.pid = pid
        self.stdout_start = stdout_start


class Output(Value):
    """A piece of output as it came: which stream, and the exact bytes."""

    __slots__ = ("data", "stream")

    def __init__(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        self.stream = stream
        self.data = data

    @property
    def text(self) -> str:
        """The bytes as text. A character cut between two pieces shows as a replacement; join `data` to avoid that."""
        return self.data.decode("utf-8", "replace")


class Event(Value):
    """Anything else a stream tells."""

    __slots__ = ("data",)

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data


class _Outcome(Value):
    __slots__ = ()
    wire: CommandWire
    stdout: str
    stderr: str

    @property
    def raw_stdout(self) -> bytes:
        """stdout byte for byte, also when it is not UTF-8."""
        return _exact(self.wire, "stdout")

    @property
    def raw_stderr(self) -> bytes:
        """stderr byte for byte, also when it is not UTF-8."""
        return _exact(self.wire, "stderr")


def _exact(wire: CommandWire, name: Literal["stdout", "stderr"]) -> bytes:
    encoded = wire.get("stdout_b64") if name == "stdout" else wire.get("stderr_b64")
    return unbase64(encoded) if encoded else str(wire.get(name) or "").encode("utf-8", "surrogateescape")


class ExecResult(_Outcome):
    """How a command ended. A nonzero exit, a timeout and an OOM kill are results, never exceptions."""

    __slots__ = (
        "blocked",
        "command_id",
        "cpu_ms",
        "duration_ms",
        "error_code",
        "exit_code",
        "max_rss_kb",
        "oom",
        "sandbox_id",
        "signal",
        "status",
        "stderr",
        "stderr_bytes",
        "stderr_truncated",
        "stdout",
        "stdout_bytes",
        "stdout_truncated",
        "timed_out",
        "truncated",
        "wire",
    )  # fmt: skip

    def __init__(self, wire: CommandWire) -> None:
        self.wire = wire
        self.command_id: str = wire.get("command_id") or ""
        self.sandbox_id: str = wire.get("sandbox_id") or ""
        self.status: str = wire.get("status") or ""
        self.exit_code: int | None = wire.get("exit_code")
        self.signal: int | None = wire.get("signal")
        self.stdout: str = wire.get("stdout") or ""
        self.stderr: str = wire.get("stderr") or ""
        self.stdout_bytes: int = wire.get("stdout_bytes") or 0
        self.stderr_bytes: int = wire.get("stderr_bytes") or 0
        self.truncated = bool(wire.get("truncated"))
        self.stdout_truncated = bool(wire.get("stdout_truncated"))
        self.stderr_truncated = bool(wire.get("stderr_truncated"))
        self.timed_out = bool(wire.get("timed_out")) or self.status == "timed_out"
        self.oom = bool(wire.get("oom"))
        self.error_code: str | None = wire.get("error_code")  # program_not_found, program_not_executable: nothing ran
        self.duration_ms: int = wire.get("duration_ms") or 0
        self.cpu_ms: int = wire.get("cpu_ms") or 0
        self.max_rss_kb: int = wire.get("max_rss_kb") or 0
        self.blocked: list[Blocked] = wire.get("blocked") or []

    @property
    def ok(self) -> bool:
        return self.status == "completed" and self.exit_code == 0


class CommandInfo(_Outcome):
    """A command as the daemon knows it now, with the output kept so far; `stdout` begins at offset `stdout_start`."""

    __slots__ = (
        "background",
        "command_id",
        "exit_code",
        "oom",
        "pid",
        "pty",
        "sandbox_id",
        "signal",
        "status",
        "stderr",
        "stderr_bytes",
        "stderr_start",
        "stdout",
        "stdout_bytes",
        "stdout_start",
        "timed_out",
        "truncated",
        "wire",
    )

    def __init__(self, wire: CommandWire) -> None:
        self.wire = wire
        self.command_id: str = wire.get("command_id") or ""
        self.sandbox_id: str = wire.get("sandbox_id") or ""
        self.status: str = wire.get("status") or ""
        self.background = bool(wire.get("background"))
        self.pty = bool(wire.get("pty"))
        self.pid: int | None = wire.get("pid")
        self.exit_code: int | None = wire.get("exit_code")
        self.signal: int | None = wire.get("signal")
        self.stdout: str = wire.get("stdout") or ""
        self.stderr: str = wire.get("stderr") or ""
        self.stdout_start: int = wire.get("stdout_start") or 0
        self.stderr_start: int = wire.get("stderr_start") or 0
        self.stdout_bytes: int = wire.get("stdout_bytes") or 0
        self.stderr_bytes: int = wire.get("stderr_bytes") or 0
        self.truncated = bool(wire.get("truncated"))
        self.timed_out = bool(wire.get("timed_out")) or self.status == "timed_out"
        self.oom = bool(wire.get("oom"))

    @property
    def running(self) -> bool:
        return self.status in ("started", "running")


class ShellInfo(Value):
    """A shell session as the daemon knows it: `state` is idle, running or ended."""

    __slots__ = ("command_id", "language", "shell_id", "started_at", "state", "wire")

    def __init__(self, wire: ShellWire) -> None:
        self.wire = wire
        self.shell_id: str = wire.get("shell_id") or ""
        self.language: str = wire.get("language") or ""
        self.state: str = wire.get("state") or ""
        self.command_id: str | None = wire.get("command_id")
        self.started_at: float = wire.get("started_at") or 0


class CodeContext(Value):
    """A context of the code interpreter: its variables stay from cell to cell."""

    __slots__ = ("cwd", "id", "language", "wire")

    def __init__(self, wire: Mapping[str, Any]) -> None:
        self.wire = wire
        self.id: str = wire.get("id") or ""
        self.language: str = wire.get("language") or ""
        self.cwd: str = wire.get("cwd") or ""


class CellResult(Value):
    """A value that a cell returned or displayed, in every form it has; None where it has none. Images are base64."""

    __slots__ = (
        "chart", "data", "extra", "html", "is_main_result", "javascript", "jpeg", "json", "latex", "markdown", "pdf",
        "png", "svg", "text", "wire",
    )  # fmt: skip

    def __init__(self, wire: Mapping[str, Any]) -> None:
        self.wire = wire
        self.is_main_result = bool(wire.get("is_main_result"))
        self.text: str | None = wire.get("text")
        self.html: str | None = wire.get("html")
        self.markdown: str | None = wire.get("markdown")
        self.svg: str | None = wire.get("svg")
        self.png: str | None = wire.get("png")
        self.jpeg: str | None = wire.get("jpeg")
        self.pdf: str | None = wire.get("pdf")
        self.latex: str | None = wire.get("latex")
        self.javascript: str | None = wire.get("javascript")
        self.json: Any = wire.get("json")
        self.data: Any = wire.get("data")  # the columns of a data frame
        self.chart: Any = wire.get("chart")  # what a figure shows, as numbers and words
        self.extra: Mapping[str, Any] = wire.get("extra") or {}  # other types, by name

    @property
    def formats(self) -> list[str]:
        """The names of the forms it has."""
        return [name for name in self.__slots__ if name not in ("is_main_result", "wire") and getattr(self, name)]


class CellError(Value):
    """How a cell failed."""

    __slots__ = ("name", "traceback", "value", "wire")

    def __init__(self, wire: Mapping[str, Any]) -> None:
        self.wire = wire
        self.name: str = wire.get("name") or ""
        self.value: str = wire.get("value") or ""
        self.traceback: str = wire.get("traceback") or ""


class CellOutcome(Value):
    """What came of a cell. `truncated`: it showed more than the limit, and the rest was dropped."""

    __slots__ = ("error", "execution_count", "results", "stderr", "stdout", "timed_out", "truncated", "wire")

    def __init__(self, wire: Mapping[str, Any]) -> None:
        self.wire = wire
        self.execution_count: int | None = wire.get("execution_count")
        self.results = [CellResult(one) for one in wire.get("results") or ()]
        self.stdout: str = wire.get("stdout") or ""
        self.stderr: str = wire.get("stderr") or ""
        self.error = CellError(wire["error"]) if wire.get("error") else None
        self.truncated = bool(wire.get("truncated"))
        self.timed_out = bool(wire.get("timed_out"))

    @property
    def text(self) -> str | None:
        """The cell's value as text; None when it has none."""
        return next((one.text for one in self.results if one.is_main_result), None)


class SandboxInfo(Value):
    """A sandbox as the daemon knows it."""

    __slots__ = (
        "background_runs",
        "created_at",
        "end",
        "expires_at",
        "hosts",
        "id",
        "idle_timeout_s",
        "image",
        "labels",
        "limits",
        "name",
        "runtime",
        "state",
        "wire",
        "workdir",
    )  # fmt: skip

    def __init__(self, wire: SandboxWire) -> None:
        self.wire = wire
        self.id: str = wire.get("id") or ""
        self.name: str | None = wire.get("name")
        self.state: str = wire.get("state") or ""
        self.runtime: str = wire.get("runtime") or ""
        self.image: str = wire.get("image") or ""
        self.created_at: float = wire.get("created_at") or 0
        self.expires_at: float | None = wire.get("expires_at")
        self.idle_timeout_s: float | None = wire.get("idle_timeout_s")
        self.limits: dict[str, HeldLimit] = wire.get("limits") or {}
        self.hosts: list[str] | None = wire.get("hosts")
        self.labels: dict[str, str] = wire.get("labels") or {}
        self.workdir: str = wire.get("workdir") or ""
        self.background_runs: int = wire.get("background_runs") or 0
        self.end: EndWire | None = wire.get("end")


class FileInfo(Value):
    """One file inside a sandbox: what stat and list return."""

    __slots__ = ("gid", "mode", "mtime", "name", "path", "size", "target", "type", "uid", "wire")

    def __init__(self, wire: FileWire) -> None:
        self.wire = wire
        self.name: str = wire.get("name") or str(wire.get("path") or "").rsplit("/", 1)[-1]
        self.path: str = wire.get("path") or self.name
        self.type: str = wire.get("type") or ""
        self.size: int = wire.get("size") or 0
        self.mode: int = wire.get("mode") or 0
        self.uid: int = wire.get("uid") or 0
        self.gid: int = wire.get("gid") or 0
        self.mtime: float = wire.get("mtime") or 0.0
        self.target: str | None = wire.get("target")


class ProcessInfo(Value):
    """One process inside a sandbox."""

    __slots__ = ("cmdline", "comm", "pid", "ppid", "rss_kb", "state", "uid", "wire")

    def __init__(self, wire: ProcessWire) -> None:
        self.wire = wire
        self.pid: int = wire.get("pid") or 0
        self.ppid: int = wire.get("ppid") or 0
        self.comm: str = wire.get("comm") or ""
        self.state: str = wire.get("state") or ""
        self.cmdline: Any = wire.get("cmdline") or ""
        self.rss_kb: int = wire.get("rss_kb") or 0
        self.uid: int = wire.get("uid") or 0


class Match(Value):
    """One line that grep found."""

    __slots__ = ("content", "line", "path", "wire")

    def __init__(self, wire: MatchWire) -> None:
        self.wire = wire
        self.path: str = wire.get("path") or ""
        self.line: int = wire.get("line") or 0
        self.content: str = wire.get("content") or ""


class Change(Value):
    """One change a watch saw; kind is create, write, remove, rename, chmod, or overflow when some were lost."""

    __slots__ = ("kind", "path", "to")

    def __init__(self, kind: str, path: str, to: str | None = None) -> None:
        self.kind = kind
        self.path = path
        self.to = to


def changes(event: Mapping[str, Any]) -> list[Change]:
    """The changes one event of a watch carries."""
    found = [Change("overflow", "")] if event.get("overflow") else []
    for item in event.get("changes") or []:
        found.append(Change(str(item.get("kind") or ""), str(item.get("path") or ""), item.get("to")))
    return found
