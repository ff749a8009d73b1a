"""The daemon's route that opens this surface's port."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from atoll import errors, model
from atoll.server import frames
from atoll.server.request import Exchange
from atoll.server.routes import Rest, route
from atoll.server.tcp import Listening

if TYPE_CHECKING:
    from atoll.surfaces.e2b.app import E2b


@route("POST", "/v1/e2b", "Serve E2B's interface while this request is open", model.OpenE2b, scope="local")
async def open_e2b(rest: Rest, exchange: Exchange) -> None:
    from atoll.server.tcp import is_loopback
    from atoll.surfaces.e2b.app import E2b
    from atoll.surfaces.e2b.served import Settings

    request = await exchange.json(model.OpenE2b)
    if not is_loopback(request.host):
        raise errors.PermissionDenied(
            f"{request.host} can be reached from other machines, and keys would travel in clear text",
            hint="listen on 127.0.0.1, with a server that speaks TLS in front; --domain tells its name",
        )
    settings = Settings(request.host, request.domain or "", request.runtime)
    await frames.send(exchange, _serving(E2b(rest.core, settings), request.host, request.port))


async def _serving(app: "E2b", host: str, port: int) -> AsyncGenerator[Listening, None]:
    """Serve until the iterator is closed; its one item says where."""
    from atoll.surfaces.e2b.door import E2bDoor

    door = E2bDoor(app)
    samples = asyncio.create_task(app.core.metrics.watch())
    try:
        bound = await door.open(host, port)
        app.settings.domain = app.settings.domain or f"localhost:{bound}"
        app.core.sandboxes.keep_warm()
        yield {"listening": {"host": host, "port": bound}}
        await asyncio.Event().wait()
    finally:
        samples.cancel()
        app.watchers.close()
        await door.close()
