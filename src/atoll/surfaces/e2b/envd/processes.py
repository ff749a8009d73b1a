"""process.Process: starting, following and feeding processes."""

from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from atoll import errors, model
from atoll.core.access.principals import new_id
from atoll.model import Chunk, CommandInfo, ExecResult, ExecSpec
from atoll.surfaces.e2b.envd.calls import Call, stream, unary
from atoll.surfaces.e2b.envd.connect import Fields, Json, RpcError, read_frames
from atoll.surfaces.e2b.envd.people import resolve
from atoll.surfaces.e2b.envd.started import NONE, PIPE, PREFIX, TERMINAL, Begun

KEEPALIVE: Json = {"event": {"keepalive": {}}}
PIECE, PTY_PIECE = 32 * 1024, 16 * 1024
SIGNALS = {
    1: "hangup", 2: "interrupt", 3: "quit", 4: "illegal instruction", 5: "trace/breakpoint trap", 6: "aborted", 7: "bus error",
    8: "floating point exception", 9: "killed", 10: "user defined signal 1", 11: "segmentation fault", 12: "user defined signal 2",
    13: "broken pipe", 14: "alarm clock", 15: "terminated",
}  # fmt: skip
TERMINATE = ("SIGNAL_SIGTERM", 15)
KILL = ("SIGNAL_SIGKILL", 9)


@stream("process.Process", "Start", KEEPALIVE, ends_with_call=False)
async def start(call: Call, asked: Fields) -> AsyncIterator[Json]:
    """The process goes on when the caller goes away; the call's deadline is the life of the process."""
    process = asked.child("process")
    if process is None:
        raise RpcError("invalid_argument", "process is missing")
    person = await call.starter()
    pty = asked.child("pty")
    takes = TERMINAL if pty is not None else PIPE if asked.flag("stdin", True) else NONE
    argv = [process.text("cmd"), *process.texts("args")]
    envs, cwd = process.pairs("envs"), process.text("cwd")
    config = {"cmd": argv[0], "args": argv[1:], "envs": envs, "cwd": cwd}
    fields: dict[str, object] = {
        "argv": argv,
        "cwd": resolve(cwd, person),
        "env": {"E2B_SANDBOX_ID": call.sandbox, **envs},
        "user": person.name,
        "stdin_stream": takes == PIPE,
        "timeout_ms": call.timeout_ms or 0,
        "background": True,
        "id": PREFIX + new_id(),
    }
    if pty is not None:
        fields["pty"] = _size(pty)
    spec = model.convert(ExecSpec, fields)
    try:
        made = await call.app.core.commands.spawn(call.who, call.sandbox, spec)
    except (errors.FileNotFound, errors.NotADirectory, errors.FilePermission) as error:
        raise RpcError("invalid_argument", f"cwd: {error.message}") from None
    if made.error_code is not None or made.pid is None:
        raise RpcError("invalid_argument", f"{argv[0]!r:.200} cannot be started: {made.error_code}")
    begun = Begun(made.command_id, made.pid, config, asked.text("tag"), takes)
    call.app.started.add(call.sandbox, begun)
    async with aclosing(_events(call, begun, 0)) as events:
        async for event in events:
            yield event


@stream("process.Process", "Connect", KEEPALIVE)
async def connect(call: Call, asked: Fields) -> AsyncIterator[Json]:
    """Output from now on; of a process that has ended, how it ended."""
    begun = await call.app.started.select(call.who, call.sandbox, asked.child("process"))
    async with aclosing(_events(call, begun, -1)) as events:
        async for event in events:
            yield event


async def _events(call: Call, begun: Begun, offset: int) -> AsyncGenerator[Json, None]:
    core = call.app.core
    yield {"event": {"start": {"pid": begun.pid}}}
    try:
        async with aclosing(core.commands.attach(call.who, call.sandbox, begun.command, offset, offset)) as found:  # type: ignore[type-var]
            async for item in found:
                if isinstance(item, Chunk):
                    for event in _output(begun, item):
                        yield event
                elif isinstance(item, ExecResult):
                    yield _end(item)
    except errors.FailedPrecondition:  # it ended so long ago that only its record is left
        yield _end(await core.commands.poll(call.who, call.sandbox, begun.command))


def _output(begun: Begun, chunk: Chunk) -> list[Json]:
    terminal = begun.takes == TERMINAL
    name, size = ("pty", PTY_PIECE) if terminal else ("stdout" if chunk.channel == 1 else "stderr", PIECE)
    pieces = (chunk.data[at : at + size] for at in range(0, len(chunk.data), size))
    return [{"event": {"data": {name: b64encode(piece).decode()}}} for piece in pieces]


def _end(result: ExecResult | CommandInfo) -> Json:
    if result.timed_out:
        raise RpcError("deadline_exceeded", "the process ran longer than its timeout and was killed")
    if result.signal is not None:
        status = f"signal: {SIGNALS.get(result.signal, f'signal {result.signal}')}"
        return {"event": {"end": {"exitCode": -1, "exited": False, "status": status, "error": status}}}
    if result.exit_code is None:
        raise RpcError("internal", "how the process ended is not known")
    status = f"exit status {result.exit_code}"
    end: Json = {"exitCode": result.exit_code, "exited": True, "status": status}
    return {"event": {"end": {**end, "error": status} if result.exit_code else end}}


@unary("process.Process", "List")
async def list_living(call: Call, asked: Fields) -> Json:
    found = await call.app.started.living(call.who, call.sandbox)
    return {
        "processes": [{"config": one.config, "pid": one.pid, **({"tag": one.tag} if one.tag else {})} for one in found]
    }


@unary("process.Process", "SendInput")
async def send_input(call: Call, asked: Fields) -> Json:
    begun = await call.app.started.select(call.who, call.sandbox, asked.child("process"))
    await _feed(call, begun, asked.child("input"))
    return {}


async def _feed(call: Call, begun: Begun, given: Fields | None) -> None:
    stdin = given.data("stdin") if given is not None else None
    terminal = given.data("pty") if given is not None else None
    data, kind = (stdin, PIPE) if stdin is not None else (terminal, TERMINAL)
    if data is None:
        raise RpcError("invalid_argument", "input is missing")
    if begun.closed or begun.takes != kind:
        raise RpcError("internal", "this process takes no such input")
    await _alive(call.app.core.commands.stdin(call.who, call.sandbox, begun.command, data, False), begun, "internal")


async def _alive(work: Any, begun: Begun, otherwise: str = "not_found") -> Any:
    try:
        return await work
    except errors.FailedPrecondition as error:
        raise RpcError(otherwise, f"process {begun.pid}: {error.message}") from None


@unary("process.Process", "CloseStdin")
async def close_stdin(call: Call, asked: Fields) -> Json:
    begun = await call.app.started.select(call.who, call.sandbox, asked.child("process"))
    if begun.takes == TERMINAL:
        raise RpcError("failed_precondition", "a terminal has no end of input: send 0x04")
    if begun.takes == NONE:
        raise RpcError("internal", "this process takes no input")
    if not begun.closed:
        await _alive(call.app.core.commands.stdin(call.who, call.sandbox, begun.command, b"", True), begun)
        begun.closed = True
    return {}


@unary("process.Process", "SendSignal")
async def send_signal(call: Call, asked: Fields) -> Json:
    begun = await call.app.started.select(call.who, call.sandbox, asked.child("process"))
    try:
        signal: str | int | None = asked.whole("signal")
    except RpcError:
        signal = asked.text("signal")
    commands = call.app.core.commands
    if signal in KILL:
        info = await commands.poll(call.who, call.sandbox, begun.command)
        if info.status != "running":
            raise RpcError("not_found", f"process {begun.pid} has ended")
        await commands.kill(call.who, call.sandbox, begun.command)
    elif signal in TERMINATE:
        await _alive(commands.signal(call.who, call.sandbox, begun.command, TERMINATE[1]), begun)
    else:
        raise RpcError("unimplemented", "SIGNAL_SIGTERM and SIGNAL_SIGKILL can be sent")
    return {}


@unary("process.Process", "Update")
async def update(call: Call, asked: Fields) -> Json:
    begun = await call.app.started.select(call.who, call.sandbox, asked.child("process"))
    pty = asked.child("pty")
    if pty is not None:
        size = _size(pty)
        commands = call.app.core.commands
        await _alive(
            commands.resize(call.who, call.sandbox, begun.command, size["rows"], size["cols"]), begun, "internal"
        )
    return {}


def _size(pty: Fields) -> dict[str, int]:
    size = pty.child("size")
    found = {name: size.whole(name) if size is not None else None for name in ("rows", "cols")}
    usual = {"rows": 24, "cols": 80}
    checked = {name: usual[name] if value is None else value for name, value in found.items()}
    if not all(1 <= value <= 4096 for value in checked.values()):
        raise RpcError("invalid_argument", "rows and cols are from 1 to 4096")
    return checked


async def stream_input(call: Call) -> None:
    """Input as it comes. The first message names the process."""
    begun: Begun | None = None
    async for message in read_frames(call.exchange):
        if (first := message.child("start")) is not None:
            begun = await call.app.started.select(call.who, call.sandbox, first.child("process"))
        elif (data := message.child("data")) is not None:
            if begun is None:
                raise RpcError("invalid_argument", "the first message must be `start`")
            await _feed(call, begun, data.child("input"))
    if begun is None:
        raise RpcError("invalid_argument", "the stream did not name a process")
