"""REST routes for the audit log. A key sees its own records; the local user and admins see all and may verify."""

import asyncio
from collections.abc import AsyncIterator, Mapping

from atoll.core.access.credentials import may
from atoll.server import frames
from atoll.server.request import Exchange, flag, whole
from atoll.server.routes import Rest, route

LOOK_AGAIN = 0.25


@route(
    "GET",
    "/v1/audit",
    "The newest records; with `follow` a frame stream",
    query=("sandbox", "limit", "after", "follow"),
    scope="use",
)
async def audit(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("sandbox", "limit", "after", "follow")
    limit, after = whole(query, "limit", 100, 1, 10_000), whole(query, "after", 0)
    who = "" if may(exchange.who, "admin") else exchange.who.owner
    sandbox = query.get("sandbox") or ""
    if flag(query, "follow"):
        await frames.send(exchange, _follow(rest, sandbox, who, after))
        return
    found = await asyncio.to_thread(lambda: list(rest.core.audit.read(sandbox=sandbox, who=who, after=after)))
    await exchange.answer({"records": found[-limit:], "truncated": len(found) > limit})


async def _follow(rest: Rest, sandbox: str, who: str, after: int) -> AsyncIterator[Mapping[str, object]]:
    log = rest.core.audit
    yield {"following": True}
    while True:
        newest = log.seq
        if newest > after:
            start = after
            for record in await asyncio.to_thread(lambda: list(log.read(sandbox=sandbox, who=who, after=start))):  # noqa: B023
                after = max(after, record["seq"])
                yield record
            after = max(after, newest)
        await asyncio.sleep(LOOK_AGAIN)


@route("GET", "/v1/audit/verify", "Whether the chain of records holds", scope="admin")
async def verify(rest: Rest, exchange: Exchange) -> None:
    verdict = await asyncio.to_thread(rest.core.audit.verify)
    await exchange.answer({"ok": verdict.ok, "records": verdict.records, "problem": verdict.problem})
