"""Where a request leads: to a port of a sandbox, named by its host or its headers, or to the control plane."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from atoll import errors

ENVD = 49983
_HOST = re.compile(r"(\d{1,5})-([a-z0-9]{1,57})\.", re.ASCII)
_ID = re.compile(r"[a-z0-9]{1,57}\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """A port of a sandbox. `by_host`: the connection is for this place alone, because its host name says so."""

    port: int
    sandbox: str
    by_host: bool


def find_place(headers: Iterable[tuple[bytes, bytes]]) -> Place | None:
    """Return where a request leads, None for the control plane. InvalidArgument when it says two things."""
    host, sandbox, port = "", None, None
    for name, value in headers:
        if name == b"host":
            host = value.decode("latin-1").lower()
        elif name == b"e2b-sandbox-id":
            sandbox = value.decode("latin-1").strip()
        elif name == b"e2b-sandbox-port":
            port = value.decode("latin-1").strip()
    named = _HOST.match(host)
    if sandbox is None:
        return Place(_port(named[1]), named[2], True) if named else None
    if port is None or not _ID.match(sandbox):
        raise errors.InvalidArgument("E2b-Sandbox-Id and E2b-Sandbox-Port are needed together")
    found = Place(_port(port), sandbox, named is not None)
    if named and (found.sandbox, found.port) != (named[2], _port(named[1])):
        raise errors.InvalidArgument("the host and the headers name different ports")
    return found


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise errors.InvalidArgument("a port is a number from 1 to 65535")
    return int(text)
