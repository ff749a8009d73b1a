"""REST routes for volumes. Imported for its entries in the table of `rest`."""

from atoll import model
from atoll.server.request import Exchange
from atoll.server.routes import Rest, route


@route("POST", "/v1/volumes", "Make a volume", verb="volumes.create", status=201)
async def create(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.CreateVolume)
    await exchange.answer(await rest.core.volumes.create(exchange.who, asked), 201)


@route("GET", "/v1/volumes", "The caller's volumes", verb="volumes.list")
async def list_volumes(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"volumes": await rest.core.volumes.list(exchange.who)})


@route("GET", "/v1/volumes/{name}", "One volume, by name or id", verb="volumes.get")
async def get(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.volumes.get(exchange.who, exchange.ref))


@route("DELETE", "/v1/volumes/{name}", "Remove a volume with everything in it", verb="volumes.remove")
async def remove(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.volumes.remove(exchange.who, exchange.ref))
