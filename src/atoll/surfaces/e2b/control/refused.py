"""Routes of the contract that this server does not have: each says so, with the status that its clients know."""

from atoll.server.request import Exchange
from atoll.surfaces.e2b.control.table import known, route
from atoll.surfaces.e2b.replies import WireError
from atoll.surfaces.e2b.served import Served


@route("POST", "sandboxes/*/fork")
async def no_forks(app: Served, exchange: Exchange) -> None:
    await known(app, exchange)
    raise WireError(501, "this server cannot copy what runs in a sandbox yet")


async def _not_here(app: Served, exchange: Exchange) -> None:
    raise WireError(501, "this server does not have templates of its own, volumes, secrets or teams yet")


for _method, _path in (
    ("GET", "templates"), ("GET", "v2/templates"), ("POST", "templates"), ("POST", "v2/templates"), ("POST", "v3/templates"),
    ("GET", "templates/*"), ("PATCH", "templates/*"), ("PATCH", "v2/templates/*"), ("GET", "templates/*/files/*"),
    ("POST", "v2/templates/*/builds/*"), ("GET", "templates/*/builds/*/status"), ("GET", "templates/*/builds/*/logs"),
    ("GET", "templates/*/tags"), ("POST", "templates/tags"), ("DELETE", "templates/tags"),
    ("GET", "volumes"), ("POST", "volumes"), ("GET", "volumes/*"), ("DELETE", "volumes/*"),
    ("GET", "secrets"), ("POST", "secrets"), ("GET", "secrets/*"), ("POST", "secrets/*"), ("DELETE", "secrets/*"),
    ("GET", "teams"), ("GET", "nodes"),
):  # fmt: skip
    route(_method, _path)(_not_here)
