"""A caller's events: the last or next ones as an answer, or all that come as a frame stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from atoll.core import Core
from atoll.core.commands.history import History
from atoll.server import frames
from atoll.server.request import Exchange, flag, whole

WINDOW = ("limit", "after", "follow")  # the query of a route that answers so


async def answer(exchange: Exchange, core: Core, ref: str | None, kind: str | None = None) -> None:
    """Filter events by sandbox and by kind; None takes all."""
    query = exchange.query(*WINDOW)
    limit, after = whole(query, "limit", 500, 1, 10_000), whole(query, "after")
    if flag(query, "follow"):
        sandbox = None if ref is None else core.sandboxes.known(exchange.who, ref)["id"]
        await frames.send(exchange, _follow(core.history, exchange.who.owner, sandbox, after or 0, kind))
        return
    kept, more = await core.past.events(exchange.who, ref, limit, after, kind)
    await exchange.answer({"events": kept, "returned": len(kept), "truncated": more})


async def _follow(
    history: History, owner: str, sandbox: str | None, after: int, kind: str | None
) -> AsyncIterator[frames.Item]:
    yield {"following": True}
    while True:
        news = asyncio.ensure_future(history.wait_for_news())
        try:
            found = history.events(owner, sandbox, 500, after, kind)
            for event in found:
                after = event["seq"]
                yield event
                if sandbox is not None and event["kind"] == "ended":
                    return
            if not found:
                await news
        finally:
            news.cancel()
            with suppress(asyncio.CancelledError):
                await news
