"""REST routes for the daemon itself. Imported for its entries in the table of `rest`."""

import os
import time

import atoll
from atoll import config, model
from atoll.core.access.credentials import may
from atoll.server.request import Exchange
from atoll.server.routes import Rest, route


@route("GET", "/v1/health", "Whether the daemon is well, and which one it is", scope="use")
async def health(rest: Rest, exchange: Exchange) -> None:
    told = {"ok": True, "version": atoll.__version__}
    if may(exchange.who, "admin"):  # counts of all owners together, and paths of the host, are no tenant's business
        told |= {
            "pid": os.getpid(),
            "pinned": rest.host.pinned,
            "uptime_s": round(time.time() - rest.host.started_at, 3),
            "sandboxes": rest.core.store.count_live(),
            "home": str(rest.core.home),
            "pool": rest.core.sandboxes.boxes.warmth(),
        }
    await exchange.answer(told)


@route("GET", "/v1/openapi.json", "This document", scope="use")
async def openapi(rest: Rest, exchange: Exchange) -> None:
    from atoll.surfaces.rest.openapi import document

    await exchange.answer(document())


@route("GET", "/v1/runtimes", "Which runtimes work on this machine, and why others do not", scope="use")
async def runtimes(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"runtimes": await rest.core.backend.runtimes()})


@route("GET", "/v1/config", "Every setting with its present value", scope="admin")
async def settings(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(config.show(rest.core.config))


@route(
    "GET",
    "/v1/accounts",
    "What each sandbox, owner and stranger holds of memory, threads, connections and space",
    scope="admin",
)
async def accounts(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"accounts": rest.core.accounts.snapshot()})


@route("POST", "/v1/daemon/stop", "Stop the daemon; sandboxes go on unless `force`", verb="daemon.stop")
async def stop_daemon(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.Stop)
    work = rest.host.stop(asked.force)
    await exchange.answer(await rest.core.auditing.record("daemon.stop", exchange.who, work, asked=asked))


@route(
    "POST", "/v1/daemon/pin", "Keep the daemon even when there is nothing to do, and warm sandboxes", verb="daemon.pin"
)
async def pin(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.Pin)
    await rest.core.auditing.record("daemon.pin", exchange.who, _pin(rest, asked), asked=asked)
    await exchange.answer({"pinned": True, "pid": os.getpid(), "pool": rest.core.sandboxes.boxes.warmth()})


async def _pin(rest: Rest, asked: model.Pin) -> None:
    rest.host.pin()
    rest.core.sandboxes.keep_warm()
    if asked.mode is not None or asked.count:
        await rest.core.sandboxes.boxes.prewarm(asked.mode, asked.count)
