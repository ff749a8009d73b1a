"""REST routes for what has happened: transcripts and events. Imported for its entries in the table of `rest`."""

from atoll.server import events
from atoll.server.request import Exchange, whole
from atoll.server.routes import SANDBOX, Rest, route


@route("GET", f"{SANDBOX}/log", "A window of the transcript", query=("offset", "limit"), verb="history.transcript")
async def transcript(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("offset", "limit")
    offset, limit = whole(query, "offset", 0), whole(query, "limit", 0)
    await exchange.answer(await rest.core.past.transcript(exchange.who, exchange.ref, offset, limit))


@route("GET", f"{SANDBOX}/events", "Events; with `follow` a frame stream", query=events.WINDOW, verb="history.events")
async def sandbox_events(rest: Rest, exchange: Exchange) -> None:
    await events.answer(exchange, rest.core, exchange.ref)
