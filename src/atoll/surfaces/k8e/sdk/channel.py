"""A route to a gateway as a gRPC channel. Without an endpoint the local daemon is used, and started when it is not there."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import grpc

from atoll.client import spawn
from atoll.client.route import Route
from atoll.errors import InvalidArgument

MAX_MESSAGE = 64 * 1024 * 1024
LONGEST_NAME = 107
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.enable_retries", 0),
)


def metadata(route: Route, user: str = "") -> tuple[tuple[str, str], ...]:
    """Return who the caller is, and whose rights the call has inside."""
    if not (user.isascii() and user.isprintable()):
        raise InvalidArgument("user must be a name or number, optionally with `:group`")
    known = (("authorization", f"Bearer {route.api_key}"),) if route.api_key else ()
    return (*known, ("x-sandbox-user", user)) if user else known


def ready(route: Route) -> Route:
    """The same route, with the local daemon running."""
    if not route.local:
        return route
    if not _answers(route.path):
        spawn.ensure(spawn.home_directory())
    if len(os.fsencode(route.path)) <= LONGEST_NAME:
        return route
    # gRPC cannot name a socket that deep; a descriptor of its directory, kept for the process's life, makes it short.
    directory = os.open(os.path.dirname(route.path), os.O_PATH | os.O_CLOEXEC)
    return replace(route, path=f"/proc/self/fd/{directory}/{os.path.basename(route.path)}")


def open_channel(route: Route, insecure: Any, secure: Any) -> Any:
    """Without TLS only to a Unix socket, which only this user can open."""
    if route.path:
        return insecure(f"unix:{route.path}", list(_OPTIONS))
    key, cert = route.pair or (None, None)
    options = [*_OPTIONS, ("grpc.ssl_target_name_override", "localhost")] if route.loopback else list(_OPTIONS)
    return secure(route.address, grpc.ssl_channel_credentials(route.ca, key, cert), options)


def _answers(path: str) -> bool:
    try:
        spawn.connect(path, 5).close()
    except OSError:
        return False
    return True
