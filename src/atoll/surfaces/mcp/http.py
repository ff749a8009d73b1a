"""MCP over HTTP at `/mcp`: Streamable HTTP by the official SDK, and K8E's own lifecycle of GET and POST beside it.

Who may come in: processes of the daemon's own user on loopback, and holders of an API key from anywhere. Pages in a browser
may not: Host and Origin are checked, and bodies must say that they are JSON.
"""

import asyncio
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec

from atoll import errors
from atoll.core import Core
from atoll.core.access.credentials import Peer, bearer_of, require
from atoll.core.access.principals import Principal
from atoll.server.error_boundary import content_kind, guarded, refuse_browsers
from atoll.server.request import Event, Exchange, Gone, Receive, Scope, Send, check_texts, unquote
from atoll.server.tcp import is_loopback
from atoll.surfaces.mcp import hello
from atoll.surfaces.mcp.client import Client
from atoll.surfaces.mcp.rpc import Conversation, Message, encode, parse
from atoll.surfaces.mcp.sdk import Sdk
from atoll.surfaces.mcp.settings import OpenHttp

MAX_BODY = 16 * 1024 * 1024
PING = 15.0
QUEUE = 256
SLOW = 30.0  # a reader that takes nothing for so long has its stream closed: a gap is never hidden
MAX_STREAMS = 1000
_K8E_ID = re.compile(r"[0-9a-f]{24}")
_SSE = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


class Stream:
    """An open GET of K8E's lifecycle: a client, and the messages on their way to it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.closed = asyncio.Event()
        self.conversation = Conversation(client, self.push)
        self._queue: asyncio.Queue[Message | list[Message]] = asyncio.Queue(QUEUE)

    async def push(self, message: Message | list[Message]) -> None:
        if self.closed.is_set():
            return
        try:
            async with asyncio.timeout(SLOW):
                await self._queue.put(message)
        except TimeoutError:
            self.closed.set()

    async def send(self, exchange: Exchange, token: str) -> None:
        await exchange.start(200, _SSE)
        await exchange.write(f"event: session\ndata: {token}\n\n".encode())
        while not self.closed.is_set():
            try:
                async with asyncio.timeout(PING):
                    message = await self._queue.get()
            except TimeoutError:
                await exchange.write(b": ping\n\n")
            else:
                await exchange.write(f"data: {encode(message)}\n\n".encode())
        await exchange.end()


class McpHttp:
    """The ASGI app behind one listener."""

    def __init__(self, core: Core, settings: OpenHttp) -> None:
        self.core = core
        self.settings = settings
        self.keeper = core.keeper
        self._streams: dict[str, Stream] = {}
        self._shared: dict[Principal, Client] = {}
        self._sdk: Sdk | None = None
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        parts = [unquote(part) for part in scope["raw_path"][1:].split(b"/")]
        exchange = Exchange(scope, receive, send, None, parts)  # type: ignore[arg-type]  # known in the next step
        await guarded(exchange, self._serve(exchange, receive, send), _fail)

    async def _serve(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        exchange.who = self.admit(exchange)
        if exchange.parts != ["mcp"]:
            raise errors.NotFound("MCP is at /mcp")
        who = exchange.who
        with self.keeper.watch.during(who), exchange.charged(self.core.accounts, who.owner):
            await self._route(exchange, receive, send)

    def admit(self, exchange: Exchange) -> Principal:
        """The caller, or why not."""
        bearer = bearer_of(exchange.header(b"authorization") or None)
        refuse_browsers(exchange, only_local_names=bearer is None or is_loopback(self.settings.host))
        if exchange.scope["method"] == "POST" and content_kind(exchange) != "application/json":
            raise errors.InvalidArgument("the content type must be application/json")
        peer = Peer(str(exchange.scope.get("client")), uid=exchange.scope["state"].get("owner"))
        who = self.keeper.identify(peer, bearer)
        require(who, "use")
        return who

    async def _route(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        method, session = exchange.scope["method"], exchange.header(b"mcp-session-id")
        if method == "GET" and not session:
            return await self._stream(exchange)
        if method != "POST":
            return await (await self._modern()).handle(exchange.scope, receive, send, exchange.who)
        body = await exchange.body(MAX_BODY)
        check_texts(body, lambda: _arguments(body))
        if _K8E_ID.fullmatch(session):
            return await self._post(exchange, body, session)
        if session or _is_modern(exchange) or _is_initialize(body):
            return await (await self._modern()).handle(exchange.scope, _replay(body, receive), send, exchange.who)
        return await self._post(exchange, body, "")

    # K8E's lifecycle

    async def _stream(self, exchange: Exchange) -> None:
        if len(self._streams) >= MAX_STREAMS:
            raise errors.Exhausted("too many open streams")
        token = secrets.token_hex(12)
        stream = self._streams[token] = Stream(self.client(exchange.who))
        try:
            await exchange.while_connected(stream.send(exchange, token))
        finally:
            self._streams.pop(token, None)
            stream.closed.set()
            await asyncio.shield(stream.client.close())

    async def _post(self, exchange: Exchange, body: bytes, token: str) -> None:
        stream = self._streams.get(token) if token else None
        if token and (stream is None or stream.client.who != exchange.who):
            raise errors.NotFound("no such MCP session")
        conversation = stream.conversation if stream else Conversation(self.shared(exchange.who), _nowhere)
        try:
            message = parse(body)
        except ValueError:
            answer: Any = hello.failure(None, hello.PARSE_ERROR, "this is not JSON")
        else:
            answer = await exchange.while_connected(conversation.answer(message))
        if answer is None:
            await exchange.start(202, [(b"content-length", b"0")])
            return await exchange.end()
        if stream is not None:
            await stream.push(answer)
        raw = encode(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        if token:
            headers.append((b"mcp-session-id", token.encode()))
        await exchange.start(200, headers)
        await exchange.write(raw)
        await exchange.end()

    # Clients

    def client(self, who: Principal) -> Client:
        return Client(self.core, who, self.settings, self.keeper)

    def shared(self, who: Principal) -> Client:
        """The client that all calls without a session share, for each credential: it ends with it."""
        found = self._shared.get(who)
        if found is None:
            found = self._shared[who] = self.client(who)
            found.on_lost = lambda: self._shared.pop(who, None)
        return found

    async def _modern(self) -> Sdk:
        async with self._lock:
            if self._sdk is None:
                self._sdk = Sdk(self)
                await self._sdk.start()
            return self._sdk

    async def close(self) -> None:
        """The listener is gone, and with it every client."""
        if self._sdk is not None:
            await self._sdk.close()
        clients = [*self._shared.values(), *(stream.client for stream in self._streams.values())]
        await asyncio.gather(*(client.close() for client in clients))


async def _fail(exchange: Exchange, error: errors.AtollError) -> None:
    text = error.message + (f" ({error.hint})" if error.hint else "")
    raw = encode(hello.failure(None, hello.INVALID_REQUEST, text)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    with suppress(Gone):
        await exchange.start(error.http_status, headers)
        await exchange.write(raw)
        await exchange.end()


async def _nowhere(message: Message) -> None:
    """A call without a stream has nowhere to hear of its progress."""


def _is_modern(exchange: Exchange) -> bool:
    """Protocol versions without a handshake send no `initialize`; they name themselves in a header."""
    version = exchange.header(b"mcp-protocol-version")
    return bool(version) and version not in hello.VERSIONS


def _is_initialize(body: bytes) -> bool:
    if b"initialize" not in body:
        return False
    try:
        message = parse(body)
    except ValueError:
        return False
    many = message if isinstance(message, list) else [message]
    return any(isinstance(one, dict) and one.get("method") == "initialize" for one in many)


class _Params(msgspec.Struct):
    arguments: dict[str, msgspec.Raw] = {}


class _Call(msgspec.Struct):
    params: _Params


def _arguments(body: bytes) -> Iterable[msgspec.Raw]:
    """The arguments of a call of a tool, not looked into."""
    return msgspec.json.decode(body, type=_Call).params.arguments.values()


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body again, for the next reader, and then what comes after it."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Event:
        return waiting.pop() if waiting else await receive()

    return again
