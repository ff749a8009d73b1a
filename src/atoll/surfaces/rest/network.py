"""REST routes for the network: lists of hosts, refusals, exposed ports. Imported for its entries in the table of `rest`."""

from atoll import errors, model
from atoll.egress import presets
from atoll.server import events
from atoll.server.request import Exchange
from atoll.server.routes import SANDBOX, Rest, route

BLOCKED = "blocked"


@route("GET", f"{SANDBOX}/hosts", "The hosts it may reach, and what it used", verb="hosts.get")
async def hosts(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.hosts.get(exchange.who, exchange.ref))


@route("POST", f"{SANDBOX}/hosts", "Change the hosts it may reach, at once", verb="hosts.change")
async def change_hosts(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.ChangeHosts)
    await exchange.answer(await rest.core.hosts.change(exchange.who, exchange.ref, request))


@route("GET", f"{SANDBOX}/exposures", "Ports of it that have a URL", verb="ports.list")
async def exposures(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"exposures": await rest.core.exposures.list(exchange.who, exchange.ref)})


@route("POST", f"{SANDBOX}/exposures", "Give a port inside a URL", verb="ports.expose", status=201)
async def expose(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.Expose)
    found = await rest.core.exposures.expose(exchange.who, exchange.ref, request.port, request.host)
    await exchange.answer(found, 201)


@route("DELETE", f"{SANDBOX}/exposures/{{port}}", "Take the URL of a port away", verb="ports.unexpose")
async def unexpose(rest: Rest, exchange: Exchange) -> None:
    text = exchange.parts[4]
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise errors.InvalidArgument("a port is a number from 1 to 65535")
    closed = await rest.core.exposures.unexpose(exchange.who, exchange.ref, int(text))
    await exchange.answer({"ok": closed, "port": int(text)})


@route("GET", "/v1/egress", "Whether network policy can be enforced on this machine", scope="admin")
async def egress(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.network.status())


@route(
    "GET",
    "/v1/egress/log",
    "Refusals of all sandboxes; with `follow` a frame stream",
    query=events.WINDOW,
    scope="admin",
)
async def egress_log(rest: Rest, exchange: Exchange) -> None:
    await events.answer(exchange, rest.core, None, BLOCKED)


@route("GET", "/v1/policy/hosts", "The hosts of a mode, of a run, or the default ones", query=("of",), scope="admin")
async def policy_hosts(rest: Rest, exchange: Exchange) -> None:
    name = exchange.query("of").get("of") or "run"
    known = {"run": presets.run_hosts, "default": presets.default_hosts}
    await exchange.answer({"of": name, "hosts": known[name]() if name in known else presets.mode(name)})
