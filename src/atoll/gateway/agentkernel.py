"""agentkernel's HTTP interface: its routes, envelopes and event streams, each a few lines from a verb of core."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll import errors, model, profiles
from atoll.core import Core
from atoll.core.profiles import Ceiling
from atoll.gateway import agentkernel_words as words
from atoll.gateway.agentkernel_door import Admission, check_content
from atoll.gateway.exchange import Exchange, Gone, Receive, Scope, Send, internal, log, unquote
from atoll.model import Chunk, CreateSandbox, ExecResult, ExecSpec, LimitsSpec, RunOnce

MAX_FILE = 64 * model.MIB
MAX_OUTPUT = 16 * model.MIB
DEFAULT_IMAGE = "auto"
T = TypeVar("T")
Handler = Callable[["Agentkernel", Exchange], Awaitable[None]]

ROUTES: dict[tuple[str, str], Handler] = {}
CAPABILITIES = (
    "mount_cwd", "mount_home", "attach", "host_volumes", "ssh", "proxy_secret_bindings", "secret_files", "snapshots",
    "resume", "full_state_pause_resume", "full_state_fork", "endpoints",
)  # fmt: skip
ABLE = ("mount_cwd", "mount_home", "attach", "snapshots", "resume")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the person who opened the door chose."""

    admission: Admission
    ceiling: Ceiling
    any_host: bool = False
    legacy_exit_errors: bool = False
    runtime: str = "auto"


def route(method: str, path: str) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        ROUTES[method, path] = handler
        return handler

    return add


class Agentkernel:
    """The ASGI app."""

    def __init__(self, core: Core, settings: Settings) -> None:
        self.core = core
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        parts = [unquote(part) for part in scope["raw_path"][1:].split(b"/")]
        exchange = Exchange(scope, receive, send, None, parts)  # type: ignore[arg-type]  # known in the next step
        try:
            exchange.who = self.settings.admission.check(exchange)
            await self._find(scope["method"], parts)(self, exchange)
        except Gone:
            pass
        except errors.AtollError as error:
            await self._fail(exchange, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await self._fail(exchange, internal(error))

    def _find(self, method: str, parts: list[str]) -> Handler:
        pattern = list(parts)
        if len(parts) > 1 and parts[0] in ("sandboxes", "snapshots") and parts[1] != "by-uuid":
            pattern[1] = "*"
            if len(parts) > 3 and parts[2] == "files":
                pattern[3:] = ["*"]
            elif len(parts) > 4 and parts[2:4] == ["exec", "detached"]:
                pattern[4] = "*"
        elif len(parts) == 3:
            pattern[2] = "*"
        found = ROUTES.get((method, "/".join(pattern)))
        if found is None:
            raise errors.NotFound("Not found")
        return found

    async def _fail(self, exchange: Exchange, error: errors.AtollError) -> None:
        if exchange.started:
            log.warning("an answer was cut: %s: %s", error.code, error)
            raise error
        text = error.message + (f" ({error.hint})" if error.hint else "")
        status = 400 if error.http_status == 413 else error.http_status
        body = {"success": False, "error": text.encode("utf-8", "replace").decode(), "code": error.code}
        await exchange.answer(body, status)

    async def body(self, exchange: Exchange, kind: type[T]) -> T:
        raw = await exchange.body()
        check_content(exchange, raw)
        return model.decode(kind, raw)

    # From its words to core's

    def once(self, request: words.Run) -> RunOnce:
        spec = CreateSandbox(
            image=words.image_name(request.image) if request.image else DEFAULT_IMAGE,
            program=None if request.image else request.command[0][:4096],
            profile=_profile(request.profile),
            mode=_mode(request.compatibility_mode),
            network=request.network is not False,
            runtime=self.settings.runtime,
        )
        command = _command(request.command, request.env, request.cwd, request.timeout_ms)
        return RunOnce(sandbox=spec, command=command, any_host=self.settings.any_host)

    async def run(self, exchange: Exchange, request: words.Run) -> dict[str, Any]:
        stream = self.core.once.stream(exchange.who, self.once(request), self.settings.ceiling)
        return await _gather(stream)

    async def answer_run(self, exchange: Exchange, result: dict[str, Any]) -> None:
        if self.settings.legacy_exit_errors and (result["exit_code"] != 0 or result["timed_out"]):
            text = f"Command exited with code {result['exit_code']}: {result['output']}"
            await exchange.answer({"success": False, "error": text}, 500)
            return
        await ok(exchange, result)


def _profile(text: str | None) -> str | None:
    return None if text is None else profiles.profile_name(text)


def _mode(text: str | None) -> str | None:
    return None if text is None else profiles.mode_name(text)


def _command(
    argv: list[str], env: dict[str, str] | list[str] | None, cwd: str | None, timeout_ms: int | None
) -> ExecSpec:
    fields = {"argv": argv, "env": words.environment(env), "cwd": cwd, "timeout_ms": timeout_ms or 0}
    return model.convert(ExecSpec, {**fields, "output_limit": MAX_OUTPUT})


async def ok(exchange: Exchange, data: Any, status: int = 200) -> None:
    await exchange.answer({"success": True, "data": data}, status)


async def _gather(stream: AsyncIterator[Any]) -> dict[str, Any]:
    """The result, with both streams in the order they came."""
    pieces: list[bytes] = []
    size = 0
    found: ExecResult | None = None
    async with aclosing(stream):  # type: ignore[type-var]  # only generators come here
        async for item in stream:
            if isinstance(item, Chunk) and size < MAX_OUTPUT:
                pieces.append(item.data[: MAX_OUTPUT - size])
                size += len(item.data)
            elif isinstance(item, ExecResult):
                found = item
    assert found is not None
    return {
        "output": b"".join(pieces).decode("utf-8", "replace"),
        "stdout": found.stdout,
        "stderr": found.stderr,
        "exit_code": 124 if found.timed_out else found.exit_code,
        "duration_ms": found.duration_ms,
        "timed_out": found.timed_out,
        "oom_killed": found.oom,
        "truncated": found.truncated,
    }


@route("GET", "health")
async def health(app: Agentkernel, exchange: Exchange) -> None:
    await exchange.answer({"success": True, "data": "ok", "status": "ok"})


# Runs


@route("POST", "run")
async def run(app: Agentkernel, exchange: Exchange) -> None:
    request = await app.body(exchange, words.Run)
    await app.answer_run(exchange, await exchange.while_connected(app.run(exchange, request)))


@route("POST", "run/stream")
async def run_stream(app: Agentkernel, exchange: Exchange) -> None:
    request = await app.body(exchange, words.Run)
    once = app.once(request)
    app.settings.ceiling.check(once.sandbox)
    await exchange.while_connected(_events(app, exchange, request, once))


async def _events(app: Agentkernel, exchange: Exchange, request: words.Run, once: RunOnce) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
    await exchange.start(200, headers)

    async def tell(event: str, **data: Any) -> None:
        await exchange.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())

    told = {"command": request.command, "fast": request.fast is not False, "timestamp": words.moment(time.time())}
    await tell("progress", stage="creating")
    try:
        async with aclosing(app.core.once.stream(exchange.who, once, app.settings.ceiling)) as stream:  # type: ignore[type-var]
            async for item in stream:
                if isinstance(item, dict):
                    await tell("started", sandbox=item["sandbox"]["name"], **told)
                    await tell("progress", stage="starting")
                    await tell("progress", stage="executing")
                elif isinstance(item, Chunk):
                    await _tell_output(tell, item)
                elif isinstance(item, ExecResult):
                    code = 124 if item.timed_out else item.exit_code
                    await tell("done", exit_code=code, success=code == 0, timed_out=item.timed_out)
    except errors.AtollError as error:
        await tell("error", message=error.message.encode("utf-8", "replace").decode(), code=error.code)
    await exchange.end()


async def _tell_output(tell: Callable[..., Awaitable[None]], chunk: Chunk) -> None:
    text = chunk.data.decode("utf-8", "replace")
    more = {} if text.encode() == chunk.data else {"data_b64": base64.b64encode(chunk.data).decode()}
    await tell("output", data=text, content=text, stream="stdout" if chunk.channel == 1 else "stderr", **more)


@route("POST", "batch/run")
async def batch(app: Agentkernel, exchange: Exchange) -> None:
    request = await app.body(exchange, words.Batch)

    async def one(command: list[str]) -> dict[str, Any]:
        try:
            return {**await app.run(exchange, words.Run(command=command)), "error": None}
        except errors.AtollError as error:
            return {"output": None, "error": error.message}

    work = asyncio.gather(*(one(entry.command) for entry in request.commands))
    await ok(exchange, {"results": await exchange.while_connected(work)})


# Sandboxes


@route("GET", "sandboxes")
async def list_sandboxes(app: Agentkernel, exchange: Exchange) -> None:
    found = await app.core.sandboxes.list(exchange.who)
    shown = [words.sandbox(info) for info in found if info.state in words.STATES]
    await ok(exchange, sorted(shown, key=lambda entry: entry["name"]))


@route("POST", "sandboxes")
async def create(app: Agentkernel, exchange: Exchange) -> None:
    request = await app.body(exchange, words.Create)
    request.refuse_unsupported()
    limits = LimitsSpec(cpus=request.vcpus, memory_mb=request.memory_mb)
    spec = CreateSandbox(
        name=words.sandbox_name(request.name),
        image=words.image_name(request.image) if request.image else DEFAULT_IMAGE,
        program=None if request.image else "sh",
        runtime=_runtime(request.backend, app.settings.runtime),
        profile=_profile(request.profile),
        mode=_mode(request.compatibility_mode) or ("native" if app.settings.any_host else None),
        network=request.network is not False,
        limits=limits,
        persistent=True,
    )
    app.settings.ceiling.check(spec)
    info = await exchange.while_connected(app.core.sandboxes.create(exchange.who, spec))
    await ok(exchange, words.sandbox(info), 201)


def _runtime(backend: str | None, default: str) -> str:
    known = {None: default, "auto": default, "docker": "container", "podman": "container"}
    return known.get(backend, backend or default)


@route("GET", "sandboxes/*")
async def get(app: Agentkernel, exchange: Exchange) -> None:
    await ok(exchange, words.sandbox(await _known(app, exchange)))


@route("GET", "sandboxes/by-uuid/*")
async def get_by_uuid(app: Agentkernel, exchange: Exchange) -> None:
    await ok(exchange, words.sandbox(await _known(app, exchange, words.from_uuid(exchange.parts[2]))))


async def _known(app: Agentkernel, exchange: Exchange, ref: str | None = None) -> model.SandboxInfo:
    try:
        info = await app.core.sandboxes.get(exchange.who, ref or _name(exchange))
    except errors.NotFound:
        raise errors.NotFound("Sandbox not found") from None
    if info.state in ("ending", "ended"):
        raise errors.NotFound("Sandbox not found")
    return info


def _name(exchange: Exchange) -> str:
    return words.sandbox_name(exchange.parts[1])


@route("DELETE", "sandboxes/*")
async def remove(app: Agentkernel, exchange: Exchange) -> None:
    try:
        await app.core.sandboxes.destroy(exchange.who, _name(exchange))
    except errors.NotFound:
        pass
    await ok(exchange, "Sandbox removed")


@route("POST", "sandboxes/*/start")
async def start(app: Agentkernel, exchange: Exchange) -> None:
    await app.body(exchange, words.Nothing)
    info = await _known(app, exchange)
    await ok(exchange, words.sandbox(await app.core.sandboxes.start(exchange.who, info.id)))


@route("POST", "sandboxes/*/stop")
async def stop(app: Agentkernel, exchange: Exchange) -> None:
    await app.body(exchange, words.Nothing)
    info = await _known(app, exchange)
    await ok(exchange, words.sandbox(await app.core.sandboxes.stop(exchange.who, info.id)))


@route("POST", "sandboxes/*/extend")
async def extend(app: Agentkernel, exchange: Exchange) -> None:
    by = words.duration((await app.body(exchange, words.ExtendTtl)).by)
    info = await _known(app, exchange)
    left = max(0.0, info.expires_at - time.time()) if info.expires_at is not None else 0.0
    made = await app.core.sandboxes.extend(exchange.who, info.id, model.Extend(lifetime_s=left + by))
    await ok(exchange, {"expires_at": words.moment(made.expires_at)})


@route("GET", "sandboxes/*/logs")
async def logs(app: Agentkernel, exchange: Exchange) -> None:
    info = await _known(app, exchange)
    events = app.core.history.events(exchange.who.owner, info.id, 1000, None)
    name = info.name or info.id
    await ok(exchange, [{**e, "timestamp": words.moment(e["at"]), "type": e["kind"], "sandbox": name} for e in events])


# Commands


async def _exec_spec(app: Agentkernel, exchange: Exchange) -> ExecSpec:
    request = await app.body(exchange, words.Exec)
    if request.sudo:
        raise errors.PermissionDenied("sudo is not offered: commands run as root of the sandbox already")
    return _command(request.command, request.env, request.workdir or request.cwd, request.timeout_ms)


@route("POST", "sandboxes/*/exec")
async def execute(app: Agentkernel, exchange: Exchange) -> None:
    spec = await _exec_spec(app, exchange)
    info = await _known(app, exchange)
    work = _gather(app.core.commands.stream(exchange.who, info.id, spec))
    await app.answer_run(exchange, await exchange.while_connected(work))


@route("POST", "sandboxes/*/exec/detach")
async def detach(app: Agentkernel, exchange: Exchange) -> None:
    spec = await _exec_spec(app, exchange)
    spec.background = True
    info = await _known(app, exchange)
    made = await app.core.commands.background(exchange.who, info.id, spec)
    await ok(exchange, words.detached(info.name or info.id, made))


@route("GET", "sandboxes/*/exec/detached")
async def detached_list(app: Agentkernel, exchange: Exchange) -> None:
    info = await _known(app, exchange)
    found = await app.core.commands.list(exchange.who, info.id)
    await ok(exchange, [words.detached(info.name or info.id, entry) for entry in found if entry.background])


@route("GET", "sandboxes/*/exec/detached/*")
async def detached_status(app: Agentkernel, exchange: Exchange) -> None:
    info = await _known(app, exchange)
    found = await app.core.commands.poll(exchange.who, info.id, exchange.parts[4])
    await ok(exchange, words.detached(info.name or info.id, found))


@route("GET", "sandboxes/*/exec/detached/*/logs")
async def detached_logs(app: Agentkernel, exchange: Exchange) -> None:
    stream = exchange.query("stream").get("stream")
    if stream not in (None, "stdout", "stderr"):
        raise errors.InvalidArgument("stream must be stdout or stderr")
    info = await _known(app, exchange)
    found = await app.core.commands.poll(exchange.who, info.id, exchange.parts[4])
    both = {"stdout": found.stdout, "stderr": found.stderr}
    await ok(exchange, both if stream is None else {stream: both[stream]})


@route("DELETE", "sandboxes/*/exec/detached/*")
async def detached_kill(app: Agentkernel, exchange: Exchange) -> None:
    info = await _known(app, exchange)
    await app.core.commands.kill(exchange.who, info.id, exchange.parts[4])
    await ok(exchange, "Command killed")


# Files


@route("GET", "sandboxes/*/files/*")
async def read_file(app: Agentkernel, exchange: Exchange) -> None:
    info, path = await _known(app, exchange), words.file_path("/".join(exchange.parts[3:]))

    async def work() -> bytes:
        pieces, size = [], 0
        async with app.core.files.read(exchange.who, info.id, path, None, MAX_FILE + 1) as (_, data):
            async for piece in data:
                pieces.append(bytes(piece))
                size += len(piece)
        if size > MAX_FILE:
            raise errors.InvalidArgument(f"the file is larger than {MAX_FILE} bytes")
        return b"".join(pieces)

    content = await exchange.while_connected(work())
    try:
        text, encoding = content.decode(), "utf8"
    except UnicodeDecodeError:
        text, encoding = base64.b64encode(content).decode(), "base64"
    await ok(exchange, {"content": text, "encoding": encoding, "size": len(content)})


@route("PUT", "sandboxes/*/files/*")
async def write_file(app: Agentkernel, exchange: Exchange) -> None:
    request = await app.body(exchange, words.WriteFile)
    info, path = await _known(app, exchange), words.file_path("/".join(exchange.parts[3:]))
    if request.encoding in (None, "utf8", "utf-8"):
        content = request.content.encode("utf-8", "replace")
    elif request.encoding == "base64":
        try:
            content = model.unbase64("content", request.content)
        except ValueError as bad:
            raise errors.InvalidArgument(str(bad)) from None
    else:
        raise errors.InvalidArgument("encoding must be utf8 or base64")
    await app.core.files.write(exchange.who, info.id, path, content, parents=True)
    await ok(exchange, f"Wrote {len(content)} bytes to {path}")


@route("DELETE", "sandboxes/*/files/*")
async def delete_file(app: Agentkernel, exchange: Exchange) -> None:
    info, path = await _known(app, exchange), words.file_path("/".join(exchange.parts[3:]))
    await app.core.files.ask(exchange.who, info.id, "remove", model.RemoveFile(path=path))
    await ok(exchange, f"Deleted {path}")


@route("POST", "sandboxes/*/files")
async def write_files(app: Agentkernel, exchange: Exchange) -> None:
    request = await app.body(exchange, words.WriteFiles)
    info = await _known(app, exchange)
    checked = {words.file_path(path): content for path, content in request.files.items()}
    for path, content in checked.items():
        await app.core.files.write(exchange.who, info.id, path, content.encode("utf-8", "replace"), parents=True)
    await ok(exchange, {"written": len(checked)})


@route("GET", "backends")
async def backends(app: Agentkernel, exchange: Exchange) -> None:
    able = dict.fromkeys(CAPABILITIES, False) | dict.fromkeys(ABLE, True)
    found = [
        {
            "backend": status.name,
            "configured": status.works,
            "usable": status.works,
            "readiness_reason": status.why or "works",
            "capabilities": able,
        }
        for status in await app.core.backend.runtimes()
    ]
    try:
        default: str | None = await app.core.backend.pick("auto")
    except errors.AtollError:
        default = None
    await ok(exchange, {"default_backend": default, "backends": found})


# Routes of their own module, here for their entries in the table
from atoll.gateway import agentkernel_snapshots  # noqa: E402, F401
