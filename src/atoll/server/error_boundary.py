"""Wrap every HTTP request: keep browsers out, and answer each error in the words of the surface."""

import asyncio
from collections.abc import Awaitable, Callable

from atoll import errors
from atoll.server.request import Exchange, Gone, internal, log

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))


async def guarded(
    exchange: Exchange, work: Awaitable[None], fail: Callable[[Exchange, errors.AtollError], Awaitable[None]]
) -> None:
    """Do the work; if it fails before its answer has begun, `fail` answers instead.

    An answer that has begun ends with the error where its form allows that, and is cut otherwise.
    """
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
        if exchange.last_words is not None:
            await exchange.write(exchange.last_words(error))
            await exchange.end()
        elif exchange.started:
            log.warning("an answer was cut: %s: %s", error.code, error)
            raise  # the server closes the connection, so that the caller sees a cut answer as one
        else:
            await fail(exchange, error)


def refuse_browsers(exchange: Exchange, *, only_local_names: bool) -> None:
    """A page in somebody's browser can send requests to loopback: Host must be a name of ours, Origin no other."""
    asked = exchange.header(b"host")
    name = asked[1:].partition("]")[0] if asked.startswith("[") else asked.partition(":")[0]
    if only_local_names and name.lower() not in LOCAL_NAMES:
        raise errors.PermissionDenied("this server is not called that", hint="use the name localhost")
    origin = exchange.header(b"origin")
    scheme = "https" if exchange.scope["scheme"] in ("https", "wss") else "http"
    if origin and origin.lower() != f"{scheme}://{asked.lower()}":
        raise errors.PermissionDenied("requests from web pages are refused")
    if exchange.header(b"sec-fetch-site") in ("cross-site", "same-site"):
        raise errors.PermissionDenied("requests from web pages are refused")


def content_kind(exchange: Exchange) -> str:
    return exchange.header(b"content-type").partition(";")[0].strip().lower()
