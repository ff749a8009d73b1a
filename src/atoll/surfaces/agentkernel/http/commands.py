"""Commands in a named sandbox, waited for or detached."""

from atoll import errors
from atoll.model import ExecSpec
from atoll.server.request import Exchange
from atoll.surfaces.agentkernel.http import bodies
from atoll.surfaces.agentkernel.http.table import Served, command_spec, gather, known, ok, route
from atoll.words import agentkernel as words


async def _exec_spec(app: Served, exchange: Exchange) -> ExecSpec:
    request = await app.body(exchange, bodies.Exec)
    spec = command_spec(request.command, request.env, request.workdir or request.cwd, request.timeout_ms)
    if request.sudo:
        spec.user = "root"  # of the sandbox, as commands are without it
    return spec


@route("POST", "sandboxes/*/exec")
async def execute(app: Served, exchange: Exchange) -> None:
    spec = await _exec_spec(app, exchange)
    info = await known(app, exchange)
    work = gather(app.core.commands.stream(exchange.who, info.id, spec))
    await app.answer_run(exchange, await exchange.while_connected(work))


@route("POST", "sandboxes/*/exec/detach")
async def detach(app: Served, exchange: Exchange) -> None:
    spec = await _exec_spec(app, exchange)
    spec.background = True
    info = await known(app, exchange)
    made = await app.core.commands.background(exchange.who, info.id, spec)
    await ok(exchange, words.detached(info.name or info.id, made))


@route("GET", "sandboxes/*/exec/detached")
async def detached_list(app: Served, exchange: Exchange) -> None:
    info = await known(app, exchange)
    found = await app.core.commands.list(exchange.who, info.id)
    await ok(exchange, [words.detached(info.name or info.id, entry) for entry in found if entry.background])


@route("GET", "sandboxes/*/exec/detached/*")
async def detached_status(app: Served, exchange: Exchange) -> None:
    info = await known(app, exchange)
    found = await app.core.commands.poll(exchange.who, info.id, exchange.parts[4])
    await ok(exchange, words.detached(info.name or info.id, found))


@route("GET", "sandboxes/*/exec/detached/*/logs")
async def detached_logs(app: Served, exchange: Exchange) -> None:
    stream = exchange.query("stream").get("stream")
    if stream not in (None, "stdout", "stderr"):
        raise errors.InvalidArgument("stream must be stdout or stderr")
    info = await known(app, exchange)
    found = await app.core.commands.poll(exchange.who, info.id, exchange.parts[4])
    both = {"stdout": found.stdout, "stderr": found.stderr}
    await ok(exchange, both if stream is None else {stream: both[stream]})


@route("DELETE", "sandboxes/*/exec/detached/*")
async def detached_kill(app: Served, exchange: Exchange) -> None:
    info = await known(app, exchange)
    await app.core.commands.kill(exchange.who, info.id, exchange.parts[4])
    await ok(exchange, "Command killed")
