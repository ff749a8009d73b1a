"""Choose the daemon a `Sandbox` talks to: the local one over its Unix socket, or a gateway elsewhere over TLS.

Both links have the same face. TLS is imported only for the second, because importing it takes longer than most calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from ._async.driver import AsyncLink
    from ._sync.driver import Link


def open_link(home: str | None, endpoint: str | None, api_key: str | None) -> Link:
    from ._sync.driver import Link

    _check(home, endpoint, api_key)
    if endpoint is None:
        return Link(home)
    if endpoint.startswith("unix:"):
        return Link(path=_path(endpoint))
    from ._sync.secure import RemoteLink

    return RemoteLink(endpoint, api_key=api_key)


def open_async_link(home: str | None, endpoint: str | None, api_key: str | None) -> AsyncLink:
    from ._async.driver import AsyncLink

    _check(home, endpoint, api_key)
    if endpoint is None:
        return AsyncLink(home)
    if endpoint.startswith("unix:"):
        return AsyncLink(path=_path(endpoint))
    from ._async.secure import AsyncRemoteLink

    return AsyncRemoteLink(endpoint, api_key=api_key)


def _path(endpoint: str) -> str:
    """The socket that `unix:/path` or `unix:///path` names."""
    path = endpoint.removeprefix("unix:")
    return "/" + path.lstrip("/") if path.startswith("/") else path


def _check(home: str | None, endpoint: str | None, api_key: str | None) -> None:
    if endpoint is not None and home is not None:
        raise InvalidArgument("either home (a local daemon) or endpoint (a gateway)")
    if endpoint is None and api_key is not None:
        raise InvalidArgument("an API key is for a gateway; the local daemon needs none", hint="give its endpoint")
