"""REST routes for checkpoints and forks. Imported for its entries in the table of `rest`."""

from atoll import model
from atoll.server.request import Exchange
from atoll.server.routes import SANDBOX, Rest, route

CHECKPOINT = "/v1/checkpoints/{name}"


@route("POST", f"{SANDBOX}/checkpoints", "Save its memory, processes and disk", verb="checkpoints.save", status=201)
async def save(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.SaveCheckpoint)
    work = rest.core.checkpoints.save(exchange.who, exchange.ref, request)
    await exchange.answer(await exchange.while_connected(work), 201)


@route("GET", "/v1/checkpoints", "Checkpoints, oldest first", verb="checkpoints.list")
async def list_checkpoints(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"checkpoints": await rest.core.checkpoints.list(exchange.who)})


@route("DELETE", CHECKPOINT, "Remove it and its bytes", verb="checkpoints.remove")
async def remove(rest: Rest, exchange: Exchange) -> None:
    freed = await rest.core.checkpoints.remove(exchange.who, exchange.parts[2])
    await exchange.answer({"ok": True, "freed_bytes": freed})


@route("POST", f"{CHECKPOINT}/restore", "A new sandbox that goes on from it", verb="checkpoints.restore", status=201)
async def restore(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.RestoreCheckpoint)
    work = rest.core.checkpoints.restore(exchange.who, exchange.parts[2], request)
    await exchange.answer(await exchange.while_connected(work), 201)


@route("POST", f"{SANDBOX}/fork", "New sandboxes that go on from this moment", verb="fork", status=201)
async def fork(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.Fork)
    made = await exchange.while_connected(rest.core.checkpoints.fork(exchange.who, exchange.ref, request))
    await exchange.answer({"sandboxes": made}, 201)
