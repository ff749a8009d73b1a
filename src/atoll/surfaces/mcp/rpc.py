"""JSON-RPC for clients on stdio and of K8E's HTTP lifecycle: no handshake is needed, calls run side by side."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from atoll.surfaces.mcp import hello, interpreter, k8e, named, shells, terminals  # noqa: F401  # they fill the table of handlers
from atoll.surfaces.mcp.client import BadArguments, Client
from atoll.surfaces.mcp.progress import Report
from atoll.surfaces.mcp.tools import listed

Message = Mapping[str, object]
Params = Mapping[str, object]
Send = Callable[[Message], Awaitable[None]]
MAX_BATCH = 64


def parse(raw: bytes | str) -> Any:
    """A message, or ValueError. Numbers JSON does not have, and depth without end, are no message."""
    try:
        return json.loads(raw, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def encode(message: Any) -> str:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace").decode()


class Conversation:
    """Answers the messages of one client. `send` takes what the server says on its own: progress."""

    def __init__(self, client: Client, send: Send) -> None:
        self.client = client
        self._send = send
        self._calls: dict[Any, asyncio.Task[Any]] = {}

    async def answer(self, message: Any) -> Message | list[Message] | None:
        """The answer to one message or a batch; None when there is none."""
        if not isinstance(message, list):
            return await self._one(message)
        if not 0 < len(message) <= MAX_BATCH:
            return hello.failure(None, hello.INVALID_REQUEST, f"a batch has 1 to {MAX_BATCH} messages")
        found = await asyncio.gather(*(self._one(one) for one in message))
        return [one for one in found if one is not None] or None

    async def _one(self, message: Any) -> Message | None:
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            return hello.failure(None, hello.INVALID_REQUEST, "this is not a JSON-RPC 2.0 message")
        method, params, request = message.get("method"), message.get("params"), message.get("id")
        if not isinstance(method, str):
            if "result" in message or "error" in message:
                return None  # an answer to something never asked
            return hello.failure(id_of(message), hello.INVALID_REQUEST, "method is missing")
        if "id" not in message or request is None:
            self._notified(method, params)
            return None
        if isinstance(request, bool) or not isinstance(request, str | int | float):
            return hello.failure(None, hello.INVALID_REQUEST, "id must be text or a number")
        if params is not None and not isinstance(params, dict):
            return hello.failure(request, hello.BAD_PARAMETERS, "params must be an object")
        return await self._request(request, method, params or {})

    async def _request(self, request: Any, method: str, params: Params) -> Message:
        if method == "initialize":
            self._greet(params)
            return hello.answer(request, hello.initialized(params, self.client.settings.toolset))
        if method in ("ping", "shutdown"):
            return hello.answer(request, {})
        if method == "tools/list":
            return hello.answer(request, {"tools": list(listed(self.client.settings.toolset))})
        if method == "tools/call":
            return await self._call(request, params)
        return hello.failure(request, hello.UNKNOWN_METHOD, f"unknown method {method!r:.120}")

    async def _call(self, request: Any, params: Params) -> Message:
        name = params.get("name")
        if not isinstance(name, str):
            return hello.failure(request, hello.BAD_PARAMETERS, "name must be the name of a tool")
        if request in self._calls:
            return hello.failure(request, hello.INVALID_REQUEST, "a call with this id is under way")
        task = asyncio.ensure_future(self.client.call(name, params.get("arguments"), self._report(params)))
        self._calls[request] = task
        try:
            return hello.answer(request, await task)
        except BadArguments as bad:
            return hello.failure(request, hello.BAD_PARAMETERS, str(bad))
        except asyncio.CancelledError:
            if not task.cancelled():
                task.cancel()  # the transport has gone: so does what it asked for
                await asyncio.wait([task])
                raise
            return hello.failure(request, hello.INTERNAL, "cancelled")
        finally:
            self._calls.pop(request, None)

    def _report(self, params: Params) -> Report | None:
        meta = params.get("_meta")
        token = meta.get("progressToken") if isinstance(meta, dict) else None
        if isinstance(token, bool) or not isinstance(token, str | int):
            return None

        async def report(progress: float, text: str) -> None:
            told = {"progressToken": token, "progress": progress, "message": text}
            await self._send({"jsonrpc": "2.0", "method": "notifications/progress", "params": told})

        return report

    def _notified(self, method: str, params: Any) -> None:
        if method == hello.GREETED:
            self._greet(params)
        elif method == "notifications/cancelled" and isinstance(params, dict):
            request = params.get("requestId")
            task = self._calls.get(request) if isinstance(request, str | int | float) else None
            if task is not None:
                task.cancel()

    def _greet(self, params: Any) -> None:
        about = params.get("clientInfo") if isinstance(params, dict) else None
        name = about.get("name") if isinstance(about, dict) else None
        self.client.name = name[:120].lower() if isinstance(name, str) else ""


def id_of(message: Any) -> Any:
    """The id to answer with; None when a message has none that could be one."""
    value = message.get("id") if isinstance(message, dict) else None
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else None
