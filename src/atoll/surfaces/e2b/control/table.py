"""The table of the control plane's routes, and what they share."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from atoll import errors, model
from atoll.core.access.ratelimit import Class
from atoll.model import SandboxInfo
from atoll.server.request import LARGE_JSON, Exchange, check_shape
from atoll.surfaces.e2b.served import Served, unknown
from atoll.surfaces.e2b.words import TEMPLATE

MAX_BODY = 1024 * 1024
T = TypeVar("T")
Handler = Callable[[Served, Exchange], Awaitable[None]]


class Route(NamedTuple):
    handler: Handler
    kind: Class


ROUTES: dict[tuple[str, str], Route] = {}


def route(method: str, path: str, kind: Class | None = None) -> Callable[[Handler], Handler]:
    """Enter a handler into the table. `*` stands for one part of the path."""

    def add(handler: Handler) -> Handler:
        ROUTES[method, path] = Route(handler, kind or ("read" if method == "GET" else "write"))
        return handler

    return add


def find(method: str, parts: list[str]) -> Route:
    """Return the route of a request. A part that a route names comes before one that it leaves open."""
    for length in range(len(parts) + 1):  # how many of the parts are left open, few first
        for pattern in _patterns(parts, length):
            if (found := ROUTES.get((method, pattern))) is not None:
                return found
    raise errors.NotFound(f"no route {method} /{'/'.join(parts)[:200]}")


def _patterns(parts: list[str], count: int) -> list[str]:
    if not 0 < len(parts) <= 6:
        return []
    found = []
    for mask in range(1 << len(parts)):
        if mask.bit_count() == count:
            found.append("/".join("*" if mask >> at & 1 else part for at, part in enumerate(parts)))
    return found


async def body_of(exchange: Exchange, kind: type[T], *, optional: bool = False) -> T:
    """Return the request's JSON body. With `optional` an empty one is an object without fields."""
    data = await exchange.body(MAX_BODY)
    if optional and not data.strip():
        data = b"{}"
    if len(data) > LARGE_JSON:
        check_shape(data, kind)
    return model.decode(kind, data)


def ref_of(exchange: Exchange) -> str:
    """Return the sandbox's id in the path, after `sandboxes`."""
    return exchange.parts[exchange.parts.index("sandboxes") + 1]


async def known(app: Served, exchange: Exchange) -> SandboxInfo:
    """Return the sandbox that a path names. One of somebody else's, of another surface, or that has ended is not found."""
    ref = ref_of(exchange)
    try:
        info = await app.core.sandboxes.get(exchange.who, ref)
    except errors.NotFound:
        raise unknown(ref) from None
    if info.id != ref or info.state in ("ending", "ended") or TEMPLATE not in info.labels:
        raise unknown(ref)
    return info
