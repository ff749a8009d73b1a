"""REST: a table of routes, each a few lines from HTTP to a verb of core. The OpenAPI document is made from this table.

A module of routes enters its own when it is imported. `rest_app` imports them all, and serves them.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from atoll.core import Core
from atoll.server.request import Exchange


class Host(Protocol):
    """The daemon around the app."""

    started_at: float
    pinned: bool  # stays when there is nothing to do

    def pin(self) -> None: ...

    async def stop(self, force: bool) -> int: ...


class Rest(NamedTuple):
    """What a handler works with."""

    core: Core
    host: Host


Handler = Callable[[Rest, Exchange], Awaitable[None]]


class Route(NamedTuple):
    """`kind` is the request's struct, `answer` the answer's; `query` names the parameters."""

    handler: Handler
    does: str
    kind: type[Any] | None = None
    answer: Any = None
    query: tuple[str, ...] = ()
    status: int = 200


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
) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        pattern = "/".join("*" if part.startswith("{") else part for part in path[1:].split("/"))
        ROUTES[method, pattern] = Route(handler, does, kind, answer, query, status)
        PATHS[method, pattern] = path
        return handler

    return add
