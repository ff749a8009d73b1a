"""REST routes for commands. Imported for its entries in the table of `rest`."""

from atoll import model
from atoll.core.files.verbs import clean
from atoll.server import frames
from atoll.server.request import Exchange, flag, whole
from atoll.server.routes import SANDBOX, Rest, route

COMMAND = SANDBOX + "/commands/{cid}"


@route("POST", f"{SANDBOX}/exec", "Run a command", verb="commands.exec")
async def exec_command(rest: Rest, exchange: Exchange) -> None:
    await _execute(rest, exchange, await exchange.json(model.ExecSpec))


@route("POST", f"{SANDBOX}/run", "Run code in a language", verb="commands.exec", kind=model.RunSpec)
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


@route("GET", f"{SANDBOX}/commands", "Commands of a sandbox, oldest first", verb="commands.list")
async def list_commands(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"commands": await rest.core.commands.list(exchange.who, exchange.ref)})


@route("GET", COMMAND, "A command and its output so far", verb="commands.poll", query=("stdout_from", "stderr_from"))
async def poll(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("stdout_from", "stderr_from")
    start = whole(query, "stdout_from", 0), whole(query, "stderr_from", 0)
    await exchange.answer(await rest.core.commands.poll(exchange.who, exchange.ref, exchange.command, *start))


@route(
    "GET",
    f"{COMMAND}/stream",
    "Its output from those offsets as a frame stream",
    verb="commands.attach",
    query=("stdout", "stderr"),
)
async def attach(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("stdout", "stderr")
    start = whole(query, "stdout", 0, -1), whole(query, "stderr", 0, -1)
    await frames.send(exchange, rest.core.commands.attach(exchange.who, exchange.ref, exchange.command, *start))


@route("POST", f"{COMMAND}/stdin", "Feed its standard input with the raw body", verb="commands.stdin", query=("eof",))
async def stdin(rest: Rest, exchange: Exchange) -> None:
    eof = flag(exchange.query("eof"), "eof")
    body = exchange.chunks()
    written = await rest.core.commands.stdin(exchange.who, exchange.ref, exchange.command, body, eof)
    await exchange.answer({"written": written})


@route("POST", f"{COMMAND}/signal", "Send it a signal", verb="commands.signal")
async def signal(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.Signal)
    await rest.core.commands.signal(exchange.who, exchange.ref, exchange.command, request.signal, request.group)
    await exchange.answer({})


@route("POST", f"{COMMAND}/kill", "End it with everything it started", verb="commands.kill")
async def kill(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.commands.kill(exchange.who, exchange.ref, exchange.command))


@route("POST", f"{COMMAND}/resize", "Change the size of its terminal", verb="commands.resize")
async def resize(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.Resize)
    await rest.core.commands.resize(exchange.who, exchange.ref, exchange.command, request.rows, request.cols)
    await exchange.answer({})


@route("GET", f"{COMMAND}/foreground", "The process group in front on its terminal", verb="commands.foreground")
async def foreground(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"pgid": await rest.core.commands.foreground(exchange.who, exchange.ref, exchange.command)})


@route("GET", f"{SANDBOX}/processes", "Processes inside", verb="commands.processes")
async def processes(rest: Rest, exchange: Exchange) -> None:
    found = await rest.core.commands.processes(exchange.who, exchange.ref)
    await exchange.answer({"processes": [clean(process) for process in found]})
