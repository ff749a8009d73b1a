"""The daemon's end of `atoll mcp`: a WebSocket whose first message says what was chosen, then one JSON-RPC message each way.

The daemon's own user chooses freely. A key reaches it from another machine: it chooses toolset, tenant and runtime, its calls
count against its rates, its messages against its memory, and it is cut when the key is taken away.
"""

import asyncio
from typing import Any

from atoll import accounts, errors, model
from atoll.core import Core
from atoll.core.access.credentials import may
from atoll.core.access.principals import Principal
from atoll.server.request import Event, Receive, Send, wire
from atoll.server.tunnel import refuse
from atoll.surfaces.mcp import hello
from atoll.surfaces.mcp.client import Client
from atoll.surfaces.mcp.rpc import Conversation, encode, id_of, parse
from atoll.surfaces.mcp.settings import Settings

MAX_MESSAGES, MAX_BYTES = 20_000, 256 * 1024 * 1024  # of messages under way


async def serve(core: Core, who: Principal, receive: Receive, send: Send) -> None:
    await receive()  # websocket.connect
    if not may(who, "use"):
        await refuse(errors.PermissionDenied("this key does not have the scope 'use'"), send)
        return
    await send({"type": "websocket.accept"})
    try:
        first = await receive()
        if first["type"] != "websocket.receive":
            return
        settings = model.decode(Settings, _data(first))
        is_local = who.kind == "local"
        if not is_local:
            _refuse_host(settings)
        client = Client(core, who, settings, None if is_local else core.keeper, source="stdio")
        with core.keeper.watch.during(who), core.accounts.lease(accounts.MEMORY, 0, accounts.owner(who.owner)) as held:
            await _converse(client, held, receive, send)
    except errors.AtollError as error:
        await send({"type": "websocket.close", "code": 1008, "reason": wire(error)["message"][:100]})


def _refuse_host(settings: Settings) -> None:
    """Raise PermissionDenied when a key chose what is of this machine, or more network than its policy gives."""
    if settings.any_host or settings.allow_host_access or settings.project:
        raise errors.PermissionDenied("a key cannot choose this machine's files or any host")


async def _converse(client: Client, held: accounts.Lease, receive: Receive, send: Send) -> None:
    async def tell(message: Any) -> None:
        await send({"type": "websocket.send", "bytes": (encode(message) + "\n").encode()})

    conversation = Conversation(client, tell)
    tasks: dict[asyncio.Task[None], int] = {}

    def done(task: asyncio.Task[None]) -> None:
        held.shrink(tasks.pop(task))

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
            try:
                if len(tasks) >= MAX_MESSAGES or sum(tasks.values()) + len(raw) > MAX_BYTES:
                    raise errors.Exhausted("too many messages under way")
                held.grow(len(raw))
            except errors.Exhausted as full:
                # Waiting here instead would hide from us that the client has gone.
                await tell(hello.failure(id_of(parsed), hello.INTERNAL, full.message))
                continue
            task = asyncio.create_task(handle(parsed))
            tasks[task] = len(raw)
            task.add_done_callback(done)
    finally:
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(set(tasks), timeout=30)
        await client.close()


def _data(message: Event) -> bytes:
    data = message.get("bytes")
    return data if data is not None else (message.get("text") or "").encode("utf-8", "replace")
