"""`atoll.v1.AtollService`: the REST surface over gRPC, by handing each call to the same application.

One description, one set of checks: what a route does over HTTP it does here. The application is told who calls by the
guard around the RPC; no header of the call can say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from atoll.core import Core
from atoll.core.access.principals import Principal
from atoll.core.access.terminal_presence import PEER_PID
from atoll.errors import AtollError, InvalidArgument, OutcomeUnknown, TooLarge
from atoll.proto.atoll.v1 import atoll_pb2 as pb

from .calls import Kind
from .ids import session_ref

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["AtollService"]
SCOPES = {"Call": "", "Stream": ""}  # each route has its own
KINDS: dict[str, Kind] = {"Call": None, "Stream": None, "Connect": "write"}  # counted below, by method
METHODS = frozenset(("GET", "POST", "PUT", "DELETE", "PATCH"))
HEADERS = frozenset(("accept", "content-type", "range", "if-none-match"))
MAX_TARGET, MAX_ANSWER, PIECE = 64 * 1024, 63 * 1024 * 1024, 256 * 1024

App = Callable[
    [dict[str, Any], Callable[[], Awaitable[dict[str, Any]]], Callable[[dict[str, Any]], Awaitable[None]]], Any
]
Admit = Callable[[Principal, Any], None]


class AtollService:
    """`app` is the REST application; `admit` counts a call against its caller's rate."""

    def __init__(self, core: Core, app: App, admit: Admit) -> None:
        self._core = core
        self._app = app
        self._admit = admit

    async def Call(self, who: Principal, request: Any) -> Any:
        scope = self._scope(who, request)
        pieces, size, head = [], 0, None
        async with aclosing(_exchange(self._app, scope, _once(request.body))) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    head = _head(message)
                    continue
                size += len(message.get("body", b""))
                if size > MAX_ANSWER:
                    raise TooLarge("the answer does not fit into one message", hint="use Stream")
                pieces.append(message.get("body", b""))
        if head is None:
            raise OutcomeUnknown("the answer was lost; the work may have been done")
        head.body = b"".join(pieces)
        return head

    async def Stream(self, who: Principal, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("part") != "head":
            raise InvalidArgument("the first message must be the head")
        scope = self._scope(who, first.head)
        answered = False
        async with aclosing(_exchange(self._app, scope, _pieces(first.head.body, requests))) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    answered = True
                    yield pb.StreamResponse(head=_head(message))
                    continue
                data = message.get("body", b"")
                for start in range(0, len(data), PIECE):
                    yield pb.StreamResponse(data=data[start : start + PIECE])
        if not answered:
            raise InvalidArgument("the request was cut off before its end")

    async def Connect(self, who: Principal, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Bytes to and from a port inside; the end of the caller's messages is its half close."""
        first = await anext(aiter(requests), None)
        if first is None:
            raise InvalidArgument("the first message must name sandbox and port")
        async with self._core.ports.connect(who, session_ref(first.sandbox, "sandbox"), first.port) as tunnel:
            yield pb.ConnectResponse()  # connected

            async def inwards() -> None:
                with suppress(BrokenPipeError, AtollError):  # the far side takes no more; it may still send
                    if first.data:
                        await tunnel.send(first.data)
                    async for message in requests:
                        await tunnel.send(message.data)
                    tunnel.send_eof()

            feeding = asyncio.ensure_future(inwards())
            try:
                async for data in tunnel:
                    yield pb.ConnectResponse(data=bytes(data))
            finally:
                feeding.cancel()

    def _scope(self, who: Principal, request: Any) -> dict[str, Any]:
        if request.method not in METHODS:
            raise InvalidArgument(f"unknown method {request.method!r:.20}", hint=", ".join(sorted(METHODS)))
        target: str = request.target
        if (
            not target.startswith("/v1/")
            or len(target) > MAX_TARGET
            or not target.isascii()
            or not target.isprintable()
        ):
            raise InvalidArgument("target must be a path below /v1/ with an optional query, percent-encoded")
        self._admit(who, "read" if request.method == "GET" else "write")
        path, _, query = target.partition("?")
        headers = []
        for header in request.headers:
            name = header.name.lower()
            if name not in HEADERS:
                raise InvalidArgument(f"header {header.name!r:.40} is not used here", hint=", ".join(sorted(HEADERS)))
            headers.append((name.encode(), header.value.encode("latin-1", "replace")))
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "2",
            "method": request.method,
            "scheme": "https",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": headers,
            "client": None,
            "server": None,
            "state": {"principal": who, "pid": PEER_PID.get()},
        }


async def _exchange(
    app: App, scope: dict[str, Any], body: AsyncIterator[bytes]
) -> AsyncGenerator[dict[str, Any], None]:
    """Run the application and pass on what it sends, one message at a time, so that a slow reader slows it down."""
    ready: asyncio.Queue[dict[str, Any]] = asyncio.Queue(1)
    never = asyncio.Event()
    over = False

    async def receive() -> dict[str, Any]:
        nonlocal over
        if not over:
            try:
                piece = await anext(body, None)
            except EOFError:
                return {"type": "http.disconnect"}
            if piece is not None:
                return {"type": "http.request", "body": piece, "more_body": True}
            over = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await never.wait()  # a caller that goes away cancels this whole call
        raise AssertionError("unreachable")

    task = asyncio.ensure_future(app(scope, receive, ready.put))
    try:
        while True:
            item = asyncio.ensure_future(ready.get())
            await asyncio.wait((item, task), return_when=asyncio.FIRST_COMPLETED)
            if not item.done():
                item.cancel()
                if not ready.empty():
                    yield ready.get_nowait()
                task.result()  # an answer that was cut raises here, so that the caller sees no good end
                return
            yield item.result()
            if item.result()["type"] == "http.response.body" and not item.result().get("more_body", False):
                await task
                return
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, AtollError):
                await task


async def _once(body: bytes) -> AsyncIterator[bytes]:
    if body:
        yield body


async def _pieces(first: bytes, requests: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """The body. gRPC shows a caller that is gone as the plain end of its messages, so only `end` is the end."""
    if first:
        yield first
    async for message in requests:
        part = message.WhichOneof("part")
        if part == "end":
            return
        if part != "data":
            raise InvalidArgument("after the head there is only data, then the end")
        yield message.data
    raise EOFError("the body was cut off")


def _head(message: dict[str, Any]) -> Any:
    headers = [pb.Header(name=k.decode("latin-1"), value=v.decode("latin-1")) for k, v in message.get("headers", ())]
    return pb.CallResponse(status=message["status"], headers=headers)
