"""REST routes of the functions: `POST /functions/NAME`, the bodies of large files, and a worker's door.

Imported for its entries in the table of `rest`. An error has the form it has on the bus: `error.message` is the envelope.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from atoll import errors, model
from atoll.server import frames
from atoll.server.request import Exchange, check_texts, flag, internal
from atoll.server.routes import Rest, Route, route
from atoll.surfaces.iii import files
from atoll.surfaces.iii import requests as r
from atoll.surfaces.iii.door import LOCAL, Door, Functions
from atoll.surfaces.iii.failure import Failure, of_file
from atoll.surfaces.iii.settings import Settings
from atoll.surfaces.iii.table import FUNCTIONS, call, schemas

DOOR = b"x-atoll-functions"


class OpenDoor(model.Request, kw_only=True):
    """`instance` tells a worker that comes back after a restart of the daemon from a new one of the same name.
    `insecure_registries` may be spoken to without encryption while the door is open."""

    name: str
    instance: str
    settings: dict[str, Any]
    insecure_registries: Annotated[list[Annotated[str, Meta(min_length=1, max_length=300)]], Meta(max_length=100)] = []


def _door(rest: Rest, exchange: Exchange) -> Door:
    return Functions.of(rest.core).door(exchange.who, exchange.header(DOOR) or LOCAL)


async def _fail(exchange: Exchange, door: Door, failure: Failure) -> None:
    text = str(failure)
    if door.settings.legacy_error_prefix:
        text = "handler error: " + text
    await exchange.answer({"error": {"code": "invocation_failed", "message": text}}, failure.status)


def _payload(body: bytes) -> Any:
    check_texts(body, lambda: msgspec.json.decode(body, type=dict[str, msgspec.Raw]).values())
    try:
        return msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Failure("S001", f"the payload is not JSON: {error}", note="send one JSON object") from None


def _add(name: str) -> None:
    @route("POST", f"/functions/{name}", FUNCTIONS[name].does, scope="admin")
    async def invoke(rest: Rest, exchange: Exchange) -> None:
        door = _door(rest, exchange)
        try:
            payload = _payload(await exchange.body())
            answer = await exchange.while_connected(call(door, name, payload))
        except Failure as failure:
            await _fail(exchange, door, failure)
            return
        except errors.AtollError as error:
            await _fail(exchange, door, Failure("S001", error.message))
            return
        except (OSError, ValueError, TypeError, KeyError, AssertionError) as bug:
            code = "S216" if "::fs::" in name else "S300"
            await _fail(exchange, door, Failure(code, internal(bug).message, note="see daemon.log"))
            return
        await exchange.answer(answer)


for _name in FUNCTIONS:
    _add(_name)


async def unknown(rest: Rest, exchange: Exchange) -> None:
    """A name that is no function's: also this is an envelope."""
    note = "known are " + ", ".join(FUNCTIONS)
    failure = Failure("S001", f"there is no function {exchange.parts[1]!r:.120}", note=note)
    await _fail(exchange, _door(rest, exchange), failure)


UNKNOWN = Route(unknown, "A function that does not exist", "admin")


@route(
    "PUT",
    "/functions/sandbox::fs::write",
    "Write a file from the raw body",
    query=("sandbox_id", "path", "mode", "parents"),
    scope="admin",
)
async def write(rest: Rest, exchange: Exchange) -> None:
    door = _door(rest, exchange)
    query = exchange.query("sandbox_id", "path", "mode", "parents")
    fields = {key: query[key] for key in ("sandbox_id", "path", "mode") if key in query}
    try:
        request = r.decode(r.Write, {**fields, "parents": flag(query, "parents")}, "")
        answer = await files.write_stream(door, request, exchange.chunks())
    except Failure as failure:
        await _fail(exchange, door, failure)
        return
    await exchange.answer(msgspec.to_builtins(answer))


@route("GET", "/functions/sandbox::fs::read/content", "A file's bytes", query=("sandbox_id", "path"), scope="admin")
async def content(rest: Rest, exchange: Exchange) -> None:
    door = _door(rest, exchange)
    query = exchange.query("sandbox_id", "path")

    async def work() -> None:
        path = r.absolute("path", query.get("path", ""))
        sandbox = r.sandbox_id(query.get("sandbox_id", ""))
        door.find(sandbox)
        async with rest.core.files.read(exchange.who, sandbox, path) as (stat, data):
            told = msgspec.json.encode(files.described(stat))
            await exchange.start(200, [(b"content-type", b"application/octet-stream"), (b"x-atoll-file", told)])
            async for piece in data:
                await exchange.write(piece)
        await exchange.end()

    try:
        await exchange.while_connected(work())
    except Failure as failure:
        await _fail(exchange, door, failure)
    except errors.AtollError as error:
        if exchange.started:
            raise
        await _fail(exchange, door, of_file(error))


@route("GET", "/functions", "Every function with its schemas", scope="admin")
async def table(rest: Rest, exchange: Exchange) -> None:
    found = []
    for name, function in FUNCTIONS.items():
        request, answer = schemas(name)
        found.append({"id": name, "description": function.does, "request_format": request, "response_format": answer})
    await exchange.answer({"functions": found})


@route(
    "POST", "/v1/functions/open", "A worker's own door, for as long as this request is open", OpenDoor, scope="admin"
)
async def open_door(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(OpenDoor)
    try:
        settings = msgspec.convert(request.settings, Settings)
    except msgspec.ValidationError as error:
        raise errors.InvalidArgument(str(error)) from None
    if request.insecure_registries and exchange.who.kind != "local":
        raise errors.PermissionDenied("only a person on this machine lets images come without encryption")
    await frames.send(exchange, _serve(rest, exchange, request, settings))


async def _serve(rest: Rest, exchange: Exchange, request: OpenDoor, settings: Settings) -> AsyncIterator[frames.Item]:
    functions = Functions.of(rest.core)
    door = await functions.open(exchange.who, request.name, request.instance, settings)
    plain = functions.allow_plain(request.insecure_registries)
    try:
        yield {"open": json.loads(json.dumps(request.name))}
        await asyncio.Event().wait()
    finally:
        functions.forbid_plain(plain)
        await asyncio.shield(asyncio.ensure_future(functions.shut(door)))
