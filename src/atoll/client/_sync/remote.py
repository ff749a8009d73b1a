"""A gateway elsewhere behind the same face as the local daemon's `Link`; `remote_async.py` is the one for asyncio.

The calls are the very same values (`calls.py`); here they travel in `atoll.v1` over one verified gRPC channel. A call is
one message each way, or a stream where its body or answer may be long. The rules about lost answers are those of the
local drivers: what may have been acted upon is never sent again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import grpc

from atoll.errors import Unavailable
from atoll.proto.atoll.v1 import atoll_pb2 as pb
from atoll.proto.atoll.v1 import atoll_pb2_grpc
from atoll.surfaces.k8e.sdk.channel import Route, find_route, ready

from .. import remote_wire as wire
from ..http import Head
from ..outcome import Answered, json_answer, lost

if TYPE_CHECKING:
    from ..calls import Call


class RemoteExchange(Answered):
    """One call under way."""

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
                raise wire.failed(self.call, failure) from None
            if message.data:
                data: bytes = message.data
                return data
        return b""

    def close(self) -> None:
        """Let go; a foreground command whose answer is still under way is thereby cancelled."""
        self._answers = None
        self._rpc.cancel()

    def interrupt(self) -> None:
        """End the exchange from outside; whoever reads it now is told that it was lost."""
        self._rpc.cancel()


class RemoteLink:
    """The way to one gateway. Safe to share between threads."""

    home = ""

    def __init__(self, endpoint: str | None = None, *, api_key: str | None = None, ca_cert: str | None = None) -> None:
        self._route = ready(find_route(endpoint, api_key, ca_cert))
        self._channel = self._route.channel()
        self._stub: Any = atoll_pb2_grpc.AtollServiceStub(self._channel)

    @property
    def path(self) -> str:
        return self._route.endpoint

    def call(self, call: Call) -> Any:
        """Send, wait, decode."""
        try:
            answer = self._stub.Call(wire.request(call), timeout=call.timeout, metadata=self._route.metadata)
        except grpc.RpcError as failure:
            raise wire.failed(call, failure) from None
        return json_answer(wire.head(answer), answer.body)

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
            raise wire.failed(call, failure) from None
        except BaseException:
            rpc.cancel()
            raise
        return RemoteExchange(call, rpc, rpc, wire.head(first.head))

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
            raise wire.unreached(failure) from None

    def send(self, data: bytes) -> None:
        for start in range(0, len(data), wire.PIECE):
            self._put(pb.ConnectRequest(data=data[start : start + wire.PIECE]))

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
            raise wire.unreached(failure) from None
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


class _Sending:
    """The messages of a streamed call. Reads the caller's body in gRPC's thread and keeps what went wrong with it."""

    def __init__(self, call: Call, body: Iterable[bytes] | None) -> None:
        self._call = call
        self._body = body
        self.failed: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        yield pb.StreamRequest(head=wire.request(self._call))
        try:
            for piece in self._body or ():
                for start in range(0, len(piece), wire.PIECE):
                    yield pb.StreamRequest(data=bytes(piece[start : start + wire.PIECE]))
        except Exception as failure:
            self.failed = failure
            raise
        yield pb.StreamRequest(end=True)
