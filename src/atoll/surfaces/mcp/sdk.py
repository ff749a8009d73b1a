"""Streamable HTTP of the current protocol, by the official SDK. Imported when a first client wants it: that takes a second."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from atoll.core.access.principals import Principal
from atoll.server.request import Event, Receive, Scope, Send
from atoll.surfaces.mcp import hello
from atoll.surfaces.mcp.client import BadArguments, Client
from atoll.surfaces.mcp.tools import listed

if TYPE_CHECKING:
    from atoll.surfaces.mcp.http import McpHttp

WHO = "atoll.who"
IDLE_S = 1800.0
MAX_SESSIONS = 1000
MAX_BODY = 16 * 1024 * 1024


class Sdk:
    """The SDK's server and its sessions, one client each. Requests without a session share their credential's client."""

    def __init__(self, http: "McpHttp") -> None:
        self._http = http
        self._clients: dict[str, Client] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._manager: Any = None

    async def start(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await asyncio.to_thread(_import)
        self._task = asyncio.create_task(self._run(ready))
        await ready

    async def _run(self, ready: "asyncio.Future[None]") -> None:
        """The manager must be left by the task that entered it."""
        from mcp.server.lowlevel import Server
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        logging.getLogger("mcp").setLevel(logging.WARNING)
        toolset = self._http.settings.toolset
        server: Server[Any] = Server(
            hello.NAMES[toolset],
            version=hello.SERVER_VERSION,
            instructions=hello.INSTRUCTIONS[toolset],
            on_list_tools=self._list,
            on_call_tool=self._call,
        )
        self._manager = StreamableHTTPSessionManager(
            server, session_idle_timeout=IDLE_S, max_sessions=MAX_SESSIONS, max_request_body_size=MAX_BODY
        )
        async with self._manager.run():
            ready.set_result(None)
            await self._stop.wait()

    async def handle(self, scope: Scope, receive: Receive, send: Send, who: Principal) -> None:
        from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
        from mcp.server.auth.provider import AccessToken

        user = AuthenticatedUser(AccessToken(token="", client_id=who.owner, scopes=[]))  # binds the session
        await self._manager.handle_request({**scope, "user": user, WHO: who}, receive, send)

    async def close(self) -> None:
        self._stop.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=10)
        await asyncio.gather(*(client.close() for client in self._clients.values()), *self._ends)

    async def _list(self, context: Any, params: Any) -> Any:
        from mcp_types import ListToolsResult

        return ListToolsResult.model_validate({"tools": list(listed(self._http.settings.toolset))})

    async def _call(self, context: Any, params: Any) -> Any:
        from mcp.shared.exceptions import MCPError
        from mcp_types import CallToolResult

        async def report(progress: float, text: str) -> None:
            await context.session.report_progress(progress, None, text)

        try:
            found = await self._client(context).call(params.name, params.arguments, report)
        except BadArguments as bad:
            raise MCPError(code=hello.BAD_PARAMETERS, message=str(bad)) from None
        return CallToolResult.model_validate(found)

    def _client(self, context: Any) -> Client:
        who: Principal = context.request.scope[WHO]
        session = context.request.headers.get("mcp-session-id")
        if not session:
            return self._http.shared(who)
        client = self._clients.get(session)
        if client is None:
            client = self._clients[session] = self._http.client(who)
            client.on_lost = lambda: self._keep(self._delete(session, who))
            about = context.session.client_params
            client.name = about.client_info.name[:120].lower() if about is not None else ""
            # The SDK hands out no public hook for the end of a session; its connection unwinds this stack then.
            context.session._connection.exit_stack.callback(self._ended, session)
        return client

    def _ended(self, session: str) -> None:
        client = self._clients.pop(session, None)
        if client is not None:
            self._keep(client.close())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _delete(self, session: str, who: Principal) -> None:
        """End a session as its client would, with DELETE: the SDK has no other public way."""
        scope: Scope = {"type": "http", "method": "DELETE", "path": "/mcp", "query_string": b""}
        scope["headers"] = [(b"mcp-session-id", session.encode()), (b"host", b"localhost")]

        async def receive() -> Event:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Event) -> None:
            """Nobody hears it."""

        await self.handle(scope, receive, send, who)


def _import() -> None:
    import mcp.server.auth.middleware.bearer_auth
    import mcp.server.lowlevel
    import mcp.server.streamable_http_manager  # noqa: F401
