"""The ASGI app behind agentkernel's port."""

from atoll import errors
from atoll.server.error_boundary import guarded
from atoll.server.request import Exchange, Receive, Scope, Send, unquote
from atoll.surfaces.agentkernel.http import commands, files, runs, sandboxes, snapshots  # noqa: F401  # their routes
from atoll.surfaces.agentkernel.http.table import ROUTES, Handler, Served


class Agentkernel(Served):
    """Finds the route of a request, and answers what goes wrong in agentkernel's envelope."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        parts = [unquote(part) for part in scope["raw_path"][1:].split(b"/")]
        exchange = Exchange(scope, receive, send, None, parts)  # type: ignore[arg-type]  # known in the next step
        await guarded(exchange, self._serve(exchange), _fail)

    async def _serve(self, exchange: Exchange) -> None:
        exchange.who = self.settings.admission.check(exchange)
        handler = self._find(exchange.scope["method"], exchange.parts)
        with exchange.charged(self.core.accounts, exchange.who.owner):
            await handler(self, exchange)

    def _find(self, method: str, parts: list[str]) -> Handler:
        pattern = list(parts)
        if len(parts) > 1 and parts[0] in ("sandboxes", "snapshots") and parts[1] != "by-uuid":
            pattern[1] = "*"
            if len(parts) > 3 and parts[2] == "files":
                pattern[3:] = ["*"]
            elif len(parts) > 4 and parts[2:4] == ["exec", "detached"]:
                pattern[4] = "*"
        elif len(parts) == 3:
            pattern[2] = "*"
        found = ROUTES.get((method, "/".join(pattern)))
        if found is None:
            raise errors.NotFound("Not found")
        return found


async def _fail(exchange: Exchange, error: errors.AtollError) -> None:
    text = error.message + (f" ({error.hint})" if error.hint else "")
    status = 400 if error.http_status == 413 else error.http_status
    body = {"success": False, "error": text.encode("utf-8", "replace").decode(), "code": error.code}
    await exchange.answer(body, status)
