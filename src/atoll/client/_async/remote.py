"""A gateway elsewhere behind the same face as the local daemon's `AsyncLink` (see `remote.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from atoll.errors import AtollError, Unavailable
from atoll.proto.atoll.v1 import atoll_pb2 as pb
from atoll.proto.atoll.v1 import atoll_pb2_grpc
from atoll.surfaces.k8e.sdk.channel import find_route, ready

from .. import remote_wire as wire
from ..http import Head
from ..outcome import AsyncAnswered, json_answer, lost

if TYPE_CHECKING:
    from ..calls import Call


class AsyncRemoteExchange(AsyncAnswered):
    """As `RemoteExchange`, for asyncio."""

    def __init__(self, call: Call, rpc: Any, head: Head) -> None:
        self.call = call
        self.head = head
        self._rpc = rpc
        self._interrupted = False

    async def read(self) -> bytes:
        while self._rpc is not None:
            try:
                message = await self._rpc.read()
            except grpc.RpcError as failure:
                self.close()
                raise wire.failed(self.call, failure) from None
            except BaseException:
                self.close()
                if self._interrupted:
                    return b""
                raise
            if message is grpc.aio.EOF:
                self._rpc = None
            elif message.data:
                data: bytes = message.data
                return data
        return b""

    def close(self) -> None:
        rpc, self._rpc = self._rpc, None
        if rpc is not None:
            rpc.cancel()

    def interrupt(self) -> None:
        """End the exchange from outside; whoever reads it now is told that it was lost."""
        self._interrupted = True
        if self._rpc is not None:
            self._rpc.cancel()


class AsyncRemoteLink:
    """As `RemoteLink`, for one event loop."""

    home = ""

    def __init__(self, endpoint: str | None = None, *, api_key: str | None = None, ca_cert: str | None = None) -> None:
        self._route = find_route(endpoint, api_key, ca_cert)
        self._channel: Any = None
        self._made: Any = None

    @property
    def path(self) -> str:
        return self._route.endpoint

    async def call(self, call: Call) -> Any:
        stub = await self._stub()
        try:
            answer = await stub.Call(wire.request(call), timeout=call.timeout, metadata=self._route.metadata)
        except grpc.RpcError as failure:
            raise wire.failed(call, failure) from None
        return json_answer(wire.head(answer), answer.body)

    async def open(self, call: Call, body: AsyncIterable[bytes] | None = None) -> AsyncRemoteExchange:
        stub = await self._stub()
        failed: list[BaseException] = []
        rpc = stub.Stream(_messages(call, body, failed), timeout=call.timeout, metadata=self._route.metadata)
        try:
            first = await rpc.read()
        except grpc.RpcError as failure:
            if failed:
                raise failed[0] from None
            raise wire.failed(call, failure) from None
        except BaseException:
            rpc.cancel()
            raise
        if first is grpc.aio.EOF:
            raise lost(call, "no answer")
        return AsyncRemoteExchange(call, rpc, wire.head(first.head))

    async def tunnel(self, sandbox: str, port: int) -> AsyncRemoteTunnel:
        """A TCP connection to a port inside."""
        rpc = (await self._stub()).Connect(metadata=self._route.metadata)
        try:
            await rpc.write(pb.ConnectRequest(sandbox=sandbox, port=port))
            await rpc.read()
        except (grpc.RpcError, asyncio.InvalidStateError) as failure:
            raise await _ended(rpc, failure) from None
        if rpc.done():
            raise await _ended(rpc, None)
        return AsyncRemoteTunnel(rpc)

    def close(self) -> None:
        """Let go of the channel; what is under way on it is cancelled."""
        channel, self._channel, self._made = self._channel, None, None
        if channel is not None:
            self._closing = asyncio.ensure_future(channel.close(None))

    async def _stub(self) -> Any:
        if self._made is None:
            route = await asyncio.to_thread(ready, self._route)
            if self._made is None:
                self._channel = route.async_channel()
                self._made = atoll_pb2_grpc.AtollServiceStub(self._channel)
        return self._made


class AsyncRemoteTunnel:
    """As `RemoteTunnel`, for asyncio."""

    def __init__(self, rpc: Any) -> None:
        self._rpc = rpc

    async def send(self, data: bytes) -> None:
        for start in range(0, len(data), wire.PIECE):
            try:
                await self._rpc.write(pb.ConnectRequest(data=data[start : start + wire.PIECE]))
            except (grpc.RpcError, asyncio.InvalidStateError):
                raise Unavailable("the connection to the port is closed") from None

    async def send_eof(self) -> None:
        """No more from this side; the other may still send."""
        await self._rpc.done_writing()

    async def recv(self) -> bytes:
        """The next bytes; empty when the other end has closed."""
        try:
            message = await self._rpc.read()
        except grpc.RpcError as failure:
            raise wire.unreached(failure) from None
        return b"" if message is grpc.aio.EOF else bytes(message.data)

    async def close(self) -> None:
        self._rpc.cancel()

    async def __aenter__(self) -> AsyncRemoteTunnel:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._rpc.cancel()


async def _ended(rpc: Any, failure: BaseException | None) -> AtollError:
    """Why a call that was being set up is over."""
    if isinstance(failure, grpc.RpcError):
        return wire.unreached(failure)
    try:
        await rpc.wait_for_connection()
        await rpc.read()
    except grpc.RpcError as told:
        return wire.unreached(told)
    except asyncio.InvalidStateError:
        pass
    return Unavailable(f"the connection to the port was refused: {await rpc.details()}")


async def _messages(call: Call, body: AsyncIterable[bytes] | None, failed: list[BaseException]) -> AsyncIterator[Any]:
    yield pb.StreamRequest(head=wire.request(call))
    try:
        if body is not None:
            async for piece in body:
                for start in range(0, len(piece), wire.PIECE):
                    yield pb.StreamRequest(data=bytes(piece[start : start + wire.PIECE]))
    except Exception as failure:
        failed.append(failure)
        raise
    yield pb.StreamRequest(end=True)
