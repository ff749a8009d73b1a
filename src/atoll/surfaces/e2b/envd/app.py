"""envd's routes: who may come in, and which call is meant."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atoll import errors
from atoll.server.error_boundary import guarded
from atoll.server.request import Exchange
from atoll.surfaces.e2b.envd import connect, files, filesystem, processes  # noqa: F401  # their calls
from atoll.surfaces.e2b.envd.calls import STREAMS, UNARY, Call
from atoll.surfaces.e2b.envd.connect import RpcError
from atoll.surfaces.e2b.replies import WireError, nothing, query_of
from atoll.surfaces.e2b.served import NotServing, Served
from atoll.surfaces.e2b.tokens import check_expiry, is_signed

STREAM_INPUT = ["process.Process", "StreamInput"]


async def serve(app: Served, exchange: Exchange, sandbox: str) -> None:
    """Serve one request to envd of this sandbox."""
    owner = app.owner_of(sandbox)
    if owner is None:
        raise NotServing(sandbox)
    method, parts = exchange.scope["method"], exchange.parts
    if parts == ["health"] and method == "GET":
        await app.reach(sandbox, owner)
        return await nothing(exchange)
    check_token(app, exchange, sandbox)
    who = app.stand_in(owner)
    await app.reach(sandbox, owner, may_resume=True)
    exchange.who = who
    call = Call(app, exchange, who, sandbox)
    with app.core.keeper.watch.during(who), exchange.charged(app.core.accounts, owner):
        if parts == ["files"] and method in ("GET", "POST"):
            await _files(call, owner)
        elif parts == ["metrics"] and method == "GET":
            await files.metrics(call)
        elif parts == ["envs"] and method == "GET":
            await files.variables(call, who)
        elif method == "POST" and len(parts) == 2:
            await _call(call, parts)
        else:
            raise errors.NotFound("envd has no such route")


async def _files(call: Call, owner: str) -> None:
    """Serve a file. Clients take 409 for another thing, so what the sandbox's state does not allow is said otherwise."""
    try:
        await (files.download(call) if call.exchange.scope["method"] == "GET" else files.upload(call))
    except (errors.FailedPrecondition, errors.SandboxGone) as error:
        await call.app.reach(call.sandbox, owner)
        raise WireError(503, error.message) from None


def check_token(app: Served, exchange: Exchange, sandbox: str) -> None:
    """Raise Unauthenticated without the sandbox's token, or for a file a signature made with it."""
    given = exchange.header(b"x-access-token")
    if given:
        if not app.tokens.fits("envd", sandbox, given):
            raise errors.Unauthenticated("this is not the sandbox's access token")
        return
    if exchange.parts != ["files"]:
        raise errors.Unauthenticated("X-Access-Token is missing")
    query = query_of(exchange)
    if not query.get("signature"):
        raise errors.Unauthenticated("an access token or a signature is needed")
    if not is_signed(query, exchange.scope["method"], app.tokens.make("envd", sandbox)):
        raise errors.Unauthenticated("the signature is wrong")
    check_expiry(query)


async def _call(call: Call, parts: list[str]) -> None:
    name = (parts[0], parts[1])
    exchange = call.exchange
    if name in UNARY:
        _check_kind(exchange, connect.UNARY)
        await guarded(exchange, _unary(call, name), connect.fail_unary)
    elif name in STREAMS or parts == STREAM_INPUT:
        _check_kind(exchange, connect.STREAM)
        await (_input_stream(call) if parts == STREAM_INPUT else _stream(call, name))
    else:
        await connect.fail_unary(exchange, RpcError("unimplemented", "envd has no such call"))


def _check_kind(exchange: Exchange, wanted: str) -> None:
    if not connect.check_kind(exchange, wanted):
        raise WireError(415, f"the content type must be {wanted}, not compressed")


async def _unary(call: Call, name: tuple[str, str]) -> None:
    call.timeout_ms = connect.timeout_of(call.exchange)
    asked = await connect.read_unary(call.exchange)
    try:
        async with asyncio.timeout(None if call.timeout_ms is None else call.timeout_ms / 1000):
            answer = await call.exchange.while_connected(UNARY[name](call, asked))
    except TimeoutError:
        raise RpcError("deadline_exceeded", "the call's time is over") from None
    await call.exchange.answer_list(answer, "entries")


async def _stream(call: Call, name: tuple[str, str]) -> None:
    found = STREAMS[name]
    async with _answering(call.exchange):
        call.timeout_ms = connect.timeout_of(call.exchange)
        asked = await connect.read_one(call.exchange)
    deadline = call.timeout_ms if found.ends_with_call else None
    work = connect.send_stream(call.exchange, found.handler(call, asked), found.keepalive, deadline)
    await call.exchange.while_connected(work)


async def _input_stream(call: Call) -> None:
    async with _answering(call.exchange):
        await processes.stream_input(call)
    await connect.send_answer(call.exchange, {})


@asynccontextmanager
async def _answering(exchange: Exchange) -> AsyncIterator[None]:
    """Begin the answer when the request has been read, or could not be: clients that are answered sooner stop sending it."""
    try:
        yield
    except errors.AtollError:
        await connect.begin_stream(exchange)
        raise
    await connect.begin_stream(exchange)
