"""The daemon's end of `atoll mcp`: a WebSocket whose first message says what was chosen, then one JSON-RPC message each way."""

import asyncio
from typing import Any

from atoll import errors, model
from atoll.core import Core
from atoll.core.access.principals import Principal
from atoll.server.request import Receive, Send, wire
from atoll.server.tunnel import refuse
from atoll.surfaces.mcp import hello
from atoll.surfaces.mcp.client import Client
from atoll.surfaces.mcp.rpc import Conversation, encode, id_of, parse
from atoll.surfaces.mcp.settings import Settings

MAX_MESSAGES, MAX_BYTES = 20_000, 256 * 1024 * 1024  # of messages under way


async def serve(core: Core, who: Principal, receive: Receive, send: Send) -> None:
    await receive()  # websocket.connect
    if who.kind != "local":
        await refuse(errors.PermissionDenied("MCP on stdio is for the daemon's own user"), send)
        return
    await send({"type": "websocket.accept"})
    try:
        first = await receive()
        if first["type"] != "websocket.receive":
            return
        settings = model.decode(Settings, _data(first))
    except errors.AtollError as error:
        await send({"type": "websocket.close", "code": 1008, "reason": wire(error)["message"][:100]})
        return
    await _converse(Client(core, who, settings, source="stdio"), receive, send)


async def _converse(client: Client, receive: Receive, send: Send) -> None:
    async def tell(message: Any) -> None:
        await send({"type": "websocket.send", "bytes": (encode(message) + "\n").encode()})

    conversation = Conversation(client, tell)
    tasks: dict[asyncio.Task[None], int] = {}

    async def handle(message: Any) -> None:
        answer = await conversation.answer(message)
        if answer is not None:
            await tell(answer)

    try:
        while True:
            message = await receive()
            if message["type"] != "websocket.receive":
                return
            raw = _data(message)
            try:
                parsed = parse(raw)
            except ValueError:
                await tell(hello.failure(None, hello.PARSE_ERROR, "this is not JSON"))
                continue
            if len(tasks) >= MAX_MESSAGES or sum(tasks.values()) + len(raw) > MAX_BYTES:
                # Waiting here instead would hide from us that the client has gone.
                await tell(hello.failure(id_of(parsed), hello.INTERNAL, "too many messages under way"))
                continue
            task = asyncio.create_task(handle(parsed))
            tasks[task] = len(raw)
            task.add_done_callback(tasks.pop)
    finally:
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(set(tasks), timeout=30)
        await client.close()


def _data(message: dict[str, Any]) -> bytes:
    data = message.get("bytes")
    return data if data is not None else (message.get("text") or "").encode("utf-8", "replace")
