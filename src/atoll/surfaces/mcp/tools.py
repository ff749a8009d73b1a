"""The table of tools: their arguments, their words and their annotations, for each toolset.

Two names are in both contracts. There one tool takes both forms, whatever toolset is shown; the schema shows the form of
the toolset, and both in `all`.
"""

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from atoll.backends import registry
from atoll.surfaces.mcp.hello import AGENTKERNEL, ALL, K8E

if TYPE_CHECKING:
    from atoll.surfaces.mcp.client import Call
    from atoll.surfaces.mcp.content import Result

Handler = Callable[["Call", Any], Awaitable["Result"]]
MAX_SECONDS = 86_400


Session = Annotated[
    str, Meta(min_length=1, max_length=256, description="Session id, as sandbox_create_session gave it")
]
Name = Annotated[str, Meta(min_length=1, max_length=63, description="The sandbox's name")]
Path = Annotated[str, Meta(min_length=1, max_length=4096, description="Absolute path inside the sandbox")]
Seconds = Annotated[int, Meta(ge=1, le=MAX_SECONDS, description="Seconds after which it is killed (default 30)")]
Millis = Annotated[int, Meta(ge=1, le=MAX_SECONDS * 1000, description="Milliseconds after which it is killed (30000)")]
Argv = Annotated[list[str], Meta(min_length=1, max_length=4096, description='Program and arguments, as ["ls", "-l"]')]
Workdir = Annotated[str, Meta(min_length=1, max_length=4096, description="Directory it starts in (/workspace)")]
Environment = Annotated[dict[str, str], Meta(description="Environment variables")]
Ports = Annotated[list[str], Meta(max_length=64, description="Not supported; must be empty")]
Image = Annotated[str, Meta(min_length=1, max_length=256, description="Image; by default what the command needs")]
Offset = Annotated[int, Meta(ge=0, le=2**53, description="Start at this byte")]
Limit = Annotated[int, Meta(ge=1, le=4 * 1024 * 1024, description="At most so many bytes")]


class Arguments(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all arguments. What is not known is refused: what is accepted is applied."""


class Nothing(Arguments, kw_only=True):
    pass


# K8E


class RunCode(Arguments, kw_only=True):
    code: Annotated[str, Meta(min_length=1, description="The code")]
    language: Annotated[str, Meta(max_length=32, description="python, bash (default), node or ts")] = "bash"
    timeout: Seconds = 30


class CreateSession(Arguments, kw_only=True):
    session_id: Annotated[str, Meta(max_length=200, description="An id of your own choosing")] = ""
    tenant_id: Annotated[str, Meta(max_length=63, description="Whose session it is")] = ""
    runtime_class: Annotated[str, Meta(max_length=32, description=registry.in_words())] = ""
    allowed_hosts: Annotated[
        list[str], Meta(max_length=1000, description="Names it may reach instead of the default")
    ] = []


class OneSession(Arguments, kw_only=True):
    session_id: Session


class ExecCommand(Arguments, kw_only=True):
    session_id: Session
    command: Annotated[str, Meta(min_length=1, description="A shell command")]
    timeout: Seconds = 30
    workdir: Workdir = "/workspace"


class WriteFile(Arguments, kw_only=True):
    session_id: Session
    path: Path
    content: Annotated[str, Meta(description="The text")]
    mode: Annotated[Literal["w", "a"], Meta(description="w replaces the file, a appends")] = "w"


class ReadFile(Arguments, kw_only=True):
    session_id: Session
    path: Path
    offset: Offset = 0
    limit: Limit | UnsetType = UNSET


class ListFiles(Arguments, kw_only=True):
    session_id: Session
    since: Annotated[int, Meta(ge=0, le=2**53, description="Only files changed since (unix seconds)")] = 0


class PipInstall(Arguments, kw_only=True):
    session_id: Session
    packages: Annotated[list[Annotated[str, Meta(min_length=1, max_length=512)]], Meta(min_length=1, max_length=100)]


class RunSubagent(Arguments, kw_only=True):
    parent_session_id: Session
    agent_type: Annotated[str, Meta(max_length=200, description="A label")] = ""
    workspace_path: Annotated[str, Meta(max_length=4096, description="Where it starts; /workspace is shared")] = ""


class ConfirmAction(Arguments, kw_only=True):
    session_id: Session
    action: Annotated[str, Meta(max_length=4096, description="First call: what a person should allow")] = ""
    approval_id: Annotated[str, Meta(max_length=200, description="Second call: wait for the decision on this")] = ""


# agentkernel

Profile = Annotated[Literal["permissive", "moderate", "restrictive"], Meta(description="Security profile (moderate)")]
Mode = Annotated[Literal["native", "claude", "codex", "gemini"], Meta(description="Whose hosts and files it gets")]
Network = Annotated[bool, Meta(description="false: no network at all")]


class RunCommand(Arguments, kw_only=True):
    command: Argv
    image: Image | UnsetType = UNSET
    fast: Annotated[bool, Meta(description="A hint without effect: every run is fast")] = True
    cwd: Workdir | UnsetType = UNSET
    env: Environment = {}
    timeout_ms: Millis = 30_000
    profile: Profile | UnsetType = UNSET
    network: Network | UnsetType = UNSET
    compatibility_mode: Mode | UnsetType = UNSET
    ports: Ports = []


class CreateNamed(Arguments, kw_only=True):
    name: Name
    image: Image | UnsetType = UNSET
    ports: Ports = []
    source_url: Annotated[str, Meta(max_length=2048, description="Not supported; must be empty")] = ""
    source_ref: Annotated[str, Meta(max_length=256, description="Not supported; must be empty")] = ""


class ExecNamed(Arguments, kw_only=True):
    name: Name
    command: Argv
    env: Annotated[dict[str, str] | list[str], Meta(description='{"K": "V"} or ["K=V"]')] = {}
    workdir: Workdir | UnsetType = UNSET
    cwd: Workdir | UnsetType = UNSET
    sudo: Annotated[bool, Meta(description="As root inside, which commands are anyway")] = False
    timeout_ms: Millis = 30_000


class OneName(Arguments, kw_only=True):
    name: Name


class WriteNamed(Arguments, kw_only=True):
    name: Name
    path: Path
    content: Annotated[str, Meta(description="The content")]
    encoding: Annotated[Literal["utf8", "base64"], Meta(description="How content is written (utf8)")] = "utf8"


class ReadNamed(Arguments, kw_only=True):
    name: Name
    path: Path
    offset: Offset = 0
    limit: Limit | UnsetType = UNSET


# atoll's own


class UseInterpreter(Arguments, kw_only=True):
    code: Annotated[str, Meta(min_length=1, description="The cell; the value of its last line is shown")]
    language: Annotated[
        Literal["python", "javascript", "typescript", "bash"],
        Meta(description="Each has variables of its own (python)"),
    ] = "python"
    session_id: Session | UnsetType = UNSET
    timeout: Annotated[int, Meta(ge=1, le=MAX_SECONDS, description="Seconds after which it is interrupted (300)")] = 300


class UseShell(Arguments, kw_only=True):
    command: Annotated[str, Meta(min_length=1, description="What to run in the shell")] | UnsetType = UNSET
    shell_id: (
        Annotated[
            str, Meta(min_length=1, max_length=64, description="The shell, as an earlier call gave it; else a new one")
        ]
        | UnsetType
    ) = UNSET
    session_id: Session | UnsetType = UNSET
    language: Annotated[Literal["bash", "python", "node"], Meta(description="Of a new shell (bash)")] = "bash"
    user: Annotated[str, Meta(max_length=256, description="Of a new shell: name or number (root)")] | UnsetType = UNSET
    action: Annotated[Literal["run", "interrupt", "close"], Meta(description="What to do (run)")] = "run"
    timeout: Seconds = 30


class UseTerminal(Arguments, kw_only=True):
    action: Annotated[
        Literal["open", "write", "read", "resize", "close", "list"],
        Meta(description="open starts a program on a new terminal, close ends it; every other one needs terminal_id"),
    ]
    terminal_id: Annotated[str, Meta(min_length=1, max_length=64, description="As open gave it")] | UnsetType = UNSET
    session_id: Session | UnsetType = UNSET
    command: (
        Annotated[str | list[str], Meta(description="open: a shell command, or program and arguments (a shell)")]
        | UnsetType
    ) = UNSET
    input: Annotated[
        str, Meta(max_length=65_536, description="write: what is typed; \\r is Enter, \\u0003 Ctrl-C, \\u0004 Ctrl-D")
    ] = ""
    wait: Annotated[float, Meta(ge=0, le=60, description="Seconds to wait for output, until it pauses (2)")] = 2.0
    offset: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=2**53,
                description="Output from this byte on: next_offset of an earlier answer. Without it read begins at the start, "
                "write and resize with what comes next",
            ),
        ]
        | UnsetType
    ) = UNSET
    rows: Annotated[int, Meta(ge=1, le=4096, description="open, resize: lines (24)")] = 24
    cols: Annotated[int, Meta(ge=1, le=4096, description="open, resize: columns (80)")] = 80
    echo: Annotated[bool, Meta(description="open: whether it shows what is typed (true)")] = True
    workdir: Workdir | UnsetType = UNSET
    env: Environment = {}
    user: Annotated[str, Meta(max_length=256, description="open: name or number (root)")] | UnsetType = UNSET


# Both forms of the names that are in both contracts


class RunBoth(RunCommand, kw_only=True):
    command: Argv | UnsetType = UNSET  # type: ignore[assignment]
    code: (
        Annotated[str, Meta(min_length=1, description="Code for the kept session, instead of command")] | UnsetType
    ) = UNSET
    language: Annotated[str, Meta(max_length=32, description="For code: python, bash (default), node or ts")] = "bash"
    timeout: Seconds | UnsetType = UNSET
    timeout_ms: Millis | UnsetType = UNSET  # type: ignore[assignment]


class ExecBoth(ExecNamed, kw_only=True):
    name: Name | UnsetType = UNSET  # type: ignore[assignment]
    session_id: Session | UnsetType = UNSET
    command: Annotated[str | list[str], Meta(description="A shell command, or program and arguments")]  # type: ignore[assignment]
    timeout: Seconds | UnsetType = UNSET
    timeout_ms: Millis | UnsetType = UNSET  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Tool:
    """`takes` is what arguments are read into; `shown` the struct whose schema a toolset shows."""

    name: str
    words: str
    takes: type[Arguments]
    shown: dict[str, type[Arguments]]
    annotations: Mapping[str, object]

    def describe(self, toolset: str) -> Mapping[str, object]:
        return {
            "name": self.name,
            "title": self.name.replace("_", " ").capitalize(),
            "description": self.words,
            "inputSchema": schema(self.shown.get(toolset, self.takes)),
            "annotations": self.annotations,
        }


def _tool(
    name: str, toolset: str, words: str, takes: type[Arguments], *, reads: bool = False, destroys: bool = False,
    repeatable: bool = False, world: bool = False,
) -> Tool:  # fmt: skip
    hints = {
        "readOnlyHint": reads,
        "destructiveHint": destroys,
        "idempotentHint": repeatable or reads,
        "openWorldHint": world,
    }
    return Tool(name, words, takes, {toolset: takes}, hints)


_RUN = Tool(
    "sandbox_run",
    "Run code or a command in a sandbox and get its output and exit code. Files and packages of `code` runs stay for the "
    "next one; each `command` run has a fresh sandbox.",
    RunBoth, {K8E: RunCode, AGENTKERNEL: RunCommand, ALL: RunBoth},
    {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": False, "openWorldHint": True},
)  # fmt: skip
_EXEC = Tool(
    "sandbox_exec", "Run a command in a sandbox that exists and wait for its end.",
    ExecBoth, {K8E: ExecCommand, AGENTKERNEL: ExecNamed, ALL: ExecBoth},
    {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": False, "openWorldHint": True},
)  # fmt: skip

_K8E = (
    _RUN,
    _tool("sandbox_status", K8E, "Whether the service answers, and the current session.", Nothing, reads=True),
    _tool("sandbox_create_session", K8E, "Make a session with settings of its own.", CreateSession),
    _tool("sandbox_destroy_session", K8E, "End a session and all that is in it.", OneSession, destroys=True, repeatable=True),
    _EXEC,
    _tool("sandbox_exec_stream", K8E, "Like sandbox_exec, as plain text; progress shows it live.", ExecCommand, world=True),
    _tool("sandbox_write_file", K8E, "Write a text file in a session.", WriteFile),
    _tool("sandbox_read_file", K8E, "Read a file of a session; images come as images.", ReadFile, reads=True),
    _tool("sandbox_list_files", K8E, "List the files below /workspace.", ListFiles, reads=True),
    _tool("sandbox_pip_install", K8E, "Install Python packages in a session.", PipInstall, world=True),
    _tool("sandbox_run_subagent", K8E, "A session that shares its parent's /workspace.", RunSubagent),
    _tool(
        "sandbox_confirm_action", K8E,
        "Ask a person to allow something. First with `action`, then with the `approval_id` to wait for the decision, "
        "which is made outside of these tools.", ConfirmAction,
    ),
)  # fmt: skip
_AGENTKERNEL = (
    _RUN,
    _tool("sandbox_create", AGENTKERNEL, "Make and start a named sandbox that stays.", CreateNamed),
    _EXEC,
    _tool("sandbox_list", AGENTKERNEL, "List the sandboxes.", Nothing, reads=True),
    _tool("sandbox_remove", AGENTKERNEL, "Remove a sandbox and all in it.", OneName, destroys=True, repeatable=True),
    _tool("sandbox_file_write", AGENTKERNEL, "Write a file in a sandbox.", WriteNamed, repeatable=True),
    _tool("sandbox_file_read", AGENTKERNEL, "Read a file of a sandbox; binary ones as base64.", ReadNamed, reads=True),
    _tool("sandbox_start", AGENTKERNEL, "Start a stopped sandbox.", OneName, repeatable=True),
    _tool("sandbox_stop", AGENTKERNEL, "End its processes and keep its files.", OneName, repeatable=True),
)
_OWN = (
    _tool(
        "sandbox_interpreter", ALL,
        "Run a cell of code in Jupyter: variables stay for the next call; charts and images come back as images. Numpy, pandas and "
        "matplotlib are there.", UseInterpreter, world=True,
    ),
    _tool(
        "sandbox_shell", ALL,
        "Run a command in a shell that stays: its directory, environment and variables are kept for the next call with its "
        "shell_id.", UseShell, world=True,
    ),
    _tool(
        "sandbox_terminal", ALL,
        "Use a program on a terminal: open it, type, read what it shows, close it. It runs on between calls, and can be read again by its "
        "terminal_id. For plain commands sandbox_exec and sandbox_shell are simpler.", UseTerminal, world=True,
    ),
)  # fmt: skip

TOOLSETS: dict[str, dict[str, Tool]] = {
    K8E: {tool.name: tool for tool in _K8E},
    AGENTKERNEL: {tool.name: tool for tool in _AGENTKERNEL},
    ALL: {tool.name: tool for tool in (*_K8E, *_AGENTKERNEL, *_OWN)},
}


@functools.cache
def schema(kind: type[Arguments]) -> Mapping[str, object]:
    """A plain object schema, without references."""
    (_,), parts = msgspec.json.schema_components([kind], ref_template="{name}")
    found = dict(parts[kind.__name__])
    found.pop("title", None)
    found.pop("description", None)
    return found


@functools.cache
def listed(toolset: str) -> tuple[Mapping[str, object], ...]:
    return tuple(tool.describe(toolset) for tool in TOOLSETS[toolset].values())
