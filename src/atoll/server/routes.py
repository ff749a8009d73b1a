"""REST: a table of routes, each a few lines from HTTP to a verb of core. The OpenAPI document is made from this table.

A module of routes enters its own when it is imported; `app` imports them all, and checks a route's scope before it calls it.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypedDict

from atoll.core import Core
from atoll.core.access.audited_verbs import authorise
from atoll.core.access.principals import Principal
from atoll.core.verbs import VERBS, Scope
from atoll.server.request import Exchange


class Stopping(TypedDict):
    """A daemon that is about to end: the sandboxes that go on, and those whose ends could not be recorded."""

    stopping: bool
    sandboxes: int
    unrecorded: list[str]


class Host(Protocol):
    """The daemon around the app."""

    started_at: float
    pinned: bool  # stays when there is nothing to do

    def pin(self) -> None: ...

    async def stop(self, force: bool) -> Stopping: ...


class Rest(NamedTuple):
    """The objects a route's handler works with."""

    core: Core
    host: Host


Handler = Callable[[Rest, Exchange], Awaitable[None]]


class Route(NamedTuple):
    """`kind` is the request's struct, `answer` the answer's; `query` names the parameters; `verb` is the row of core's table
    that the first three come from."""

    handler: Handler
    does: str
    scope: Scope
    kind: type[Any] | None = None
    answer: Any = None
    query: tuple[str, ...] = ()
    status: int = 200
    verb: str = ""

    def authorise(self, who: Principal) -> None:
        """Refuse a caller that may not use this route."""
        authorise(who, self.scope)


ROUTES: dict[tuple[str, str], Route] = {}
PATHS: dict[tuple[str, str], str] = {}
SANDBOX = "/v1/sandboxes/{ref}"


def route(
    method: str,
    path: str,
    does: str,
    kind: type[Any] | None = None,
    answer: Any = None,
    query: tuple[str, ...] = (),
    status: int = 200,
    *,
    verb: str = "",
    scope: Scope | None = None,
) -> Callable[[Handler], Handler]:
    """Enter a handler into the table. A route names its verb, whose row says who may use it, or has a scope of its own."""
    if verb:
        row = VERBS[verb]
        kind, answer, needed = kind or row.request, answer or row.answer, row.scope
    elif scope is not None:
        needed = scope
    else:
        raise TypeError(f"{method} {path} names no verb and no scope")

    def add(handler: Handler) -> Handler:
        pattern = "/".join("*" if part.startswith("{") else part for part in path[1:].split("/"))
        ROUTES[method, pattern] = Route(handler, does, needed, kind, answer, query, status, verb)
        PATHS[method, pattern] = path
        return handler

    return add
