"""A stand-in for the iii engine: one WebSocket listener with workers, callers and channels, as far as the contract needs it."""

import asyncio
import json
import secrets
import threading
import uuid
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

PATIENCE = 90.0
BUFFERED = 64


class Channel:
    """A pipe of messages with a bounded buffer: a slow reader slows the writer. One writer, one reader."""

    def __init__(self, size: int) -> None:
        self.queue: asyncio.Queue[str | bytes | None] = asyncio.Queue(min(size, 1024))
        self.keys = {"write": secrets.token_hex(8), "read": secrets.token_hex(8)}
        self.frames: list[int] = []


class Engine:
    """Runs on a thread of its own, on a free port."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.functions: dict[str, tuple[ServerConnection, dict[str, Any]]] = {}
        self.workers: dict[str, ServerConnection] = {}
        self.reserved: set[str] = set()  # worker names that somebody else has
        self.channels: dict[str, Channel] = {}
        self.tokens: list[str] = []
        self.pause_reader = 0.0
        self._pending: dict[str, ServerConnection] = {}
        self.port = 0
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._run(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    async def _run(self) -> None:
        async with serve(self._connection, "127.0.0.1", 0, max_size=64 << 20, ping_interval=None) as server:
            self.port = next(iter(server.sockets)).getsockname()[1]
            self._ready.set()
            await self._stop.wait()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE)

    def drop(self, function: str) -> None:
        """Cut the connection of the worker that has a function."""
        connection = self.functions.pop(function)[0]
        self.loop.call_soon_threadsafe(connection.transport.abort)

    async def _connection(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        where = urlsplit(socket.request.path)
        self.tokens.append(socket.request.headers.get("Authorization", ""))
        if where.path.startswith("/ws/channels/"):
            await self._channel(socket, where.path.rpartition("/")[2], parse_qs(where.query))
            return
        await socket.send(json.dumps({"type": "workerregistered", "worker_id": str(uuid.uuid4())}))
        try:
            async for raw in socket:
                await self._message(socket, json.loads(raw))
        except ConnectionClosed:
            pass
        finally:
            self.functions = {name: entry for name, entry in self.functions.items() if entry[0] is not socket}
            self.workers = {name: other for name, other in self.workers.items() if other is not socket}

    async def _message(self, socket: ServerConnection, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "registerfunction":
            self.functions[message["id"]] = (socket, message)
        elif kind == "unregisterfunction":
            self.functions.pop(message["id"], None)
        elif kind == "ping":
            await socket.send(json.dumps({"type": "pong"}))
        elif kind == "invokefunction":
            await self._invoke(socket, message)
        elif kind == "invocationresult":
            caller = self._pending.pop(message["invocation_id"], None)
            if caller is not None:
                await caller.send(json.dumps(message))

    async def _invoke(self, socket: ServerConnection, message: dict[str, Any]) -> None:
        name, data, call = message["function_id"], message.get("data") or {}, message.get("invocation_id")
        if name == "engine::workers::register":
            worker = data.get("name", "")
            if worker in self.reserved:
                rejected = {"code": "WORKER_NAMESPACE_CONFLICT", "worker_name": worker, "namespace": "default"}
                await socket.send(json.dumps({"type": "registrationrejected", "owner_worker_id": "other", **rejected}))
            else:
                self.workers[worker] = socket
            return
        if name == "engine::channels::create":
            identity, made = secrets.token_hex(8), Channel(data.get("buffer_size") or BUFFERED)
            self.channels[identity] = made
            ends = {
                f"{end}er" if end == "read" else "writer": {"channel_id": identity, "access_key": key, "direction": end}
                for end, key in made.keys.items()
            }
            await self._answer(socket, call, name, result=ends)
        elif name == "engine::functions::info":
            entry = self.functions.get(data.get("function_id", ""))
            await self._answer(socket, call, name, result=entry[1] if entry else None)
        elif name in self.functions:
            if call:
                self._pending[call] = socket
            await self.functions[name][0].send(json.dumps(message))
        else:
            await self._answer(socket, call, name, error={"code": "function_not_found", "message": name})

    async def _answer(self, socket: ServerConnection, call: str | None, name: str, **outcome: Any) -> None:
        if call:
            answer = {"type": "invocationresult", "invocation_id": call, "function_id": name, **outcome}
            await socket.send(json.dumps(answer))

    async def _channel(self, socket: ServerConnection, identity: str, query: dict[str, list[str]]) -> None:
        channel, direction = self.channels.get(identity), query.get("dir", [""])[0]
        if channel is None or channel.keys.get(direction) != query.get("key", [""])[0]:
            await socket.close(4404, "no such channel")
            return
        if direction == "write":
            ended = False
            try:
                async for message in socket:
                    channel.frames.append(len(message))
                    await channel.queue.put(message)
                ended = True
            except ConnectionClosed:
                pass
            await channel.queue.put(None if ended else "cut")
            return
        try:
            while (message := await channel.queue.get()) is not None:
                if message == "cut":
                    socket.transport.abort()
                    return
                if self.pause_reader:
                    await asyncio.sleep(self.pause_reader)
                await socket.send(message)
        except ConnectionClosed:
            pass
