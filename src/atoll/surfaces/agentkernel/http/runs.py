"""Runs that bring their own sandbox: one, one as an event stream, many at once."""

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from atoll import errors
from atoll.model import Chunk, ExecResult, RunOnce
from atoll.server.request import Exchange
from atoll.surfaces.agentkernel.http import bodies
from atoll.surfaces.agentkernel.http.table import Served, ok, route
from atoll.words import agentkernel as words


@route("POST", "run")
async def run(app: Served, exchange: Exchange) -> None:
    request = await app.body(exchange, bodies.Run)
    await app.answer_run(exchange, await exchange.while_connected(app.run(exchange, request)))


@route("POST", "run/stream")
async def run_stream(app: Served, exchange: Exchange) -> None:
    request = await app.body(exchange, bodies.Run)
    once = app.once(request)
    app.settings.ceiling.check(once.sandbox)
    await exchange.while_connected(_events(app, exchange, request, once))


async def _events(app: Served, exchange: Exchange, request: bodies.Run, once: RunOnce) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
    await exchange.start(200, headers)

    async def tell(event: str, **data: Any) -> None:
        await exchange.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())

    await tell(
        "started",
        sandbox=once.sandbox.name,
        command=request.command,
        fast=request.fast is not False,
        timestamp=words.moment(time.time()),
    )
    await tell("progress", stage="creating")
    try:
        async with aclosing(app.core.once.stream(exchange.who, once, app.settings.ceiling)) as stream:  # type: ignore[type-var]
            async for item in stream:
                if isinstance(item, dict) and "progress" in item:
                    await tell("progress", stage="creating", detail=item["progress"]["text"])
                elif isinstance(item, dict):
                    await tell("progress", stage="starting")
                    await tell("progress", stage="executing")
                elif isinstance(item, Chunk):
                    await _tell_output(tell, item)
                elif isinstance(item, ExecResult):
                    code = 124 if item.timed_out else item.exit_code
                    await tell("done", exit_code=code, success=code == 0, timed_out=item.timed_out)
    except errors.AtollError as error:
        await tell("error", message=error.message.encode("utf-8", "replace").decode(), code=error.code)
    await exchange.end()


async def _tell_output(tell: Callable[..., Awaitable[None]], chunk: Chunk) -> None:
    text = chunk.data.decode("utf-8", "replace")
    more = {} if text.encode() == chunk.data else {"data_b64": base64.b64encode(chunk.data).decode()}
    await tell("output", data=text, content=text, stream="stdout" if chunk.channel == 1 else "stderr", **more)


@route("POST", "batch/run")
async def batch(app: Served, exchange: Exchange) -> None:
    request = await app.body(exchange, bodies.Batch)

    async def one(command: list[str]) -> Mapping[str, object]:
        try:
            result = await app.run(exchange, bodies.Run(command=command))
            return {**result, "error": app.failure_of(exchange, result)}
        except errors.AtollError as error:
            return {"output": None, "error": error.message}

    work = asyncio.gather(*(one(entry.command) for entry in request.commands))
    await ok(exchange, {"results": await exchange.while_connected(work)})
