"""The REST interface as an ASGI app: every module of routes, and how a request finds its own."""

from contextlib import suppress
from typing import Any

from atoll import errors
from atoll.core import Core
from atoll.core.access.audited_verbs import SOURCE
from atoll.core.access.credentials import may
from atoll.core.access.principals import Principal
from atoll.core.access.terminal_presence import PEER_PID
from atoll.server import tunnel
from atoll.server.error_boundary import guarded
from atoll.server.request import Exchange, Receive, Scope, Send, unquote
from atoll.server.routes import PATHS, ROUTES, Host, Rest, Route
from atoll.surfaces.agentkernel.http import routes as agentkernel_routes
from atoll.surfaces.e2b import routes as e2b_routes
from atoll.surfaces.iii import routes as function_routes
from atoll.surfaces.mcp import routes as mcp_routes
from atoll.surfaces.rest import (
    approvals,
    audit,
    commands,
    daemon,
    files,
    history,
    images,
    interpreter,
    keys,
    memory,
    metrics,
    network,
    sandboxes,
    shells,
    volumes,
    workspaces,
)

__all__ = ["MODULES", "PATHS", "ROUTES", "RestApp"]

MODULES = (
    approvals, audit, commands, daemon, files, history, images, interpreter, keys, memory, metrics, network, sandboxes, shells,
    volumes, workspaces,
    agentkernel_routes, e2b_routes, function_routes, mcp_routes,
)  # fmt: skip
NAMED = (
    "sandboxes",
    "snapshots",
    "checkpoints",
    "approvals",
    "secrets",
    "volumes",
)  # collections whose members have a name in the path


class RestApp:
    """The REST application. The listener puts the caller into `scope["state"]["principal"]`."""

    def __init__(self, core: Core, host: Host) -> None:
        self.rest = Rest(core, host)

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
        found = self._find(exchange.scope["method"], exchange.parts)
        found.authorise(exchange.who)
        with self.rest.core.keeper.watch.during(exchange.who):
            await found.handler(self.rest, exchange)

    def _find(self, method: str, parts: list[str]) -> Route:
        pattern = list(parts)
        if len(parts) > 2 and parts[1] in NAMED:
            pattern[2] = "*"
            if len(parts) > 4 and parts[3] in ("commands", "contexts", "shells", "ports", "exposures"):
                pattern[4] = "*"
        name = "/".join(pattern)
        found = ROUTES.get((method, name))
        if found is None:
            others = sorted(m for m, p in ROUTES if p == name)
            if others:
                raise errors.Unsupported(f"{method} is not possible here", hint="possible: " + ", ".join(others))
            if method == "POST" and parts[0] == "functions" and len(parts) == 2:
                return function_routes.UNKNOWN
            raise errors.NotFound("no such route", hint="see /v1/openapi.json")
        return found

    async def _websocket(self, scope: Scope, receive: Receive, send: Send, who: Any, parts: list[str]) -> None:
        if not isinstance(who, Principal):
            await tunnel.refuse(errors.Unauthenticated("who is calling is not known"), send)
            return
        if parts == ["v1", "mcp"]:
            from atoll.surfaces.mcp import stdio  # a daemon starts sooner without it

            await stdio.serve(self.rest.core, who, receive, send)
            return
        if len(parts) != 5 or parts[:2] != ["v1", "sandboxes"] or parts[3] != "ports":
            await tunnel.refuse(errors.NotFound("no such route"), send)
            return
        if not may(who, "use"):
            await tunnel.refuse(errors.PermissionDenied("this key does not have the scope 'use'"), send)
            return
        with suppress(errors.Unauthenticated, errors.PermissionDenied), self.rest.core.keeper.watch.during(who):
            await tunnel.serve(self.rest.core.ports, who, parts[2], parts[4], receive, send)
            return
        await send({"type": "websocket.close", "code": tunnel.POLICY, "reason": "the key counts no more"})
