"""Lists of sandboxes: filters, order, pages."""

from datetime import UTC, datetime
from urllib.parse import parse_qsl, unquote

from atoll import errors
from atoll.model import SandboxInfo
from atoll.server.request import Exchange
from atoll.surfaces.e2b import words
from atoll.surfaces.e2b.control.pages import page_of
from atoll.surfaces.e2b.control.table import route
from atoll.surfaces.e2b.replies import query_of
from atoll.surfaces.e2b.served import Served

STATES = frozenset(("running", "paused"))


@route("GET", "v2/sandboxes")
async def list_pages(app: Served, exchange: Exchange) -> None:
    query = query_of(exchange)
    wanted = frozenset(query["state"].split(",")) if query.get("state") else STATES
    if not wanted <= STATES:
        raise errors.InvalidArgument("state is running, paused or both, joined by a comma")
    order = query.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise errors.InvalidArgument("order is asc or desc")
    found = [info for info in await _mine(app, exchange, query) if words.state_of(info) in wanted]
    if query.get("startedAfter"):
        after = _instant(query["startedAfter"])
        found = [info for info in found if info.created_at >= after - 1e-6]
    if query.get("template"):
        found = [info for info in found if info.labels[words.TEMPLATE] == query["template"]]
    running = sum(1 for info in found if words.state_of(info) == "running")
    page, more = page_of(found, query, _place, newest_first=order == "desc")
    total = ((b"x-total-running", str(running).encode()),) if "running" in wanted else ()
    await exchange.answer([words.listed(info) for info in page], 200, more + total)


@route("GET", "sandboxes")
async def list_running(app: Served, exchange: Exchange) -> None:
    found = [info for info in await _mine(app, exchange, query_of(exchange)) if words.state_of(info) == "running"]
    found.sort(key=_place, reverse=True)
    await exchange.answer([words.listed(info) for info in found])


async def _mine(app: Served, exchange: Exchange, query: dict[str, str]) -> list[SandboxInfo]:
    """Return the caller's sandboxes of this surface with the metadata that the query asks for."""
    pairs = _metadata(query.get("metadata", ""))
    return [
        info
        for info in await app.core.sandboxes.list(exchange.who)
        if words.TEMPLATE in info.labels
        and info.state not in ("creating", "ending")
        and all(words.metadata_of(info).get(key) == value for key, value in pairs)
    ]


def _metadata(text: str) -> list[tuple[str, str]]:
    """Return the pairs of a filter. They come percent-encoded inside a form that is itself a query parameter."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=64)
    except ValueError:
        raise errors.InvalidArgument("metadata is no form of key=value pairs") from None
    return [(unquote(key), unquote(value)) for key, value in pairs]


def _instant(text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise errors.InvalidArgument(f"startedAfter is no time: {text!r:.80}") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _place(info: SandboxInfo) -> tuple[float, str]:
    return info.created_at, info.id
