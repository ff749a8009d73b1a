"""REST: a table of routes, each a few lines from HTTP to a verb of core. The OpenAPI document is made from this table."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import msgspec

import atoll
from atoll import config, errors, model
from atoll.core import Core
from atoll.core.access import Principal
from atoll.core.auditing import SOURCE
from atoll.core.history import check_window
from atoll.core.presence import PEER_PID
from atoll.gateway import frames
from atoll.gateway.exchange import (
    Exchange,
    Gone,
    Receive,
    Scope,
    Send,
    flag,
    internal,
    log,
    mode,
    unquote,
    whole,
)


class Host(Protocol):
    """The daemon around the app."""

    started_at: float

    def pin(self) -> None: ...

    async def stop(self, force: bool) -> int: ...


class Route(NamedTuple):
    """`kind` is the request's struct, `answer` the answer's; `query` names the parameters."""

    handler: Callable[["Rest", Exchange], Awaitable[None]]
    does: str
    kind: type[Any] | None = None
    answer: Any = None
    query: tuple[str, ...] = ()
    status: int = 200


ROUTES: dict[tuple[str, str], Route] = {}
Handler = Callable[["Rest", Exchange], Awaitable[None]]


def route(
    method: str,
    path: str,
    does: str,
    kind: type[Any] | None = None,
    answer: Any = None,
    query: tuple[str, ...] = (),
    status: int = 200,
) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        pattern = "/".join("*" if part.startswith("{") else part for part in path[1:].split("/"))
        ROUTES[method, pattern] = Route(handler, does, kind, answer, query, status)
        PATHS[method, pattern] = path
        return handler

    return add


PATHS: dict[tuple[str, str], str] = {}
NAMED = ("sandboxes", "snapshots", "approvals", "secrets")  # collections whose members have a name in the path
SANDBOX = "/v1/sandboxes/{ref}"
COMMAND = SANDBOX + "/commands/{cid}"


class Rest:
    """The ASGI app. Who calls is in `scope["state"]["principal"]`, put there by the listener."""

    def __init__(self, core: Core, host: Host) -> None:
        self.core = core
        self.host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = [unquote(part) for part in scope["raw_path"][1:].split(b"/")]
        who = scope["state"].get("principal")
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send, who, parts)
            return
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, who, parts)
        PEER_PID.set(scope["state"].get("pid", 0))
        if not SOURCE.get():  # a door before this one may have said more
            SOURCE.set("http unix" if scope["client"] is None else f"http {scope['client'][0]}")
        try:
            if not isinstance(who, Principal):
                raise errors.Unauthenticated("who is calling is not known")
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
        if len(parts) > 2 and parts[1] in NAMED:
            pattern[2] = "*"
            if len(parts) > 4 and parts[3] in ("commands", "ports", "exposures"):
                pattern[4] = "*"
        name = "/".join(pattern)
        found = ROUTES.get((method, name))
        if found is None:
            others = sorted(m for m, p in ROUTES if p == name)
            if others:
                raise errors.Unsupported(f"{method} is not possible here", hint="possible: " + ", ".join(others))
            raise errors.NotFound("no such route", hint="see /v1/openapi.json")
        return found.handler

    async def _fail(self, exchange: Exchange, error: errors.AtollError) -> None:
        if exchange.started:
            log.warning("an answer was cut: %s: %s", error.code, error)
            raise error  # the server closes the connection, so that the caller sees a cut answer as one
        await exchange.fail(error)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send, who: Any, parts: list[str]) -> None:
        from atoll.gateway.tunnel import refuse, serve

        if not isinstance(who, Principal):
            await refuse(errors.Unauthenticated("who is calling is not known"), send)
            return
        if parts == ["v1", "mcp"]:
            from atoll.gateway.mcp.stdio import serve as converse

            await converse(self.core, who, receive, send)
            return
        if len(parts) != 5 or parts[:2] != ["v1", "sandboxes"] or parts[3] != "ports":
            await refuse(errors.NotFound("no such route"), send)
            return
        await serve(self.core.ports, who, parts[2], parts[4], receive, send)


# The daemon


@route("GET", "/v1/health", "Whether the daemon is well, and which one it is")
async def health(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(
        {
            "ok": True,
            "version": atoll.__version__,
            "pid": os.getpid(),
            "uptime_s": round(time.time() - rest.host.started_at, 3),
            "sandboxes": rest.core.store.count_live(),
            "home": str(rest.core.home),
            "pool": rest.core.sandboxes.pool.status(),
        }
    )


@route("GET", "/v1/openapi.json", "This document")
async def openapi(rest: Rest, exchange: Exchange) -> None:
    from atoll.gateway.openapi import document

    await exchange.answer(document())


@route("GET", "/v1/runtimes", "Which runtimes work on this machine, and why others do not")
async def runtimes(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"runtimes": await rest.core.backend.runtimes()})


@route("GET", "/v1/config", "Every setting with its present value")
async def settings(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(config.show(rest.core.config))


@route("POST", "/v1/daemon/stop", "Stop the daemon; sandboxes go on unless `force`", model.Stop)
async def stop_daemon(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.Stop)
    await exchange.answer({"stopping": True, "sandboxes": await rest.host.stop(request.force)})


@route("POST", "/v1/daemon/pin", "Keep the daemon even when there is nothing to do")
async def pin(rest: Rest, exchange: Exchange) -> None:
    rest.host.pin()
    rest.core.sandboxes.keep_warm()
    await exchange.answer({"pinned": True, "pid": os.getpid(), "pool": rest.core.sandboxes.pool.status()})


# Sandboxes


@route("POST", "/v1/sandboxes", "Create a sandbox", model.CreateSandbox, model.SandboxInfo, status=201)
async def create(rest: Rest, exchange: Exchange) -> None:
    spec = await exchange.json(model.CreateSandbox)
    info = await exchange.while_connected(rest.core.sandboxes.create(exchange.who, spec))
    await exchange.answer(info, 201)


@route("GET", "/v1/sandboxes", "List sandboxes", query=("state", "name"))
async def list_sandboxes(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("state", "name")
    found = await rest.core.sandboxes.list(exchange.who, state=query.get("state", "active"), name=query.get("name"))
    await exchange.answer({"sandboxes": found})


@route("GET", SANDBOX, "One sandbox", answer=model.SandboxInfo)
async def get(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.sandboxes.get(exchange.who, exchange.ref))


@route("DELETE", SANDBOX, "Destroy a sandbox", answer=model.SandboxInfo)
async def destroy(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.sandboxes.destroy(exchange.who, exchange.ref))


def _lifecycle(verb: str, does: str) -> None:
    @route("POST", f"{SANDBOX}/{verb}", does, answer=model.SandboxInfo)
    async def change(rest: Rest, exchange: Exchange) -> None:
        await exchange.json(model.Request)
        await exchange.answer(await getattr(rest.core.sandboxes, verb)(exchange.who, exchange.ref))


_lifecycle("start", "Start a stopped sandbox")
_lifecycle("stop", "End its processes, keep its disk")
_lifecycle("pause", "Freeze it")
_lifecycle("resume", "Thaw it")


@route("POST", f"{SANDBOX}/extend", "Move its end", model.Extend, model.SandboxInfo)
async def extend(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.Extend)
    await exchange.answer(await rest.core.sandboxes.extend(exchange.who, exchange.ref, request))


# Commands


@route("POST", f"{SANDBOX}/exec", "Run a command", model.ExecSpec, model.ExecResult)
async def exec_command(rest: Rest, exchange: Exchange) -> None:
    await _execute(rest, exchange, await exchange.json(model.ExecSpec))


@route("POST", f"{SANDBOX}/run", "Run code in a language", model.RunSpec, model.ExecResult)
async def run_code(rest: Rest, exchange: Exchange) -> None:
    await _execute(rest, exchange, await exchange.json(model.RunSpec))


async def _execute(rest: Rest, exchange: Exchange, spec: model.ExecSpec | model.RunSpec) -> None:
    commands = rest.core.commands
    if spec.background:
        await exchange.answer(await commands.background(exchange.who, exchange.ref, spec), 202)
    elif frames.wanted(exchange):
        await frames.send(exchange, commands.stream(exchange.who, exchange.ref, spec))
    else:
        await exchange.answer(await exchange.while_connected(commands.exec(exchange.who, exchange.ref, spec)))


@route("GET", f"{SANDBOX}/commands", "Commands of a sandbox, oldest first")
async def list_commands(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"commands": await rest.core.commands.list(exchange.who, exchange.ref)})


@route(
    "GET", COMMAND, "A command and its output so far", answer=model.CommandInfo, query=("stdout_from", "stderr_from")
)
async def poll(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("stdout_from", "stderr_from")
    start = whole(query, "stdout_from", 0), whole(query, "stderr_from", 0)
    await exchange.answer(await rest.core.commands.poll(exchange.who, exchange.ref, exchange.command, *start))


@route("GET", f"{COMMAND}/stream", "Its output from those offsets as a frame stream", query=("stdout", "stderr"))
async def attach(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("stdout", "stderr")
    start = whole(query, "stdout", 0, -1), whole(query, "stderr", 0, -1)
    await frames.send(exchange, rest.core.commands.attach(exchange.who, exchange.ref, exchange.command, *start))


@route("POST", f"{COMMAND}/stdin", "Feed its standard input with the raw body", query=("eof",))
async def stdin(rest: Rest, exchange: Exchange) -> None:
    eof = flag(exchange.query("eof"), "eof")
    body = exchange.chunks()
    written = await rest.core.commands.stdin(exchange.who, exchange.ref, exchange.command, body, eof)
    await exchange.answer({"written": written})


@route("POST", f"{COMMAND}/signal", "Send it a signal", model.Signal)
async def signal(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.Signal)
    await rest.core.commands.signal(exchange.who, exchange.ref, exchange.command, request.signal, request.group)
    await exchange.answer({})


@route("POST", f"{COMMAND}/kill", "End it with everything it started", answer=model.CommandInfo)
async def kill(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.commands.kill(exchange.who, exchange.ref, exchange.command))


@route("POST", f"{COMMAND}/resize", "Change the size of its terminal", model.Resize)
async def resize(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.Resize)
    await rest.core.commands.resize(exchange.who, exchange.ref, exchange.command, request.rows, request.cols)
    await exchange.answer({})


@route("GET", f"{COMMAND}/foreground", "The process group in front on its terminal")
async def foreground(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"pgid": await rest.core.commands.foreground(exchange.who, exchange.ref, exchange.command)})


@route("GET", f"{SANDBOX}/processes", "Processes inside")
async def processes(rest: Rest, exchange: Exchange) -> None:
    from atoll.core.files import clean

    found = await rest.core.commands.processes(exchange.who, exchange.ref)
    await exchange.answer({"processes": [clean(process) for process in found]})


# Files


@route("GET", f"{SANDBOX}/files", "A file's bytes", query=("path", "offset", "limit"))
async def read(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("path", "offset", "limit")
    offset, limit = whole(query, "offset"), whole(query, "limit")

    async def work() -> None:
        async with rest.core.files.read(exchange.who, exchange.ref, _path(query), offset, limit) as (stat, data):
            plain = {key: value for key, value in stat.items() if isinstance(value, int | float) or key == "type"}
            headers = [(b"content-type", b"application/octet-stream"), (b"x-atoll-stat", msgspec.json.encode(plain))]
            await exchange.start(200, headers)
            async for piece in data:
                await exchange.write(piece)
        await exchange.end()

    await exchange.while_connected(work())


@route(
    "PUT",
    f"{SANDBOX}/files",
    "Write a file from the raw body",
    query=("path", "mode", "append", "offset", "parents", "create"),
)
async def write(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("path", "mode", "append", "offset", "parents", "create")
    create = query.get("create") or None
    if create not in (None, "any", "new", "existing"):
        raise errors.InvalidArgument("create must be any, new or existing")
    answer = await rest.core.files.write(
        exchange.who,
        exchange.ref,
        _path(query),
        exchange.chunks(),
        mode=mode(query),
        append=flag(query, "append") or None,
        offset=whole(query, "offset"),
        parents=flag(query, "parents") or None,
        create=create,
    )
    await exchange.answer(answer)


def _file_operation(verb: str, kind: type[model.Request], does: str) -> None:
    @route("POST", f"{SANDBOX}/files/{verb}", does, kind)
    async def operate(rest: Rest, exchange: Exchange) -> None:
        request = await exchange.json(kind)
        files = rest.core.files
        if verb == "list":
            work = files.list(exchange.who, exchange.ref, request)
        elif verb == "grep":
            work = files.grep(exchange.who, exchange.ref, request)
        else:
            work = files.ask(exchange.who, exchange.ref, verb, request)
        await exchange.answer(await exchange.while_connected(work))


_file_operation("list", model.ListFiles, "List a directory")
_file_operation("stat", model.StatFile, "What is known of a path")
_file_operation("mkdir", model.MakeDirectory, "Make a directory")
_file_operation("remove", model.RemoveFile, "Remove a file or a tree")
_file_operation("move", model.MoveFile, "Move or rename")
_file_operation("copy", model.CopyFile, "Copy a file or a tree")
_file_operation("chmod", model.ChangeMode, "Change mode or owner")
_file_operation("symlink", model.MakeLink, "Make a symbolic link")
_file_operation("grep", model.Grep, "Search file contents")
_file_operation("sed", model.Sed, "Replace in files")
_file_operation("du", model.PathOnly, "Disk use of a tree")


@route("GET", f"{SANDBOX}/tar", "A tree as a tar stream", query=("path", "gzip"))
async def tar_out(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("path", "gzip")

    async def work() -> None:
        async with rest.core.files.tar_out(exchange.who, exchange.ref, _path(query), flag(query, "gzip")) as data:
            first = await anext(data, b"")
            await exchange.start(200, [(b"content-type", b"application/x-tar")])
            if first:
                await exchange.write(first)
            async for piece in data:
                await exchange.write(piece)
        await exchange.end()

    await exchange.while_connected(work())


@route("PUT", f"{SANDBOX}/tar", "Unpack a tar stream", query=("path",))
async def tar_in(rest: Rest, exchange: Exchange) -> None:
    path = _path(exchange.query("path"))
    await exchange.answer(await rest.core.files.tar_in(exchange.who, exchange.ref, path, exchange.chunks()))


@route("GET", f"{SANDBOX}/watch", "Changes below a path as a frame stream", query=("path", "recursive"))
async def watch(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("path", "recursive")
    recursive = flag(query, "recursive", True)
    await frames.send(exchange, rest.core.files.watch(exchange.who, exchange.ref, _path(query), recursive))


def _path(query: dict[str, str]) -> str:
    return query.get("path") or ""


# History


@route("GET", f"{SANDBOX}/log", "A window of the transcript", query=("offset", "limit"))
async def transcript(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("offset", "limit")
    offset, limit = whole(query, "offset", 0), whole(query, "limit", 0)
    check_window(offset, limit)
    row = rest.core.sandboxes.known(exchange.who, exchange.ref)
    await exchange.answer({"sandbox_id": row["id"], **rest.core.history.window(row["id"], offset, limit)})


@route("GET", f"{SANDBOX}/events", "Events; with `follow` a frame stream", query=("limit", "after", "follow"))
async def events(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("limit", "after", "follow")
    limit, after = whole(query, "limit", 500, 1, 10_000), whole(query, "after")
    row, owner, history = rest.core.sandboxes.known(exchange.who, exchange.ref), exchange.who.owner, rest.core.history
    if flag(query, "follow"):
        await frames.send(exchange, _follow(rest, owner, row["id"], after or 0))
        return
    found = history.events(owner, row["id"], limit + 1, after)
    kept = found[:limit] if after is not None else found[-limit:]
    await exchange.answer({"events": kept, "returned": len(kept), "truncated": len(found) > limit})


async def _follow(rest: Rest, owner: str, sandbox: str, after: int) -> AsyncIterator[frames.Item]:
    yield {"following": True}
    while True:
        news = asyncio.ensure_future(rest.core.history.wait_for_news())
        try:
            found = rest.core.history.events(owner, sandbox, 500, after)
            for event in found:
                after = event["seq"]
                yield event
                if event["kind"] == "ended":
                    return
            if not found:
                await news
        finally:
            news.cancel()
            with suppress(asyncio.CancelledError):
                await news


# Routes of their own modules, here for their entries in the table
from atoll.gateway import rest_approvals, rest_audit, rest_images, rest_keys, rest_network, rest_workspaces  # noqa: E402, F401
from atoll.gateway.functions import routes as function_routes  # noqa: E402, F401
from atoll.gateway.mcp import routes as mcp_routes  # noqa: E402, F401
