"""REST routes for the life of sandboxes. Imported for its entries in the table of `rest`."""

from atoll import model
from atoll.core.files.verbs import clean
from atoll.server import frames
from atoll.server.request import Exchange
from atoll.surfaces.rest.routes import SANDBOX, Rest, route


@route("POST", "/v1/sandboxes", "Create a sandbox", model.CreateSandbox, model.SandboxInfo, status=201, scope="use")
async def create(rest: Rest, exchange: Exchange) -> None:
    spec = await exchange.json(model.CreateSandbox)
    if frames.wanted(exchange):
        await frames.send(exchange, rest.core.sandboxes.create_watched(exchange.who, spec))
        return
    info = await exchange.while_connected(rest.core.sandboxes.create(exchange.who, spec))
    await exchange.answer(info, 201)


@route("GET", "/v1/sandboxes", "List sandboxes", query=("state", "name"), scope="use")
async def list_sandboxes(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("state", "name")
    found = await rest.core.sandboxes.list(exchange.who, state=query.get("state", "active"), name=query.get("name"))
    await exchange.answer({"sandboxes": found})


@route("GET", SANDBOX, "One sandbox", answer=model.SandboxInfo, scope="use")
async def get(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.sandboxes.get(exchange.who, exchange.ref))


@route("GET", f"{SANDBOX}/usage", "What it uses, as its agent counts", scope="use")
async def usage(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(clean(await rest.core.sandboxes.usage(exchange.who, exchange.ref)))


@route("DELETE", SANDBOX, "Destroy a sandbox", answer=model.SandboxInfo, scope="use")
async def destroy(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.sandboxes.destroy(exchange.who, exchange.ref))


def _lifecycle(verb: str, does: str) -> None:
    @route("POST", f"{SANDBOX}/{verb}", does, answer=model.SandboxInfo, scope="use")
    async def change(rest: Rest, exchange: Exchange) -> None:
        await exchange.json(model.Request)
        await exchange.answer(await getattr(rest.core.sandboxes, verb)(exchange.who, exchange.ref))


_lifecycle("start", "Start a stopped sandbox")
_lifecycle("stop", "End its processes, keep its disk")
_lifecycle("pause", "Freeze it")
_lifecycle("resume", "Thaw it")


@route("POST", f"{SANDBOX}/extend", "Move its end", model.Extend, model.SandboxInfo, scope="use")
async def extend(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.Extend)
    await exchange.answer(await rest.core.sandboxes.extend(exchange.who, exchange.ref, request))
