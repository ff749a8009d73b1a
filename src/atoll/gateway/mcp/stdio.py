"""The daemon's end of `atoll mcp`: a WebSocket whose first message says what was chosen, then one JSON-RPC message each way."""

import asyncio
from typing import Any

from atoll import errors, model
from atoll.core import Core
from atoll.core.access import Principal
from atoll.gateway.exchange import Receive, Send, wire
from atoll.gateway.mcp import hello
from atoll.gateway.mcp.client import Client
from atoll.gateway.mcp.rpc import Conversation, encode, parse
from atoll.gateway.mcp.settings import Settings

MAX_WAITING = 256  # messages under way; more wait in the client's pipe


async def serve(core: Core, who: Principal, receive: Receive, send: Send) -> None:
    await receive()  # websocket.connect
    await send({"type": "websocket.accept"})
    try:
        first = await receive()
        if first["type"] != "websocket.receive":
            return
        settings = model.decode(Settings, _data(first))
    except errors.AtollError as error:
        await send({"type": "websocket.close", "code": 1008, "reason": wire(error)["message"][:100]})
        return
    await _converse(Client(core, who, settings), receive, send)


async def _converse(client: Client, receive: Receive, send: Send) -> None:
    async def tell(message: Any) -> None:
        await send({"type": "websocket.send", "bytes": (encode(message) + "\n").encode()})

    conversation = Conversation(client, tell)
    tasks: set[asyncio.Task[None]] = set()
    room = asyncio.Semaphore(MAX_WAITING)

    async def handle(raw: bytes) -> None:
        try:
            try:
                message = parse(raw)
            except ValueError:
                answer: Any = hello.failure(None, hello.PARSE_ERROR, "this is not JSON")
            else:
                answer = await conversation.answer(message)
            if answer is not None:
                await tell(answer)
        finally:
            room.release()

    try:
        while True:
            message = await receive()
            if message["type"] != "websocket.receive":
                return
            await room.acquire()
            task = asyncio.create_task(handle(_data(message)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=30)
        await client.close()


def _data(message: dict[str, Any]) -> bytes:
    data = message.get("bytes")
    return data if data is not None else (message.get("text") or "").encode("utf-8", "replace")
