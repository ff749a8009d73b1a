"""The code interpreter: a cell that is to run, what it shows, and contexts."""

from typing import Annotated

from msgspec import UNSET, Meta, Raw, UnsetType, field

from atoll.model.fields import MAX_CODE, MIB, Answer, Request, TimeoutMs, check_env, check_path

Language = Annotated[str, Meta(min_length=1, max_length=32)]
ContextId = Annotated[str, Meta(pattern="^[0-9a-f]{1,64}$")]


class RunCell(Request, kw_only=True):
    """Code for a context: a named one, or the default one of a language (Python)."""

    code: str
    language: Language | None = None
    context: ContextId | None = None
    env: dict[str, str] = field(default_factory=dict)  # of this cell alone
    timeout_ms: TimeoutMs = 300_000
    output_limit: Annotated[int, Meta(ge=0, le=64 * MIB)] = 16 * MIB  # bytes of all that it shows

    def __post_init__(self) -> None:
        check_env(self.env)
        if self.language is not None and self.context is not None:
            raise ValueError("a context has a language already: give one of the two")
        if len(self.code.encode("utf-8", "surrogatepass")) > MAX_CODE:
            raise ValueError(f"the code is larger than {MAX_CODE} bytes")


class NewContext(Request, kw_only=True):
    """A context of its own: variables, and a directory it starts in."""

    language: Language = "python"
    cwd: str | None = None

    def __post_init__(self) -> None:
        if self.cwd is not None:
            check_path("cwd", self.cwd)


class ContextInfo(Answer, kw_only=True):
    """A context as the interpreter tells of it."""

    id: ContextId
    language: Language
    cwd: Annotated[str, Meta(max_length=8192)]


class CellError(Answer, kw_only=True):
    """How a cell failed."""

    name: str
    value: str
    traceback: str


class CellResult(Answer, kw_only=True, omit_defaults=True):
    """A value that a cell returned (`is_main_result`) or displayed, in every form it has. Images are base64.

    The forms are the sandbox's own JSON, passed on as it is.
    """

    is_main_result: bool = False
    text: Raw | UnsetType = UNSET
    html: Raw | UnsetType = UNSET
    markdown: Raw | UnsetType = UNSET
    svg: Raw | UnsetType = UNSET
    png: Raw | UnsetType = UNSET
    jpeg: Raw | UnsetType = UNSET
    pdf: Raw | UnsetType = UNSET
    latex: Raw | UnsetType = UNSET
    json: Raw | UnsetType = UNSET
    javascript: Raw | UnsetType = UNSET
    data: Raw | UnsetType = UNSET
    chart: Raw | UnsetType = UNSET
    extra: Raw | UnsetType = UNSET


class CellOutcome(Answer, kw_only=True):
    """What came of a cell. `truncated`: it showed more than `output_limit`, and the rest was dropped."""

    sandbox_id: str
    execution_count: int | None = None
    results: list[CellResult] = field(default_factory=list)
    stdout: str = ""
    stderr: str = ""
    error: CellError | None = None
    truncated: bool = False
    timed_out: bool = False
