"""A gateway elsewhere behind the same two faces as the local daemon: `Link` for blocking callers, `AsyncLink` for asyncio.

The calls are the very same values (`calls.py`); here they travel in `atoll.v1` over one verified gRPC channel. A call is
one message each way, or a stream where its body or answer may be long. The rules about lost answers are those of the
local drivers: what may have been acted upon is never sent again.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import grpc

from ..errors import AtollError, DaemonUnreachable, OutcomeUnknown, Unavailable
from ..gateway.grpc.status import error_of
from ..gateway.pb.atoll.v1 import atoll_pb2 as pb
from ..gateway.pb.atoll.v1 import atoll_pb2_grpc
from .http import FrameParser, Head, ProtocolError
from .k8e_channel import Route, find_route, ready
from .outcome import error_answer, frame_value, json_answer, lost

if TYPE_CHECKING:
    from .calls import Call
    from .results import Event, Output, Started

PIECE = 256 * 1024
_HEADERS = frozenset(("accept", "content-type"))


class RemoteExchange:
    """One call under way: the head of its answer is there, the body is read piece by piece."""

    def __init__(self, call: Call, rpc: Any, answers: Iterator[Any], head: Head) -> None:
        self.call = call
        self.head = head
        self._rpc = rpc
        self._answers: Iterator[Any] | None = answers

    def read(self) -> bytes:
        """The next piece of the body; empty at its end."""
        while self._answers is not None:
            try:
                message = next(self._answers)
            except StopIteration:
                self._answers = None
                return b""
            except grpc.RpcError as failure:
                self.close()
                raise _lost(self.call, failure) from None
            if message.data:
                data: bytes = message.data
                return data
        return b""

    def body(self) -> bytes:
        return b"".join(iter(self.read, b""))

    def json(self) -> Any:
        return json_answer(self.head, self.body())

    def raise_for_status(self) -> None:
        if self.head.status >= 400:
            raise error_answer(self.head.status, self.body())

    def frames(self) -> Iterator[Started | Output | Event | dict[str, Any]]:
        """Values of a frame stream; the plain dict is the result and the last. A stream without one was cut."""
        parser = FrameParser()
        try:
            while True:
                piece = self.read()
                if not piece:
                    raise lost(self.call, "the stream was cut")
                for value in _values(self.call, parser, piece):
                    yield value
                    if isinstance(value, dict):
                        return
        finally:
            self.close()

    def close(self) -> None:
        """Let go; a foreground command whose answer is still under way is thereby cancelled."""
        self._answers = None
        self._rpc.cancel()


class RemoteLink:
    """The way to one gateway. Safe to share between threads."""

    home = ""

    def __init__(self, endpoint: str | None = None, *, api_key: str | None = None, ca_cert: str | None = None) -> None:
        self._route = ready(find_route(endpoint, api_key, ca_cert))
        credentials, options = self._route.credentials(), list(self._route.options)
        if credentials is None:
            self._channel = grpc.insecure_channel(self._route.target, options)
        else:
            self._channel = grpc.secure_channel(self._route.target, credentials, options)
        self._stub: Any = atoll_pb2_grpc.AtollServiceStub(self._channel)

    @property
    def path(self) -> str:
        return self._route.endpoint

    def call(self, call: Call) -> Any:
        """Send, wait, decode."""
        try:
            answer = self._stub.Call(_request(call), timeout=call.timeout, metadata=self._route.metadata)
        except grpc.RpcError as failure:
            raise _lost(call, failure) from None
        return json_answer(_head(answer), answer.body)

    def open(self, call: Call, body: Iterable[bytes] | None = None) -> RemoteExchange:
        """Send the call (its body in pieces when given) and wait for the head of the answer."""
        sending = _Sending(call, body)
        rpc = self._stub.Stream(iter(sending), timeout=call.timeout, metadata=self._route.metadata)
        try:
            first = next(rpc)
        except StopIteration:
            raise lost(call, "no answer") from None
        except grpc.RpcError as failure:
            if sending.failed is not None:
                raise sending.failed from None
            raise _lost(call, failure) from None
        except BaseException:
            rpc.cancel()
            raise
        return RemoteExchange(call, rpc, rpc, _head(first.head))

    def tunnel(self, sandbox: str, port: int) -> RemoteTunnel:
        """A TCP connection to a port inside."""
        return RemoteTunnel(self._stub, self._route, sandbox, port)

    def close(self) -> None:
        self._channel.close()


class RemoteTunnel:
    """`send` bytes, `recv` bytes (empty at the end), `close`: what `Sandbox.forward` returns."""

    def __init__(self, stub: Any, route: Route, sandbox: str, port: int) -> None:
        self._outgoing: queue.Queue[Any] = queue.Queue(16)
        self._outgoing.put(pb.ConnectRequest(sandbox=sandbox, port=port))
        self._rpc = stub.Connect(iter(self._outgoing.get, None), metadata=route.metadata)
        self._lock = threading.Lock()
        self._ended = False
        try:
            next(self._rpc)
        except (grpc.RpcError, StopIteration) as failure:
            raise _typed(failure) from None

    def send(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            self._put(pb.ConnectRequest(data=data[start : start + PIECE]))

    def send_eof(self) -> None:
        """No more from this side; the other may still send."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._outgoing.put(None)

    def recv(self) -> bytes:
        """The next bytes; empty when the other end has closed."""
        try:
            message = next(self._rpc)
        except StopIteration:
            return b""
        except grpc.RpcError as failure:
            raise _typed(failure) from None
        data: bytes = message.data
        return data

    def close(self) -> None:
        self._rpc.cancel()
        self._ended = True

    def __enter__(self) -> RemoteTunnel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, message: Any) -> None:
        while self._rpc.is_active():
            try:
                self._outgoing.put(message, timeout=0.5)
                return
            except queue.Full:  # the far side reads slowly, or the call has just ended
                continue
        raise Unavailable("the connection to the port is closed")


class AsyncRemoteExchange:
    """As `RemoteExchange`, for asyncio."""

    def __init__(self, call: Call, rpc: Any, head: Head) -> None:
        self.call = call
        self.head = head
        self._rpc = rpc

    async def read(self) -> bytes:
        while self._rpc is not None:
            try:
                message = await self._rpc.read()
            except grpc.RpcError as failure:
                self.close()
                raise _lost(self.call, failure) from None
            except BaseException:
                self.close()
                raise
            if message is grpc.aio.EOF:
                self._rpc = None
            elif message.data:
                data: bytes = message.data
                return data
        return b""

    async def body(self) -> bytes:
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    async def json(self) -> Any:
        return json_answer(self.head, await self.body())

    async def raise_for_status(self) -> None:
        if self.head.status >= 400:
            raise error_answer(self.head.status, await self.body())

    async def frames(self) -> AsyncIterator[Started | Output | Event | dict[str, Any]]:
        parser = FrameParser()
        try:
            while True:
                piece = await self.read()
                if not piece:
                    raise lost(self.call, "the stream was cut")
                for value in _values(self.call, parser, piece):
                    yield value
                    if isinstance(value, dict):
                        return
        finally:
            self.close()

    def close(self) -> None:
        rpc, self._rpc = self._rpc, None
        if rpc is not None:
            rpc.cancel()


class AsyncRemoteTunnel:
    """As `RemoteTunnel`, for asyncio."""

    def __init__(self, rpc: Any) -> None:
        self._rpc = rpc

    async def send(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            try:
                await self._rpc.write(pb.ConnectRequest(data=data[start : start + PIECE]))
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
            raise _typed(failure) from None
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
        return _typed(failure)
    try:
        await rpc.wait_for_connection()
        await rpc.read()
    except grpc.RpcError as told:
        return _typed(told)
    except asyncio.InvalidStateError:
        pass
    return Unavailable(f"the connection to the port was refused: {await rpc.details()}")


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
            answer = await stub.Call(_request(call), timeout=call.timeout, metadata=self._route.metadata)
        except grpc.RpcError as failure:
            raise _lost(call, failure) from None
        return json_answer(_head(answer), answer.body)

    async def open(self, call: Call, body: AsyncIterable[bytes] | None = None) -> AsyncRemoteExchange:
        stub = await self._stub()
        failed: list[BaseException] = []
        rpc = stub.Stream(_messages(call, body, failed), timeout=call.timeout, metadata=self._route.metadata)
        try:
            first = await rpc.read()
        except grpc.RpcError as failure:
            if failed:
                raise failed[0] from None
            raise _lost(call, failure) from None
        except BaseException:
            rpc.cancel()
            raise
        if first is grpc.aio.EOF:
            raise lost(call, "no answer")
        return AsyncRemoteExchange(call, rpc, _head(first.head))

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
                credentials, options = route.credentials(), list(route.options)
                if credentials is None:
                    self._channel = grpc.aio.insecure_channel(route.target, options)
                else:
                    self._channel = grpc.aio.secure_channel(route.target, credentials, options)
                self._made = atoll_pb2_grpc.AtollServiceStub(self._channel)
        return self._made


class _Sending:
    """The messages of a streamed call. Reads the caller's body in gRPC's thread and keeps what went wrong with it."""

    def __init__(self, call: Call, body: Iterable[bytes] | None) -> None:
        self._call = call
        self._body = body
        self.failed: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        yield pb.StreamRequest(head=_request(self._call))
        try:
            for piece in self._body or ():
                for start in range(0, len(piece), PIECE):
                    yield pb.StreamRequest(data=bytes(piece[start : start + PIECE]))
        except Exception as failure:
            self.failed = failure
            raise
        yield pb.StreamRequest(end=True)


async def _messages(call: Call, body: AsyncIterable[bytes] | None, failed: list[BaseException]) -> AsyncIterator[Any]:
    yield pb.StreamRequest(head=_request(call))
    try:
        if body is not None:
            async for piece in body:
                for start in range(0, len(piece), PIECE):
                    yield pb.StreamRequest(data=bytes(piece[start : start + PIECE]))
    except Exception as failure:
        failed.append(failure)
        raise
    yield pb.StreamRequest(end=True)


def _request(call: Call) -> Any:
    headers = [pb.Header(name=k, value=v) for k, v in call.headers if k.lower() in _HEADERS]
    return pb.CallRequest(method=call.method, target=call.target, headers=headers, body=call.body or b"")


def _head(answer: Any) -> Head:
    return Head(answer.status, {header.name.lower(): header.value for header in answer.headers})


def _values(call: Call, parser: FrameParser, piece: bytes) -> Iterator[Started | Output | Event | dict[str, Any]]:
    try:
        frames = parser.feed(piece)
    except ProtocolError as bad:
        raise lost(call, str(bad)) from None
    for kind, payload in frames:
        yield frame_value(call, kind, payload)


def _lost(call: Call, failure: grpc.RpcError) -> AtollError:
    """The error of a failed call: what the gateway said, or what its silence means for this call."""
    found = error_of(failure, acted=not call.repeatable)
    return lost(call, found.message) if type(found) is OutcomeUnknown and call.command_id else found


def _typed(failure: BaseException) -> AtollError:
    if isinstance(failure, grpc.RpcError):
        return error_of(failure, acted=False)
    return DaemonUnreachable("the gateway gave no answer")
