"""`atoll serve --agentkernel`: its HTTP interface, open for as long as this process runs."""

from __future__ import annotations

import os

from atoll.cli.output import OWN_FAILURE, say
from atoll.cli.serving import open_door
from atoll.errors import InvalidArgument

from .project import find
from .words import called_agentkernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.cli.grammar import Arguments


def serve(arguments: Arguments) -> int:
    fields: Mapping[str, object] = {
        "host": arguments.host or "127.0.0.1",
        "port": _port(arguments),
        "key": _key(arguments),
        "any_host": called_agentkernel(),
        "allow_host_access": bool(arguments.allow_host_access),
        "legacy_exit_errors": bool(arguments.legacy_exit_errors),
        "runtime": os.environ.get("ATOLL_RUNTIME") or "auto",
    }
    for url in open_door(arguments, "/v1/agentkernel", fields):
        say(f"Listening on {url}" + ("" if fields["key"] else " without a key, for this user only"))
    return OWN_FAILURE


def _port(arguments: Arguments) -> int:
    port = arguments.port if arguments.port is not None else os.environ.get("AGENTKERNEL_PORT") or 18888
    try:
        return int(port)
    except ValueError:
        raise InvalidArgument(f"AGENTKERNEL_PORT is not a number: {port!r:.40}") from None


def _key(arguments: Arguments) -> str | None:
    """From the environment, else from a file that was named; a file merely found here holds none."""
    key = os.environ.get("AGENTKERNEL_API_KEY")
    if key or arguments.config is None:
        return key or None
    project = find(arguments.config, os.getcwd())
    assert project is not None
    variable = project.get("api", "api_key_env")
    return project.get("api", "api_key") or (os.environ.get(variable) if variable else None) or None
