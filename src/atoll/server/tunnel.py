"""A WebSocket as a pipe to a port inside a sandbox: binary messages are bytes, the close of either side closes both."""

import asyncio

from atoll import errors, model
from atoll.core.access.principals import Principal
from atoll.core.files.ports import Ports, Tunnel
from atoll.server.request import Receive, Send, wire

PROTOCOL_ERROR = 1003
POLICY = 1008


async def serve(ports: Ports, who: Principal, ref: str, port: str, receive: Receive, send: Send) -> None:
    """Connect first, accept then: a port nobody listens on is a refused handshake with the error as its body."""
    await receive()  # websocket.connect
    try:
        if not (port.isascii() and port.isdigit() and len(port) <= 5):
            raise errors.InvalidArgument("a port is a number from 1 to 65535")
        async with ports.connect(who, ref, int(port)) as tunnel:
            await send({"type": "websocket.accept"})
            await _pipe(tunnel, receive, send)
    except errors.AtollError as error:
        await refuse(error, send)


async def refuse(error: errors.AtollError, send: Send) -> None:
    """Answer the handshake like any other request that failed."""
    body = model.encode({"error": wire(error)})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "websocket.http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


async def _pipe(tunnel: Tunnel, receive: Receive, send: Send) -> None:
    async def inwards() -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("bytes")
            if data is None:
                await send({"type": "websocket.close", "code": PROTOCOL_ERROR, "reason": "binary messages only"})
                return
            if not data:
                tunnel.send_eof()  # an empty message: no more from the caller
                continue
            try:
                await tunnel.send(data)
            except (BrokenPipeError, errors.AtollError):
                pass  # the far side takes nothing more; it may still send

    async def outwards() -> None:
        async for data in tunnel:
            await send({"type": "websocket.send", "bytes": data})
        await send({"type": "websocket.close", "code": 1000})

    tasks = [asyncio.ensure_future(inwards()), asyncio.ensure_future(outwards())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
