"""What every HTTP door does around a request: keep browsers out, and answer whatever goes wrong in its own words."""

import asyncio
from collections.abc import Awaitable, Callable

from atoll import errors
from atoll.server.request import Exchange, Gone, internal, log

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))


async def guarded(
    exchange: Exchange, work: Awaitable[None], fail: Callable[[Exchange, errors.AtollError], Awaitable[None]]
) -> None:
    """Do the work; if it fails before its answer has begun, `fail` answers instead."""
    try:
        try:
            await work
        except (errors.AtollError, Gone, asyncio.CancelledError):
            raise
        except Exception as error:
            raise internal(error) from None
    except Gone:
        pass
    except errors.AtollError as error:
        if exchange.started:
            log.warning("an answer was cut: %s: %s", error.code, error)
            raise  # the server closes the connection, so that the caller sees a cut answer as one
        await fail(exchange, error)


def refuse_browsers(exchange: Exchange, *, only_local_names: bool) -> None:
    """A page in somebody's browser can send requests to loopback: Host must be a name of ours, Origin no other."""
    asked = exchange.header(b"host")
    name = asked[1:].partition("]")[0] if asked.startswith("[") else asked.partition(":")[0]
    if only_local_names and name.lower() not in LOCAL_NAMES:
        raise errors.PermissionDenied("this server is not called that", hint="use http://localhost")
    origin = exchange.header(b"origin")
    if origin and origin.lower() != f"http://{asked.lower()}":
        raise errors.PermissionDenied("requests from web pages are refused")
    if exchange.header(b"sec-fetch-site") in ("cross-site", "same-site"):
        raise errors.PermissionDenied("requests from web pages are refused")


def content_kind(exchange: Exchange) -> str:
    return exchange.header(b"content-type").partition(";")[0].strip().lower()
