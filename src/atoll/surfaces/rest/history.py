"""REST routes for what has happened: transcripts and events. Imported for its entries in the table of `rest`."""

from atoll.core.commands.history import check_window
from atoll.server import events
from atoll.server.request import Exchange, whole
from atoll.server.routes import SANDBOX, Rest, route


@route("GET", f"{SANDBOX}/log", "A window of the transcript", query=("offset", "limit"), scope="use")
async def transcript(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("offset", "limit")
    offset, limit = whole(query, "offset", 0), whole(query, "limit", 0)
    check_window(offset, limit)
    row = rest.core.sandboxes.known(exchange.who, exchange.ref)
    await exchange.answer({"sandbox_id": row["id"], **rest.core.history.window(row["id"], offset, limit)})


@route("GET", f"{SANDBOX}/events", "Events; with `follow` a frame stream", query=events.WINDOW, scope="use")
async def sandbox_events(rest: Rest, exchange: Exchange) -> None:
    row = rest.core.sandboxes.known(exchange.who, exchange.ref)
    await events.answer(exchange, rest.core.history, row["id"])
