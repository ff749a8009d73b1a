"""REST routes for the life of sandboxes. Imported for its entries in the table of `rest`."""

from atoll import model
from atoll.core.files.verbs import clean
from atoll.server import frames
from atoll.server.request import Exchange
from atoll.server.routes import SANDBOX, Rest, route


@route("POST", "/v1/sandboxes", "Create a sandbox", verb="create", status=201)
async def create(rest: Rest, exchange: Exchange) -> None:
    spec = await exchange.json(model.CreateSandbox)
    if frames.wanted(exchange):
        await frames.send(exchange, rest.core.sandboxes.create_watched(exchange.who, spec))
        return
    info = await exchange.while_connected(rest.core.sandboxes.create(exchange.who, spec))
    await exchange.answer(info, 201)


@route("GET", "/v1/sandboxes", "List sandboxes", verb="list", query=("state", "name"))
async def list_sandboxes(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("state", "name")
    found = await rest.core.sandboxes.list(exchange.who, state=query.get("state", "active"), name=query.get("name"))
    await exchange.answer({"sandboxes": found})


@route("GET", SANDBOX, "One sandbox", verb="get")
async def get(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.sandboxes.get(exchange.who, exchange.ref))


@route("GET", f"{SANDBOX}/usage", "What it uses, as its agent counts", verb="usage")
async def usage(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(clean(await rest.core.sandboxes.usage(exchange.who, exchange.ref)))


@route("DELETE", SANDBOX, "Destroy a sandbox", verb="destroy")
async def destroy(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.sandboxes.destroy(exchange.who, exchange.ref))


@route("POST", "/v1/sessions", "A tenant's own session, found or made", verb="sessions.obtain")
async def obtain_session(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.ObtainSession)
    if frames.wanted(exchange):
        await frames.send(exchange, rest.core.sessions.obtain_watched(exchange.who, asked))
        return
    await exchange.answer(await exchange.while_connected(rest.core.sessions.obtain(exchange.who, asked)))


@route("GET", "/v1/sessions", "A tenant's own session as it is", verb="sessions.find", query=("tenant", "holder"))
async def find_session(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("tenant", "holder")
    found = await rest.core.sessions.find(exchange.who, query.get("tenant", ""), query.get("holder", ""))
    await exchange.answer({"sandbox": found})


def _lifecycle(verb: str, does: str) -> None:
    @route("POST", f"{SANDBOX}/{verb}", does, verb=verb)
    async def change(rest: Rest, exchange: Exchange) -> None:
        await exchange.json(model.Request)
        await exchange.answer(await getattr(rest.core.sandboxes, verb)(exchange.who, exchange.ref))


_lifecycle("start", "Start a stopped sandbox")
_lifecycle("stop", "End its processes, keep its disk")
_lifecycle("pause", "Freeze it")
_lifecycle("resume", "Thaw it")


@route("POST", f"{SANDBOX}/extend", "Move its end", verb="extend")
async def extend(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.Extend)
    await exchange.answer(await rest.core.sandboxes.extend(exchange.who, exchange.ref, request))
