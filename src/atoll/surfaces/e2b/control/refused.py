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
    raise WireError(501, "this server does not have this route")


for _method, _path in (
    ("POST", "templates"), ("PATCH", "templates/*"), ("PATCH", "v2/templates/*"),
    ("GET", "secrets"), ("POST", "secrets"), ("GET", "secrets/*"), ("POST", "secrets/*"), ("DELETE", "secrets/*"),
    ("GET", "teams"), ("GET", "nodes"),
):  # fmt: skip
    route(_method, _path)(_not_here)
