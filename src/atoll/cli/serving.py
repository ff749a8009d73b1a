"""Doors of the daemon that are open for as long as a process of the command line runs."""

from __future__ import annotations

from ..client.calls import Call
from ..client.codec import dumps
from ..client.http import FRAMES
from ..client.results import Event
from .session import open_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .grammar import Arguments


def open_door(arguments: Arguments, path: str, fields: Mapping[str, object]) -> Iterator[str]:
    """Ask the daemon for a door and give the URL of each listener; the door closes with the iterator."""
    headers = (("Content-Type", "application/json"), ("Accept", FRAMES))
    call = Call("POST", path, dumps(fields).encode("ascii"), headers, timeout=None)
    exchange = open_link(arguments).open(call)
    exchange.raise_for_status()
    for value in exchange.frames():
        if isinstance(value, Event) and "listening" in value.data:
            at = value.data["listening"]
            yield url_of(at["host"], at["port"])


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
