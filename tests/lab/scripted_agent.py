"""A scripted agent for faults the real one never shows: it greets, then does to each request what the test says."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from atoll.guest import GuestClient, wire

HOST_SECRET, AGENT_SECRET = "1" * 32, "2" * 32


class Peer:
    """The agent's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.frames = wire.FrameReader()
        self.queue: list[wire.Frame] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.credit: dict[tuple[int, int], int] = {}
        self.changed = asyncio.Event()
        self.uploads: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.cancelled: set[int] = set()

    async def next(self) -> wire.Frame | None:
        while not self.queue:
            piece = await self.reader.read(1 << 18)
            if not piece:
                return None
            self.queue += self.frames.feed(piece)
        return self.queue.pop(0)

    def control(self, kind: int, stream: int, message: dict[str, Any]) -> None:
        self.writer.write(wire.control(kind, stream, message))

    def ok(self, stream: int, **fields: Any) -> None:
        self.control(wire.RESULT, stream, {"ok": fields})

    def err(self, stream: int, code: str, **more: Any) -> None:
        self.control(wire.RESULT, stream, {"err": {"code": code, "message": f"scripted {code}", **more}})

    def event(self, stream: int, **fields: Any) -> None:
        self.control(wire.EVENT, stream, fields)

    async def data(self, stream: int, channel: int, data: bytes) -> None:
        """Send within the credit given."""
        at = 0
        while at < len(data):
            have = self.credit.get((stream, channel), 0)
            if not have:
                self.changed.clear()
                await self.changed.wait()
                continue
            size = min(have, wire.MAX_DATA, len(data) - at)
            self.credit[stream, channel] = have - size
            self.changed.set()
            self.writer.write(wire.data_head(stream, channel, size) + data[at : at + size])
            await self.writer.drain()
            at += size

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 30)


Script = Callable[[Peer, int, dict[str, Any]], Awaitable[None]]


class ScriptedAgent:
    """Listens on a Unix socket and runs the script for each request."""

    def __init__(self, path: Path, script: Script, secret: str = AGENT_SECRET) -> None:
        self.path, self.script, self.secret = path, script, secret
        self.peers: list[Peer] = []
        self.server: asyncio.Server | None = None

    async def __aenter__(self) -> "ScriptedAgent":
        self.server = await asyncio.start_unix_server(self._serve, str(self.path))
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self.server is not None
        self.server.close()
        for peer in self.peers:
            peer.writer.close()
            for task in peer.tasks:
                task.cancel()

    def client(self) -> GuestClient:
        return GuestClient(
            lambda: asyncio.open_unix_connection(str(self.path)), host_secret=HOST_SECRET, agent_secret=AGENT_SECRET
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self.peers.append(peer)
        try:
            hello = await peer.next()
            if hello is None or wire.message(hello.payload)["secret"] != HOST_SECRET:
                return
            peer.control(wire.HELLO, 0, {"v": 1, "secret": self.secret, "boot": "b", "pid": 1, "features": []})
            while (frame := await peer.next()) is not None:
                self._take(peer, frame)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def _take(self, peer: Peer, frame: wire.Frame) -> None:
        if frame.kind == wire.REQUEST:
            task = asyncio.ensure_future(self.script(peer, frame.stream, wire.message(frame.payload)))
            peer.tasks.add(task)
        elif frame.kind == wire.CREDIT:
            key = (frame.stream, frame.channel)
            peer.credit[key] = peer.credit.get(key, 0) + wire.credit_amount(frame.payload)
        elif frame.kind == wire.DATA:
            peer.uploads.setdefault(frame.stream, bytearray()).extend(frame.payload)
        elif frame.kind == wire.EOF:
            peer.ended.add(frame.stream)
        elif frame.kind == wire.CANCEL:
            peer.cancelled.add(frame.stream)
        peer.changed.set()
