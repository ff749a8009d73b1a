"""REST routes for the code interpreter. Imported for its entries in the table of `rest`."""

from atoll import model
from atoll.server import frames
from atoll.server.request import Exchange
from atoll.server.routes import SANDBOX, Rest, route

INTERPRETER = SANDBOX + "/interpreter"
CONTEXTS = SANDBOX + "/contexts"


@route("POST", INTERPRETER, "Run a cell in the code interpreter", verb="interpreter.run")
async def run_cell(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.RunCell)
    interpreter = rest.core.interpreter
    if frames.wanted(exchange):
        await frames.send(exchange, interpreter.stream(exchange.who, exchange.ref, asked))
    else:
        await exchange.answer(await exchange.while_connected(interpreter.run(exchange.who, exchange.ref, asked)))


@route("GET", CONTEXTS, "Contexts of the code interpreter", verb="interpreter.contexts")
async def list_contexts(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"contexts": await rest.core.interpreter.contexts(exchange.who, exchange.ref)})


@route("POST", CONTEXTS, "Make a context of its own", status=201, verb="interpreter.create_context")
async def create_context(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.NewContext)
    made = await exchange.while_connected(rest.core.interpreter.create_context(exchange.who, exchange.ref, asked))
    await exchange.answer(made, 201)


@route("POST", CONTEXTS + "/{sid}/restart", "Begin a context anew", verb="interpreter.restart_context")
async def restart_context(rest: Rest, exchange: Exchange) -> None:
    await rest.core.interpreter.restart_context(exchange.who, exchange.ref, exchange.command)
    await exchange.answer({"ok": True})


@route("DELETE", CONTEXTS + "/{sid}", "End a context with its kernel", verb="interpreter.remove_context")
async def remove_context(rest: Rest, exchange: Exchange) -> None:
    await rest.core.interpreter.remove_context(exchange.who, exchange.ref, exchange.command)
    await exchange.answer({"ok": True})
