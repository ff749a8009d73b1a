"""The table of envd's calls, and what each works with."""

import base64
import binascii
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from atoll import errors
from atoll.core.access.principals import Principal
from atoll.server.request import Exchange
from atoll.surfaces.e2b.envd.connect import Fields, Json
from atoll.surfaces.e2b.envd.people import People, Person
from atoll.surfaces.e2b.served import Served


@dataclass
class Call:
    """One call for one sandbox, by somebody who showed its token."""

    app: Served
    exchange: Exchange
    who: Principal
    sandbox: str
    timeout_ms: int | None = None

    async def person(self) -> Person:
        """Return the user that the call names."""
        return await self.app.people.find(self.who, self.sandbox, _user(self.exchange.header(b"authorization")))

    async def starter(self) -> Person:
        """Return the user that a process is started as."""
        live = self.app.live(self.who.owner, self.sandbox)
        image = live.spec.image if live is not None else ""
        return await self.app.people.starter(
            self.who, self.sandbox, _user(self.exchange.header(b"authorization")), image
        )

    async def people(self) -> People:
        return await self.app.people.of(self.who, self.sandbox)


def _user(header: str) -> str:
    """Return the name in an `Authorization: Basic` header; it is a choice and no credential."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise errors.Unauthenticated("the Authorization header is not understood") from None


Unary = Callable[[Call, Fields], Awaitable[Json]]
Streaming = Callable[[Call, Fields], AsyncIterator[Json]]


class Stream(NamedTuple):
    """`ends_with_call`: the call's deadline ends the stream and nothing else."""

    handler: Streaming
    keepalive: Json
    ends_with_call: bool


UNARY: dict[tuple[str, str], Unary] = {}
STREAMS: dict[tuple[str, str], Stream] = {}


def unary(service: str, method: str) -> Callable[[Unary], Unary]:
    def add(handler: Unary) -> Unary:
        UNARY[service, method] = handler
        return handler

    return add


def stream(
    service: str, method: str, keepalive: Json, *, ends_with_call: bool = True
) -> Callable[[Streaming], Streaming]:
    def add(handler: Streaming) -> Streaming:
        STREAMS[service, method] = Stream(handler, keepalive, ends_with_call)
        return handler

    return add
