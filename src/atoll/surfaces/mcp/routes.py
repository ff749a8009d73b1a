"""The daemon's routes for MCP: opening the HTTP listener. (stdio is a WebSocket, see `stdio.py`.)"""

from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec

from atoll.server import frames
from atoll.server.request import Exchange
from atoll.server.routes import Rest, route
from atoll.surfaces.mcp.settings import OpenHttp


@route("POST", "/v1/mcp/http", "Serve MCP over HTTP while this request is open", OpenHttp, scope="local")
async def open_http(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(OpenHttp)
    await frames.send(exchange, _serve(rest, msgspec.structs.replace(request, project=None)))


async def _serve(rest: Rest, request: OpenHttp) -> AsyncIterator[frames.Item]:
    from atoll.server.tcp import listening
    from atoll.surfaces.mcp.http import McpHttp

    app = McpHttp(rest.core, request)
    try:
        async with aclosing(listening(app, request.host, request.port)) as door:
            async for item in door:
                yield item
    finally:
        await app.close()
