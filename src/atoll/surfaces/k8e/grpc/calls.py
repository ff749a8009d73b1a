"""Around every RPC: who is calling, how often, what may go wrong. The services behind see a principal and a message.

A service is an object with one method for each RPC of its descriptor, `async def Name(self, who, request)`; streaming
answers are async generators, streaming requests are async iterators of messages. Messages are parsed here, after the
caller is known, so that bytes from strangers are never parsed and a broken message is InvalidArgument.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message
from google.protobuf.message_factory import GetMessageClass

from atoll import accounts
from atoll.core.access.audited_verbs import SOURCE, authorise
from atoll.core.access.credentials import Doorkeeper, bearer_of
from atoll.core.access.principals import Principal
from atoll.core.access.ratelimit import Class
from atoll.core.access.rights_watch import OpenCall
from atoll.core.access.terminal_presence import PEER_PID
from atoll.core.verbs import Scope
from atoll.errors import AtollError, Internal, InvalidArgument, Unauthenticated
from atoll.model import USER

from .doors import Doors
from .readers import Reader
from .status import message_of, status_of, trailers_of

LARGE = 64 * 1024  # bytes of a message from which on it is charged to its sender
_log = logging.getLogger(__name__)

TENANT: ContextVar[str] = ContextVar("tenant", default="")  # what `x-sandbox-tenant` says; a label, never a right

STREAM: ContextVar[str] = ContextVar("stream", default="")  # what `x-sandbox-stream` says of ExecStream

USER_INSIDE: ContextVar[str] = ContextVar(
    "user", default=""
)  # what `x-sandbox-user` says: whose rights a call has inside

_FIELDS = frozenset(("authorization", "x-sandbox-tenant", "x-sandbox-stream", "x-sandbox-user"))


def user_inside() -> str | None:
    """Return the user inside whose rights the call has, from its metadata; None is root."""
    if not (user := USER_INSIDE.get()):
        return None
    if not USER.match(user):
        raise InvalidArgument("x-sandbox-user must be a name or number, optionally with `:group`")
    return user


Kind = Class | None  # None: not counted
Observer = Callable[[Principal | None, str, str, str], None]  # who, method, source, result


class Calls:
    """Makes gRPC handlers out of services."""

    def __init__(self, doors: Doors, keeper: Doorkeeper, observe: Observer | None = None) -> None:
        self._doors = doors
        self._keeper = keeper
        self._observe = observe

    def handlers(
        self, service: ServiceDescriptor, implementation: object, kinds: Mapping[str, Kind], scopes: Mapping[str, Scope]
    ) -> grpc.GenericRpcHandler:
        """All RPCs of a service. `kinds` says which are counted as writes (others are reads), `scopes` which need another
        scope than `use`."""
        table = {
            method.name: self._handler(
                method,
                getattr(implementation, method.name),
                kinds.get(method.name, "read"),
                scopes.get(method.name, "use"),
            )
            for method in service.methods
        }
        return grpc.method_handlers_generic_handler(service.full_name, table)

    def _handler(self, method: MethodDescriptor, function: Any, kind: Kind, scope: Scope) -> grpc.RpcMethodHandler:
        parse = _parser(GetMessageClass(method.input_type))
        streaming = (method.client_streaming, method.server_streaming)

        async def unary(requests: Any, context: grpc.aio.ServicerContext) -> bytes:
            async with self._guarded(context, method.full_name, kind, scope) as who:
                data = await _only(context)
                with self._held(who, data):
                    answer: Message = await function(who, parse(data))
                return Reader(self._doors, context).take_last(_pack(answer))
            raise AssertionError("unreachable")

        async def stream(requests: Any, context: grpc.aio.ServicerContext) -> None:
            async with self._guarded(context, method.full_name, kind, scope) as who:
                asked = _each(requests, parse) if streaming[0] else parse(await _only(context))
                reader = Reader(self._doors, context)
                async with contextlib.aclosing(function(who, asked)) as answers:
                    async for answer in answers:
                        await reader.take(_pack(answer))

        # gRPC reads a message before it calls a handler for single messages, and one for streams at once. So even a single
        # message is a stream here, of one: it is read when its sender is known.
        if streaming == (False, False):
            return grpc.stream_unary_rpc_method_handler(unary)
        if streaming[1]:
            return grpc.stream_stream_rpc_method_handler(stream)
        raise TypeError(f"{method.full_name}: client streaming without server streaming is not used here")

    def _held(self, who: Principal, data: bytes) -> contextlib.AbstractContextManager[object]:
        """The account of a large message for as long as it is worked on."""
        if len(data) < LARGE:
            return contextlib.nullcontext()
        return self._doors.books.lease(accounts.MEMORY, len(data), accounts.owner(who.owner))

    @contextlib.asynccontextmanager
    async def _guarded(
        self, context: grpc.aio.ServicerContext, method: str, kind: Kind, scope: Scope
    ) -> AsyncIterator[Principal]:
        peer = self._doors.who(context.peer())
        who: Principal | None = None
        use: OpenCall | None = None
        outcome = "ok"
        try:
            if peer is None:
                raise Unauthenticated("this connection is not known")
            said = _read_metadata(context.invocation_metadata())
            who = self._keeper.identify(peer, bearer_of(said.get("authorization")))
            self._doors.admit(context.peer(), who)
            if kind is not None:
                self._keeper.admit(who, kind)
            authorise(who, scope)
            TENANT.set(said.get("x-sandbox-tenant", ""))
            STREAM.set(said.get("x-sandbox-stream", ""))
            USER_INSIDE.set(said.get("x-sandbox-user", ""))
            SOURCE.set(f"grpc {peer.address}")
            PEER_PID.set(peer.pid)
            with self._keeper.watch.during(who) as use:
                yield who
        except AtollError as error:
            outcome = error.code
            if who is None:
                self._doors.refuse(context.peer())
            if use is not None and use.refusal is not None:
                Reader(self._doors, context).expect_end()  # the answer may have begun
            await context.abort(status_of(error), message_of(error), trailers_of(error))
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except (grpc.aio.AbortError, GeneratorExit):
            raise
        except Exception:
            outcome, mark = "internal", secrets.token_hex(4)
            _log.exception("%s failed (%s)", method, mark)
            bug = Internal(f"internal error {mark}", hint="the daemon's log has the details")
            await context.abort(status_of(bug), message_of(bug), trailers_of(bug))
        finally:
            if self._observe is not None:
                self._observe(who, method, peer.address if peer else "", outcome)


def _read_metadata(metadata: Any) -> dict[str, str]:
    """Return atoll's fields of a call's metadata; two values for one name contradict each other."""
    found: dict[str, str] = {}
    for name, value in metadata or ():
        if name in _FIELDS:
            if name in found:
                raise Unauthenticated(f"more than one `{name}` was sent")
            found[name] = value if isinstance(value, str) else value.decode("utf-8", "replace")
    return found


def _parser(cls: type[Message]) -> Callable[[bytes], Message]:
    def parse(data: bytes) -> Message:
        try:
            return cls.FromString(data)
        except (DecodeError, UnicodeDecodeError, ValueError) as bad:
            raise InvalidArgument(f"not a valid {cls.DESCRIPTOR.full_name}: text must be UTF-8") from bad

    return parse


async def _only(context: grpc.aio.ServicerContext) -> bytes:
    """The one message of a call that has one."""
    data: Any = await context.read()
    if data is grpc.aio.EOF:
        raise InvalidArgument("the call ended before its message")
    return bytes(data)


async def _each(requests: AsyncIterator[bytes], parse: Callable[[bytes], Message]) -> AsyncIterator[Message]:
    async for data in requests:
        yield parse(data)


def _pack(answer: Message) -> bytes:
    try:
        return answer.SerializeToString()
    except (EncodeError, ValueError) as bad:
        raise Internal("the answer could not be encoded") from bad
