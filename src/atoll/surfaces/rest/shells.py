"""REST routes for shell sessions. Imported for its entries in the table of `rest`."""

from atoll import model
from atoll.server import frames
from atoll.server.request import Exchange
from atoll.server.routes import SANDBOX, Rest, route

SHELLS = SANDBOX + "/shells"
SHELL = SHELLS + "/{sid}"


@route("POST", SHELLS, "Open a shell session", status=201, verb="shells.open")
async def open_shell(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.OpenShell)
    await exchange.answer(await rest.core.shells.open(exchange.who, exchange.ref, asked), 201)


@route("GET", SHELLS, "Open shell sessions", verb="shells.list")
async def list_shells(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"shells": await rest.core.shells.list(exchange.who, exchange.ref)})


@route("POST", f"{SHELL}/run", "Run a command in a session", verb="shells.run")
async def run_in_shell(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.ShellRun)
    shells, where = rest.core.shells, (exchange.who, exchange.ref, exchange.command)
    if asked.background:
        await exchange.answer(await shells.start(*where, asked), 202)
    elif frames.wanted(exchange):
        await frames.send(exchange, shells.stream(*where, asked))
    else:
        await exchange.answer(await exchange.while_connected(shells.run(*where, asked)))


@route("POST", f"{SHELL}/interrupt", "Interrupt what runs in a session", verb="shells.interrupt")
async def interrupt_shell(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.shells.interrupt(exchange.who, exchange.ref, exchange.command))


@route("DELETE", SHELL, "End a session with everything it started", verb="shells.close")
async def close_shell(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.shells.close(exchange.who, exchange.ref, exchange.command))
