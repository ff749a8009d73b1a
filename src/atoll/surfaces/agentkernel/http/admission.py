"""Admission at agentkernel's port: who may call, and what a browser may not do.

A page in somebody's browser can send requests to loopback. So Host must be a name of this door, a foreign Origin is refused,
and bodies must say that they are JSON, which a page cannot do without asking first. Without a key only processes of the
daemon's own user are served, known by the owner of their socket; any other address needs a key.
"""

import hmac
import os
from dataclasses import dataclass

from atoll import errors
from atoll.core.access.principals import Principal, local
from atoll.server.error_boundary import content_kind, refuse_browsers
from atoll.server.request import Exchange
from atoll.server.tcp import is_loopback


@dataclass(frozen=True, slots=True)
class Admission:
    """The conditions of admission: the address served, and the key if there is one."""

    host: str
    key: str | None

    def check(self, exchange: Exchange) -> Principal:
        """The caller, or why not."""
        refuse_browsers(exchange, only_local_names=is_loopback(self.host))
        if exchange.parts == ["health"]:
            return local(os.geteuid(), os.getegid())  # it says nothing about anybody
        if self.key is not None:
            self._check_key(exchange, self.key)
        elif exchange.scope["state"].get("owner") != os.geteuid():
            raise errors.Unauthenticated("Missing API key: only processes of the server's own user need none")
        return local(os.geteuid(), os.getegid())

    def _check_key(self, exchange: Exchange, key: str) -> None:
        given = exchange.header(b"x-api-key")
        header = exchange.header(b"authorization")
        if header:
            scheme, _, given = header.partition(" ")
            if scheme.lower() != "bearer":
                raise errors.Unauthenticated("Invalid authorization scheme: expected Bearer")
        if not given:
            raise errors.Unauthenticated("Missing API key")
        if not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise errors.Unauthenticated("Invalid API key")


def check_content(exchange: Exchange, body: bytes) -> None:
    """A body must be JSON by its own word."""
    kind = content_kind(exchange)
    if (body or kind) and kind != "application/json":
        raise errors.InvalidArgument("the content type must be application/json")
