"""The ASGI app behind the door: control plane, envd and signed URLs. Other ports never come here (`door.py`)."""

from atoll import errors
from atoll.core.access.audited_verbs import SOURCE
from atoll.core.access.credentials import Peer
from atoll.core.access.ratelimit import Rate
from atoll.server.error_boundary import guarded
from atoll.server.request import Exchange, Receive, Scope, Send, unquote
from atoll.surfaces.e2b.control import (  # noqa: F401  # their routes
    lists,
    network,
    observed,
    refused,
    sandboxes,
    snapshots,
    templates,
    volumes,
)
from atoll.surfaces.e2b.control.table import find
from atoll.surfaces.e2b.envd import app as envd
from atoll.surfaces.e2b.replies import WireError, fail, nothing, query_of
from atoll.surfaces.e2b.routing import ENVD, find_place
from atoll.surfaces.e2b.served import Served
from atoll.surfaces.e2b.tokens import is_signed
from atoll.surfaces.e2b.words import TEMPLATE

LOOKUPS = Rate(200, 50)  # of URLs that name no sandbox, by address: each is compared with all sandboxes


class E2b(Served):
    """Finds out whom a request is for, and answers what goes wrong in the contract's form."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        parts = [unquote(part) for part in scope["raw_path"].strip(b"/").split(b"/")]
        exchange = Exchange(scope, receive, send, None, parts)  # type: ignore[arg-type]  # known in the next step
        SOURCE.set(f"e2b {scope['client'][0]}" if scope["client"] else "e2b")
        await guarded(exchange, self._serve(exchange), fail)

    async def _serve(self, exchange: Exchange) -> None:
        place = find_place(exchange.scope["headers"])
        if place is not None and place.port != ENVD:
            raise WireError(421, "send requests to different ports over different connections")
        if place is not None:
            await envd.serve(self, exchange, place.sandbox)
        elif exchange.parts == ["files"] and "signature" in (query := query_of(exchange)):
            await envd.serve(self, exchange, self._signed_for(exchange, query))
        else:
            await self._control(exchange)

    async def _control(self, exchange: Exchange) -> None:
        if exchange.parts == ["health"]:
            return await nothing(exchange)
        if exchange.parts[:1] == [templates.UPLOADS]:
            return await templates.upload(self, exchange)
        peer = Peer(exchange.scope["client"][0] if exchange.scope["client"] else "")
        exchange.who = self.core.keeper.identify(peer, exchange.header(b"x-api-key"))
        found = find(exchange.scope["method"], exchange.parts)
        self.core.keeper.admit(exchange.who, found.kind)
        with self.core.keeper.watch.during(exchange.who), exchange.charged(self.core.accounts, exchange.who.owner):
            await found.handler(self, exchange)

    def _signed_for(self, exchange: Exchange, query: dict[str, str]) -> str:
        """Return the sandbox whose token made the signature of a URL that names none."""
        method = exchange.scope["method"]
        address = exchange.scope["client"][0] if exchange.scope["client"] else ""
        self.core.keeper.limiter.take(f"signature {address}", "read", LOOKUPS)
        for live in list(self.core.sandboxes.live.values()):
            if TEMPLATE in live.spec.labels and is_signed(query, method, self.tokens.make("envd", live.id)):
                return live.id
        raise errors.Unauthenticated("the signature is wrong")
