"""REST: a table of routes, each a few lines from HTTP to a verb of core. The OpenAPI document is made from this table.

A module of routes enters its own when it is imported; `app` imports them all, and checks a route's scope before it calls it.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, Protocol

from atoll.core import Core
from atoll.core.access.credentials import require
from atoll.core.access.principals import Principal
from atoll.errors import PermissionDenied
from atoll.server.request import Exchange


class Host(Protocol):
    """The daemon around the app."""

    started_at: float
    pinned: bool  # stays when there is nothing to do

    def pin(self) -> None: ...

    async def stop(self, force: bool) -> dict[str, Any]: ...


class Rest(NamedTuple):
    """What a handler works with."""

    core: Core
    host: Host


Handler = Callable[[Rest, Exchange], Awaitable[None]]
Scope = Literal[
    "use", "admin", "local", "own"
]  # a key's scope; `local`: the daemon's own user; `own`: the verb decides


class Route(NamedTuple):
    """`kind` is the request's struct, `answer` the answer's; `query` names the parameters."""

    handler: Handler
    does: str
    scope: Scope
    kind: type[Any] | None = None
    answer: Any = None
    query: tuple[str, ...] = ()
    status: int = 200

    def authorise(self, who: Principal) -> None:
        """Refuse a caller that may not use this route."""
        if self.scope == "local":
            if who.kind != "local":
                raise PermissionDenied("only the daemon's own user may do this", hint="run it on the daemon's machine")
        elif self.scope != "own":
            require(who, self.scope)


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
    scope: Scope,
) -> Callable[[Handler], Handler]:
    """Enter a handler into the table. Every route says who may use it."""

    def add(handler: Handler) -> Handler:
        pattern = "/".join("*" if part.startswith("{") else part for part in path[1:].split("/"))
        ROUTES[method, pattern] = Route(handler, does, scope, kind, answer, query, status)
        PATHS[method, pattern] = path
        return handler

    return add
