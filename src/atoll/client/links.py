"""Which daemon a `Sandbox` talks to: the local one over its Unix socket, or a gateway elsewhere over gRPC.

Both links have the same face. gRPC is imported only for the second, because importing it takes longer than most calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from ._async.driver import AsyncLink
    from ._sync.driver import Link


def open_link(home: str | None, endpoint: str | None, api_key: str | None) -> Link:
    _check(home, endpoint, api_key)
    if endpoint is None:
        from ._sync.driver import Link

        return Link(home)
    from ._sync.remote import RemoteLink

    return cast("Link", RemoteLink(endpoint, api_key=api_key))


def open_async_link(home: str | None, endpoint: str | None, api_key: str | None) -> AsyncLink:
    _check(home, endpoint, api_key)
    if endpoint is None:
        from ._async.driver import AsyncLink

        return AsyncLink(home)
    from ._async.remote import AsyncRemoteLink

    return cast("AsyncLink", AsyncRemoteLink(endpoint, api_key=api_key))


def _check(home: str | None, endpoint: str | None, api_key: str | None) -> None:
    if endpoint is not None and home is not None:
        raise InvalidArgument("either home (a local daemon) or endpoint (a gateway)")
    if endpoint is None and api_key is not None:
        raise InvalidArgument("an API key is for a gateway; the local daemon needs none", hint="give its endpoint")
