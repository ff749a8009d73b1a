"""`atoll serve --e2b` and `atoll e2b env`."""

from __future__ import annotations

import os

from atoll.cli.output import OWN_FAILURE, print_json, say, tell
from atoll.cli.serving import open_door, url_of
from atoll.cli.session import open_link
from atoll.client import calls
from atoll.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.cli.grammar import Arguments

HOST, PORT = "127.0.0.1", 3676


def serve(arguments: Arguments) -> int:
    """Open the door for as long as this process runs."""
    host, port = address(arguments.e2b)
    host, port = arguments.host or host, port if arguments.port is None else arguments.port
    fields: Mapping[str, object] = {
        "host": host,
        "port": port,
        "domain": arguments.domain,
        "runtime": os.environ.get("ATOLL_RUNTIME") or "auto",
    }
    for url in open_door(arguments, "/v1/e2b", fields):
        say(f"Listening on {url}; for the lines to export: atoll e2b env")
    return OWN_FAILURE


def address(text: str | bool | None) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, `HOST`, `PORT` or nothing."""
    if not isinstance(text, str) or not text:
        return HOST, PORT
    if text.isdigit():
        return HOST, _port(text)
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        return text.strip("[]"), PORT
    return host.strip("[]"), _port(port)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise InvalidArgument(f"{text!r:.40} is no port", hint="--e2b 127.0.0.1:3676")
    return int(text)


def env(arguments: Arguments) -> int:
    """Make a key, and print what the SDKs read from the environment."""
    host, port = address(arguments.address)
    name = arguments.rest[0] if arguments.rest else "e2b"
    made = open_link(arguments).call(calls.post("/v1/keys", {"name": name, "ttl": arguments.ttl}))
    url = url_of(host, port)
    lines = {
        "E2B_API_KEY": made["e2b_key"],
        "E2B_API_URL": url,
        "E2B_SANDBOX_URL": url,
        "E2B_DOMAIN": f"localhost:{port}",
    }
    if arguments.values.get("json"):
        print_json(lines)
    else:
        for name, value in lines.items():
            tell(f"export {name}={value}")
    return 0
