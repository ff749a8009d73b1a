"""Every call of the REST surface as a value: which bytes to send and what a lost answer means.

Drivers send a `Call` and know nothing of sandboxes; `Sandbox`, `AsyncSandbox` and the CLI make them and know nothing of
sockets. `repeatable` calls may be sent again when the connection breaks before an answer; all others become
OutcomeUnknown, with the command's id where there is one: the id is chosen here, so that it is known even then.
"""

from __future__ import annotations

import os

from ..errors import InvalidArgument, TooLarge
from .codec import dumps, to_base64
from .http import FRAMES, quote, with_query

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypeAlias

    from .wire import SandboxFields

    Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

DEFAULT_TIMEOUT = 30.0
MAX_STDIN = 32 * 1024 * 1024  # bytes, as in the model
PLAIN_STDIN = 1024 * 1024  # longer text goes as base64: its length in JSON depends on what it is
ANSWER_TIMEOUT = 300.0  # for calls that carry no time limit of their own
GRACE = 15.0  # beyond a command's own timeout, before the answer counts as lost
KERNEL = 180.0  # seconds in which an interpreter has to start
APPROVAL = (
    300.0  # a command may wait so long for a person before it starts; a daemon that is gone is noticed at once anyway
)

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


class Call:
    """One request, ready to send."""

    __slots__ = ("body", "command_id", "headers", "method", "repeatable", "target", "timeout")

    def __init__(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        *,
        repeatable: bool = False,
        command_id: str | None = None,
        timeout: float | None = ANSWER_TIMEOUT,
    ) -> None:
        self.method = method
        self.target = target
        self.body = body
        self.headers = headers
        self.repeatable = repeatable
        self.command_id = command_id
        self.timeout = timeout


_JSON = (("Content-Type", "application/json"),)
_BYTES = (("Content-Type", "application/octet-stream"),)


def get(target: str, query: Mapping[str, object] | None = None, timeout: float | None = ANSWER_TIMEOUT) -> Call:
    return Call("GET", with_query(target, query or {}), repeatable=True, timeout=timeout)


def post(target: str, fields: Mapping[str, Any], *, repeatable: bool = False) -> Call:
    return Call("POST", target, _encode(fields), _JSON, repeatable=repeatable)


def _encode(fields: Mapping[str, Any]) -> bytes:
    try:
        return dumps({key: value for key, value in fields.items() if value is not None}).encode("ascii")
    except (TypeError, ValueError) as bad:
        raise InvalidArgument(str(bad)) from None


def sandbox_path(ref: str, *rest: str) -> str:
    if not isinstance(ref, str) or not ref or ref in (".", "..") or "\0" in ref:
        raise InvalidArgument("a sandbox id or name is needed")
    try:
        ref.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidArgument("a sandbox's name is valid UTF-8") from None
    return "/v1/sandboxes/" + quote(ref).replace("/", "%2F") + "".join(f"/{part}" for part in rest)


def new_command_id() -> str:
    """`c` and 19 of 32 letters: 95 random bits."""
    return "c" + "".join([_ALPHABET[byte & 31] for byte in os.urandom(19)])


_LIMITS = ("cpus", "memory_mb", "pids", "files", "disk_mb", "shm_mb")
_RENAMED = {"idle_timeout": "idle_timeout_s", "lifetime": "lifetime_s"}


def create(options: Mapping[str, Any]) -> Call:
    """`options` are those of `CreateOptions`; limits stand beside the others there and are grouped on the wire.

    The request id is chosen here. It makes the call repeatable: the daemon answers with the sandbox it made before.
    """
    fields = {**create_fields(options), "request_id": new_command_id()}
    return Call("POST", "/v1/sandboxes", _encode(fields), _JSON, repeatable=True)


def obtain_session(
    options: Mapping[str, Any],
    tenant: str,
    holder: str = "",
    before: str | None = None,
    filling: Mapping[str, Any] | None = None,
) -> Call:
    """The tenant's own session, found or made of `options` and filled. Asked twice, the daemon answers with the same one."""
    sandbox = create_fields(options)
    if not filling:
        sandbox["request_id"] = new_command_id()
    fields = {"tenant": tenant, "holder": holder, "sandbox": sandbox, **(filling or {})}
    if before:
        fields["before"] = before
    return Call("POST", "/v1/sessions", _encode(fields), _JSON, repeatable=True)


def find_session(tenant: str, holder: str = "") -> Call:
    return get("/v1/sessions", {"tenant": tenant, "holder": holder})


def create_fields(options: Mapping[str, Any]) -> SandboxFields:
    fields = {_RENAMED.get(key, key): value for key, value in options.items() if key not in _LIMITS}
    fields["runtime"] = fields.get("runtime") or os.environ.get("ATOLL_RUNTIME") or None
    limits = {key: options[key] for key in _LIMITS if options.get(key) is not None}
    if limits:
        fields["limits"] = limits
    return {key: value for key, value in fields.items() if value is not None}  # type: ignore[return-value]


def list_sandboxes(state: str = "active", name: str | None = None) -> Call:
    return get("/v1/sandboxes", {"state": state, "name": name})


def info(ref: str) -> Call:
    return get(sandbox_path(ref))


def destroy(ref: str) -> Call:
    return Call("DELETE", sandbox_path(ref), repeatable=True)


def lifecycle(ref: str, verb: str, fields: Mapping[str, Any] | None = None) -> Call:
    return post(sandbox_path(ref, verb), fields or {})


# Commands


def milliseconds(timeout: float | None) -> int:
    """A timeout in seconds as the wire wants it; None is no limit."""
    if timeout is None:
        return 0
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 10**9:
        raise InvalidArgument(f"timeout must be a positive number of seconds, not {timeout!r}")
    return max(1, int(timeout * 1000))


def _stdin(fields: dict[str, object], stdin: str | bytes | None) -> None:
    if stdin is None:
        return
    if isinstance(stdin, str) and len(stdin) <= PLAIN_STDIN:
        fields["stdin"] = stdin
        return
    data = stdin.encode() if isinstance(stdin, str) else stdin
    if len(data) > MAX_STDIN:
        raise TooLarge(
            f"stdin is {len(data)} bytes, at most {MAX_STDIN} can be given at once",
            hint="start the command with stdin_stream=True and feed it with Command.stdin",
        )
    fields["stdin_b64"] = to_base64(data)


def start(
    ref: str,
    command: str | Sequence[str],
    *,
    language: str | None = None,
    args: Sequence[str] = (),
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    umask: int | None = None,
    merge_stderr: bool = False,
    stdin: str | bytes | None = None,
    stdin_stream: bool = False,
    timeout: float | None = DEFAULT_TIMEOUT,
    output_limit: int | None = None,
    pty: tuple[int, int] | None = None,
    echo: bool = True,
    background: bool = False,
    frames: bool = False,
    command_id: str | None = None,
) -> Call:
    """Start something: code in a `language`, an argv, or a shell string. All execution goes through here."""
    command_id = command_id or new_command_id()
    fields: dict[str, object] = {"id": command_id, "cwd": cwd, "timeout_ms": milliseconds(timeout)}
    fields["env"] = dict(env) if env else None
    fields["output_limit"] = output_limit
    fields["background"] = background or None
    fields["stdin_stream"] = stdin_stream or None
    _stdin(fields, stdin)
    if language is not None:
        if user is not None or umask is not None or pty is not None or merge_stderr:
            raise InvalidArgument("user, umask, pty and merge_stderr belong to commands, not to code in a language")
        if not isinstance(command, str):
            raise InvalidArgument("code must be a string")
        fields.update(code=command, language=language, args=list(args) or None)
    else:
        if args:
            raise InvalidArgument("args belong to code in a language")
        if isinstance(command, str):
            fields["command"] = command
        else:
            fields["argv"] = list(command)
        fields["merge_stderr"] = merge_stderr or None
        fields.update(user=user, umask=umask)
        if pty is not None:
            fields["pty"] = {"rows": pty[0], "cols": pty[1], **({} if echo else {"echo": False})}
    target = sandbox_path(ref, "exec" if language is None else "run")
    headers = (*_JSON, ("Accept", FRAMES)) if frames else _JSON
    wait = ANSWER_TIMEOUT if background else (None if timeout is None else timeout + APPROVAL + GRACE)
    return Call("POST", target, _encode(fields), headers, command_id=command_id, timeout=wait)


def command_path(ref: str, command_id: str, *rest: str) -> str:
    if not isinstance(command_id, str) or not command_id or command_id in (".", ".."):
        raise InvalidArgument("a command id is needed")
    return sandbox_path(ref, "commands", quote(command_id).replace("/", "%2F"), *rest)


def poll(ref: str, command_id: str, stdout_from: int | None = None, stderr_from: int | None = None) -> Call:
    return get(command_path(ref, command_id), {"stdout_from": stdout_from, "stderr_from": stderr_from})


def attach(ref: str, command_id: str, stdout: int = 0, stderr: int = 0) -> Call:
    call = get(command_path(ref, command_id, "stream"), {"stdout": stdout, "stderr": stderr}, timeout=None)
    call.headers = (("Accept", FRAMES),)
    return call


def send_stdin(ref: str, command_id: str, data: bytes, eof: bool = False) -> Call:
    target = with_query(command_path(ref, command_id, "stdin"), {"eof": True if eof else None})
    return Call("POST", target, bytes(data), _BYTES, command_id=command_id, timeout=None)


def signal(ref: str, command_id: str, number: int, group: str | None = None) -> Call:
    return post(command_path(ref, command_id, "signal"), {"signal": int(number), "group": group})


def kill(ref: str, command_id: str) -> Call:
    return post(command_path(ref, command_id, "kill"), {}, repeatable=True)


def resize(ref: str, command_id: str, rows: int, cols: int) -> Call:
    return post(command_path(ref, command_id, "resize"), {"rows": rows, "cols": cols}, repeatable=True)


# Shell sessions


def shell_path(ref: str, shell: str, *rest: str) -> str:
    if not isinstance(shell, str) or not shell or shell in (".", "..") or "/" in shell or "\0" in shell:
        raise InvalidArgument(f"{shell!r:.80} is not a shell's id")
    return sandbox_path(ref, "shells", shell, *rest)


def open_shell(
    ref: str, language: str, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None
) -> Call:
    fields = {"language": language, "cwd": cwd, "env": dict(env) if env else None, "user": user}
    return post(sandbox_path(ref, "shells"), fields)


def run_in_shell(
    ref: str,
    shell: str,
    command: str,
    stdin: str | bytes | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    output_limit: int | None = None,
    *,
    frames: bool = False,
) -> Call:
    """A command of a session. Sent twice, it runs once: it carries an id."""
    command_id = new_command_id()
    fields: dict[str, object] = {"id": command_id, "command": command, "timeout_ms": milliseconds(timeout)}
    fields["output_limit"] = output_limit
    _stdin(fields, stdin)
    call = post(shell_path(ref, shell, "run"), fields)
    call.timeout = None if timeout is None else timeout + APPROVAL + GRACE
    call.command_id = command_id
    if frames:
        call.headers = (*call.headers, ("Accept", FRAMES))
    return call


def close_shell(ref: str, shell: str) -> Call:
    return Call("DELETE", shell_path(ref, shell), repeatable=True)


# The code interpreter


def run_cell(
    ref: str,
    code: str,
    language: str | None = None,
    context: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    output_limit: int | None = None,
    *,
    frames: bool = False,
) -> Call:
    """A cell. The first one of a sandbox may have to wait for the interpreter to start."""
    fields: dict[str, object] = {"code": code, "language": language, "context": context}
    fields |= {"env": dict(env) if env else None, "timeout_ms": milliseconds(timeout), "output_limit": output_limit}
    call = post(sandbox_path(ref, "interpreter"), fields)
    call.timeout = None if timeout is None else timeout + KERNEL + GRACE
    if frames:
        call.headers = (*call.headers, ("Accept", FRAMES))
    return call


def create_context(ref: str, language: str, cwd: str | None) -> Call:
    call = post(sandbox_path(ref, "contexts"), {"language": language, "cwd": cwd})
    call.timeout = KERNEL + GRACE
    return call


def context_path(ref: str, context: str, *rest: str) -> str:
    if not isinstance(context, str) or not context.isalnum():
        raise InvalidArgument(f"{context!r:.80} is not a context's id")
    return sandbox_path(ref, "contexts", context, *rest)


# Snapshots, sub-agents, approvals


def snapshot_path(name: str, *rest: str) -> str:
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\0" in name:
        raise InvalidArgument(f"{name!r:.80} is not a snapshot's name")
    return "/v1/snapshots/" + quote(name) + "".join(f"/{part}" for part in rest)


def save_snapshot(ref: str, name: str, *, full: bool = False, force: bool = False) -> Call:
    call = post(sandbox_path(ref, "snapshots"), {"name": name, "full": full or None, "force": force or None})
    call.timeout = None
    return call


def restore_snapshot(name: str, options: Mapping[str, Any]) -> Call:
    call = post(snapshot_path(name, "restore"), {"sandbox": create_fields(options)})
    call.timeout = None
    return call


def delete_snapshot(name: str) -> Call:
    return Call("DELETE", snapshot_path(name))


def checkpoint_path(name: str, *rest: str) -> str:
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\0" in name:
        raise InvalidArgument(f"{name!r:.80} is not a checkpoint's name")
    return "/v1/checkpoints/" + quote(name) + "".join(f"/{part}" for part in rest)


def _patient(call: Call) -> Call:
    """It takes as long as the memory is large."""
    call.timeout = None
    return call


def save_checkpoint(ref: str, name: str | None, *, force: bool = False) -> Call:
    return _patient(post(sandbox_path(ref, "checkpoints"), {"name": name, "force": force or None}))


def restore_checkpoint(
    checkpoint: str, *, name: str | None = None, lifetime: float | None = None, network: bool = True
) -> Call:
    fields = {"name": name, "lifetime_s": lifetime, "network": None if network else False}
    return _patient(post(checkpoint_path(checkpoint, "restore"), fields))


def fork(ref: str, count: int) -> Call:
    return _patient(post(sandbox_path(ref, "fork"), {"count": count}))


def subagent(
    ref: str,
    *,
    name: str | None,
    env: Mapping[str, str] | None,
    hosts: Sequence[str] | None,
    limits: Mapping[str, Any],
) -> Call:
    fields: dict[str, object] = {"name": name, "env": dict(env) if env else None}
    fields["hosts"] = None if hosts is None else list(hosts)
    fields["limits"] = {key: value for key, value in limits.items() if value is not None} or None
    return post(sandbox_path(ref, "subagents"), fields)


def ask_approval(ref: str, action: str) -> Call:
    return post(sandbox_path(ref, "approvals"), {"action": action})


def wait_approval(approval: str, timeout: float) -> Call:
    call = post(f"/v1/approvals/{quote(approval)}/wait", {"timeout_s": timeout})
    call.timeout = timeout + GRACE
    return call


# Files


def path_fields(**paths: Path) -> dict[str, str]:
    """Paths as JSON fields: text where they are UTF-8, else their bytes in `<name>_b64`."""
    fields = {}
    for name, path in paths.items():
        raw = os.fspath(path)
        data = raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogateescape")
        try:
            fields[name] = data.decode("utf-8")
        except UnicodeDecodeError:
            fields[name + "_b64"] = to_base64(data)
    return fields


def change_hosts(ref: str, hosts: Sequence[str] | None, add: Sequence[str], remove: Sequence[str]) -> Call:
    if isinstance(hosts, str) or isinstance(add, str) or isinstance(remove, str):
        raise InvalidArgument("hosts are a list of names, not one string")
    fields = {"hosts": None if hosts is None else list(hosts), "add": list(add) or None, "remove": list(remove) or None}
    return post(sandbox_path(ref, "hosts"), fields, repeatable=True)


def expose(ref: str, port: int, host: str | None = None) -> Call:
    return post(sandbox_path(ref, "exposures"), {"port": port, "host": host}, repeatable=True)


def unexpose(ref: str, port: int) -> Call:
    return Call("DELETE", sandbox_path(ref, "exposures", str(port)), repeatable=True)


def read_file(
    ref: str, path: Path, offset: int | None = None, limit: int | None = None, user: str | None = None
) -> Call:
    query = {"path": path, "offset": offset, "limit": limit, "user": user}
    return get(sandbox_path(ref, "files"), query)


def write_file(
    ref: str,
    path: Path,
    body: bytes | None,
    *,
    mode: int | None = None,
    append: bool = False,
    offset: int | None = None,
    parents: bool = False,
    create: str | None = None,
    user: str | None = None,
) -> Call:
    """`body` None: the driver streams it in chunks."""
    query = {"path": path, "mode": mode, "append": append or None, "offset": offset, "parents": parents or None}
    target = with_query(sandbox_path(ref, "files"), {**query, "create": create, "user": user})
    return Call("PUT", target, body, _BYTES, timeout=None if body is None else ANSWER_TIMEOUT)


def file_operation(ref: str, verb: str, fields: Mapping[str, Any], *, repeatable: bool = False) -> Call:
    return post(sandbox_path(ref, "files", verb), fields, repeatable=repeatable)


def tar(ref: str, path: Path, *, upload: bool, user: str | None = None) -> Call:
    target = with_query(sandbox_path(ref, "tar"), {"path": path, "user": user})
    if upload:
        return Call("PUT", target, None, (("Content-Type", "application/x-tar"),), timeout=None)
    return Call("GET", target, repeatable=True, timeout=None)


def watch(ref: str, path: Path, recursive: bool = True, user: str | None = None) -> Call:
    call = get(sandbox_path(ref, "watch"), {"path": path, "recursive": recursive, "user": user}, timeout=None)
    call.headers = (("Accept", FRAMES),)
    return call
