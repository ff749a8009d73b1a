"""Request and answer of each function, field by field: the structs decode requests and make the registered schemas.

Unknown fields are ignored, as the contract wants. `decode` is the only way in: whatever is wrong becomes S001 and names
the field.
"""

import base64
import json
import re
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from atoll.surfaces.iii.failure import Failure

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Id = Annotated[int, Meta(ge=0, le=65534)]
Cpus = Annotated[int, Meta(ge=1, le=255)]
Memory = Annotated[int, Meta(ge=32, le=2**24)]
Label = Annotated[str, Meta(max_length=4096)]
Env = list[str] | dict[str, str]
T = TypeVar("T", bound=Struct)


class Ref(Struct):
    """One end of a stream on the engine's bus."""

    channel_id: str
    access_key: str
    direction: str


class Nothing(Struct):
    pass


class Create(Struct, kw_only=True):
    image: str
    cpus: Cpus | None = None
    memory_mb: Memory | None = None
    name: Label | None = None
    network: bool | None = None
    idle_timeout_secs: U64 | None = None
    env: Env = []


class Exec(Struct, kw_only=True):
    sandbox_id: str
    cmd: str = ""
    args: list[str] = []
    argv: list[str] = []
    stdin: str | None = None
    env: Env = []
    timeout_ms: U64 | None = None
    workdir: str | None = None


class RunFile(Struct, kw_only=True):
    path: str
    content: str | None = None
    content_b64: str | None = None


class Run(Struct, kw_only=True):
    image: str
    code: str
    lang: str
    files: list[RunFile] = []
    env: Env = []
    stdin: str | None = None
    timeout_ms: U64 | None = None
    keep_sandbox: bool = False
    network: bool | None = None
    cpus: Cpus | None = None
    memory_mb: Memory | None = None
    workdir: str | None = None
    args: list[str] = []
    idle_timeout_secs: U64 | None = None


class Stop(Struct, kw_only=True):
    sandbox_id: str
    wait: bool = False


class OfPath(Struct, kw_only=True):
    sandbox_id: str
    path: str


class Mkdir(OfPath, kw_only=True):
    mode: str = "0755"
    parents: bool = False


class Rm(OfPath, kw_only=True):
    recursive: bool = False


class Chmod(OfPath, kw_only=True):
    mode: str
    uid: Id | None = None
    gid: Id | None = None
    recursive: bool = False


class Mv(Struct, kw_only=True):
    sandbox_id: str
    src: str
    dst: str
    overwrite: bool = False


class Grep(OfPath, kw_only=True):
    pattern: str
    recursive: bool = True
    ignore_case: bool = False
    include_glob: list[str] = []
    exclude_glob: list[str] = []
    max_matches: U64 = 10_000
    max_line_bytes: U64 = 4096


class Sed(Struct, kw_only=True):
    sandbox_id: str
    pattern: str
    replacement: str
    files: list[str] = []
    path: str | None = None
    recursive: bool = True
    include_glob: list[str] = []
    exclude_glob: list[str] = []
    regex: bool = True
    first_only: bool = False
    ignore_case: bool = False


class Write(OfPath, kw_only=True):
    mode: str = "0644"
    parents: bool = False
    content: str | Ref | None = None
    content_b64: str | None = None


# Answers


class Created(Struct, kw_only=True):
    sandbox_id: str
    image: str
    isolation: str
    image_used: str
    expires_in_secs: int | None


class Executed(Struct, kw_only=True):
    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool
    duration_ms: int
    success: bool
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    background: bool = False
    stdout_b64: str | UnsetType = UNSET
    stderr_b64: str | UnsetType = UNSET
    sandbox_id: str | UnsetType = UNSET


class Stopped(Struct, kw_only=True):
    sandbox_id: str
    stopped: bool = True


class Listed(Struct, kw_only=True):
    sandbox_id: str
    name: str | None
    image: str
    age_secs: int
    exec_in_progress: bool
    exec_in_flight: int
    exec_slots_free: int
    stopped: bool
    status: str
    created_at: int
    last_exec_at: int | None
    cpus: float
    memory_mb: int
    network: bool
    idle_timeout_secs: int
    idle_secs: int
    isolation: str


class Sandboxes(Struct):
    sandboxes: list[Listed]


class CatalogEntry(Struct):
    name: str
    oci_ref: str
    kind: str
    isolation: str


class CatalogList(Struct):
    images: list[CatalogEntry]


class Entry(Struct, kw_only=True):
    name: str
    is_dir: bool
    size: int
    mode: str
    mtime: int
    is_symlink: bool
    uid: int = 0
    gid: int = 0
    link_target: str | None = None


class Entries(Struct):
    entries: list[Entry]
    truncated: bool = False


class MadeDirectory(Struct):
    created: bool


class Removed(Struct):
    removed: bool


class Updated(Struct):
    updated: int


class Moved(Struct):
    moved: bool


class Match(Struct):
    path: str
    line: int
    content: str
    line_no: int
    byte_offset: int


class Matches(Struct):
    matches: list[Match]
    truncated: bool


class Edited(Struct, kw_only=True):
    path: str
    replacements: int
    success: bool
    error: str | UnsetType = UNSET


class EditedFiles(Struct):
    results: list[Edited]
    total_replacements: int


class Written(Struct):
    bytes_written: int
    path: str


class ReadFile(Struct, kw_only=True):
    content: Ref | None
    size: int
    mode: str
    mtime: int
    body: str | UnsetType = UNSET
    content_b64: str | UnsetType = UNSET
    content_url: str | UnsetType = UNSET


# Decoding


def decode(kind: type[T], payload: Any, example: str) -> T:
    """A request from what a caller sent; S001 names what is wrong."""
    if payload is None:
        payload = {}
    if not isinstance(payload, dict):
        raise Failure("S001", f"the payload must be an object, not {type(payload).__name__}", note=example)
    if "timeoutMs" in payload and "timeout_ms" not in payload:
        payload = {**payload, "timeout_ms": payload["timeoutMs"]}
    fields = msgspec.structs.fields(kind)
    missing = [field.name for field in fields if field.required and field.name not in payload]
    if missing:
        raise Failure("S001", f"missing: {', '.join(missing)}", note=example)
    if "env" in payload and any(field.name == "env" for field in fields):
        environment(payload["env"])
    try:
        return msgspec.convert(payload, type=kind)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise Failure("S001", str(error)[:500], note=example) from None


NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
ENV_NOTE = 'env is {"NAME": "value"} or ["NAME=value"]'


def environment(env: Any) -> dict[str, str]:
    """Both forms as one; S001 names every bad key."""
    found: dict[str, str] = {}
    bad: list[str] = []
    if isinstance(env, dict):
        for key, value in env.items():
            if not NAME.match(str(key)) or not isinstance(value, str) or "\0" in value:
                bad.append(str(key))
            else:
                found[key] = value
    elif isinstance(env, list):
        for entry in env:
            key, equals, value = entry.partition("=") if isinstance(entry, str) else ("", "", "")
            if not equals or not NAME.match(key) or "\0" in value:
                bad.append(str(entry))
            else:
                found[key] = value
    else:
        raise Failure("S001", "env must be an object or an array", note=ENV_NOTE)
    if bad:
        shown = ", ".join(repr(key)[:80] for key in bad[:20])
        raise Failure("S001", f"env: not NAME=value: {shown}", note=ENV_NOTE)
    return found


FORMS = re.compile(r"(?:urn:uuid:)?([0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|[0-9a-f]{32})\Z", re.I)


def sandbox_id(text: str) -> str:
    """The id in its one spelling, or S001."""
    bare = text[1:-1] if text.startswith("{") and text.endswith("}") else text
    found = FORMS.match(bare)
    if found is None:
        raise Failure("S001", f"sandbox_id {text!r:.80} is not a UUID", note="sandbox::create answers with one")
    return str(uuid.UUID(found[1]))


def octal(text: str, default: str | None = None) -> int:
    """Return a mode; `default` is the one that a fix gives back."""
    if not re.fullmatch(r"0*[0-7]{1,4}", text):
        meant = re.fullmatch(r"\s*0?o?([0-7]{3,4})\s*", text, re.I)
        mode = meant[1].zfill(4) if meant else default
        raise Failure(
            "S210",
            f"mode {text!r:.40} is not octal text such as 0644",
            fix={"mode": mode} if mode else None,
            note='mode is octal text: "0644"',
        )
    return int(text, 8)


def base64_bytes(what: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise Failure("S001", f"{what} is not base64", note=f"{what} is standard base64 with padding") from None


def absolute(what: str, path: str) -> str:
    """Relative paths begin at the root."""
    if not path or "\0" in path:
        raise Failure("S001", f"{what} is empty or contains NUL", note=f'"{what}": "/tmp/file"')
    return path if path.startswith("/") else "/" + path


Schema = Mapping[str, object]


def schema(kind: Any) -> Schema:
    """A JSON Schema that stands by itself."""
    (made,), components = msgspec.json.schema_components((kind,), ref_template="#/$defs/{name}")
    whole = {**made, "$defs": components} if components else made
    if set(made) == {"$ref"}:
        name = made["$ref"].rpartition("/")[2]
        whole = {**components[name], "$defs": {key: value for key, value in components.items() if key != name}}
    plain: Schema = json.loads(json.dumps(whole))
    return plain
