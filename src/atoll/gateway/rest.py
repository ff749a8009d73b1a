"""REST: a table of routes, each a few lines from HTTP to a verb of core. The OpenAPI document is made from this table.

The routes are in the modules named `rest_*`, and beside the doors they belong to.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from atoll import errors
from atoll.core import Core
from atoll.core.access import Principal
from atoll.core.auditing import SOURCE
from atoll.core.presence import PEER_PID
from atoll.gateway.exchange import Exchange, Receive, Scope, Send, unquote
from atoll.gateway.guarding import guarded


class Host(Protocol):
    """The daemon around the app."""

    started_at: float

    def pin(self) -> None: ...

    async def stop(self, force: bool) -> int: ...


class Route(NamedTuple):
    """`kind` is the request's struct, `answer` the answer's; `query` names the parameters."""

    handler: Callable[["Rest", Exchange], Awaitable[None]]
    does: str
    kind: type[Any] | None = None
    answer: Any = None
    query: tuple[str, ...] = ()
    status: int = 200


ROUTES: dict[tuple[str, str], Route] = {}
Handler = Callable[["Rest", Exchange], Awaitable[None]]


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


PATHS: dict[tuple[str, str], str] = {}
NAMED = ("sandboxes", "snapshots", "approvals", "secrets")  # collections whose members have a name in the path
SANDBOX = "/v1/sandboxes/{ref}"


class Rest:
    """The ASGI app. Who calls is in `scope["state"]["principal"]`, put there by the listener."""

    def __init__(self, core: Core, host: Host) -> None:
        self.core = core
        self.host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = [unquote(part) for part in scope["raw_path"][1:].split(b"/")]
        who = scope["state"].get("principal")
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send, who, parts)
            return
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, who, parts)
        PEER_PID.set(scope["state"].get("pid", 0))
        if not SOURCE.get():  # a door before this one may have said more
            SOURCE.set("http unix" if scope["client"] is None else f"http {scope['client'][0]}")
        await guarded(exchange, self._serve(exchange), Exchange.fail)

    async def _serve(self, exchange: Exchange) -> None:
        if not isinstance(exchange.who, Principal):
            raise errors.Unauthenticated("who is calling is not known")
        await self._find(exchange.scope["method"], exchange.parts)(self, exchange)

    def _find(self, method: str, parts: list[str]) -> Handler:
        pattern = list(parts)
        if len(parts) > 2 and parts[1] in NAMED:
            pattern[2] = "*"
            if len(parts) > 4 and parts[3] in ("commands", "ports", "exposures"):
                pattern[4] = "*"
        name = "/".join(pattern)
        found = ROUTES.get((method, name))
        if found is None:
            others = sorted(m for m, p in ROUTES if p == name)
            if others:
                raise errors.Unsupported(f"{method} is not possible here", hint="possible: " + ", ".join(others))
            if method == "POST" and parts[0] == "functions" and len(parts) == 2:
                from atoll.gateway.functions.routes import unknown

                return unknown
            raise errors.NotFound("no such route", hint="see /v1/openapi.json")
        return found.handler

    async def _websocket(self, scope: Scope, receive: Receive, send: Send, who: Any, parts: list[str]) -> None:
        from atoll.gateway.tunnel import refuse, serve

        if not isinstance(who, Principal):
            await refuse(errors.Unauthenticated("who is calling is not known"), send)
            return
        if parts == ["v1", "mcp"]:
            from atoll.gateway.mcp.stdio import serve as converse

            await converse(self.core, who, receive, send)
            return
        if len(parts) != 5 or parts[:2] != ["v1", "sandboxes"] or parts[3] != "ports":
            await refuse(errors.NotFound("no such route"), send)
            return
        await serve(self.core.ports, who, parts[2], parts[4], receive, send)


# Imported for their entries in the table
from atoll.gateway import (  # noqa: E402
    rest_approvals,  # noqa: F401
    rest_audit,  # noqa: F401
    rest_commands,  # noqa: F401
    rest_daemon,  # noqa: F401
    rest_files,  # noqa: F401
    rest_history,  # noqa: F401
    rest_images,  # noqa: F401
    rest_keys,  # noqa: F401
    rest_network,  # noqa: F401
    rest_sandboxes,  # noqa: F401
    rest_workspaces,  # noqa: F401
)
from atoll.gateway.agentkernel import routes as agentkernel_routes  # noqa: E402, F401
from atoll.gateway.functions import routes as function_routes  # noqa: E402, F401
from atoll.gateway.mcp import routes as mcp_routes  # noqa: E402, F401
