"""gRPC for asyncio: the channel of one client, opened when it is first needed."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from atoll.client.route import Route
from atoll.proto.sandbox.v1 import sandbox_pb2_grpc

from ..channel import open_channel, ready

Lock = asyncio.Lock


class Transport:
    def __init__(self, route: Route) -> None:
        self.route = route
        self._channel: Any = None
        self._stub: Any = None

    async def stub(self) -> Any:
        if self._stub is None:
            self.route = await asyncio.to_thread(ready, self.route)
        if self._stub is None:
            self._channel = open_channel(self.route, grpc.aio.insecure_channel, grpc.aio.secure_channel)
            self._stub = sandbox_pb2_grpc.SandboxServiceStub(self._channel)
        return self._stub

    async def recover(self) -> None:
        """Start the local daemon again if it is gone; the channel connects again by itself."""
        self.route = await asyncio.to_thread(ready, self.route)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)
