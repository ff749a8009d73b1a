"""`atoll image ...`: get, build, list, show and remove images."""

from __future__ import annotations

from ..client import calls
from ..client.calls import Call
from ..client.codec import dumps
from ..client.http import FRAMES
from ..client.results import Event
from ..errors import OutcomeUnknown
from ..surfaces.agentkernel.cli.words import size, table
from .output import print_json, tell
from .session import open_link

INTERPRETER = "code-interpreter-v1"  # is built, and never pulled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .grammar import Arguments


def pull(arguments: Arguments) -> int:
    return watch(arguments, "/v1/images/pull", {"name": arguments.rest[0]})


def watch(arguments: Arguments, target: str, fields: Mapping[str, object]) -> int:
    """Do it, showing how far it is, and print the image."""
    tell_image(fetch(arguments, target, fields))
    return 0


def tell_image(image: Mapping[str, Any]) -> None:
    tell(f"{image['name']}  {image['digest']}  {size(image['size'])}")


def fetch(arguments: Arguments, target: str, fields: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the image that a pull or build ends with: a bar on a terminal, a line per stage elsewhere meanwhile."""
    from ..images.progress import Progress, TerminalBar

    headers = (("Content-Type", "application/json"), ("Accept", FRAMES))
    exchange = open_link(arguments).open(Call("POST", target, dumps(fields).encode("ascii"), headers, timeout=None))
    exchange.raise_for_status()
    bar = TerminalBar()
    try:
        for value in exchange.frames():
            if isinstance(value, Event) and "progress" in value.data:
                bar(Progress(**value.data["progress"]))
            elif isinstance(value, Event) and "image" in value.data:
                bar.close()
                found: Mapping[str, Any] = value.data["image"]
                return found
    finally:
        bar.close()
    raise OutcomeUnknown("the daemon ended the stream before the image was there")


def list_all(arguments: Arguments) -> int:
    found = open_link(arguments).call(calls.get("/v1/images"))
    if arguments.json:
        print_json(found)
        return 0
    rows = [
        (
            image["name"],
            image["digest"].removeprefix("sha256:")[:12],
            image["source"],
            size(image["size"]),
            image["created"],
        )
        for image in found["images"]
    ]
    tell(table(("NAME", "DIGEST", "SOURCE", "SIZE", "CREATED"), rows) if rows else "No images; `host` is always there.")
    if rows:
        tell(f"{size(found['disk_bytes'])} on disk, shared layers counted once")
    return 0


def inspect(arguments: Arguments) -> int:
    print_json(open_link(arguments).call(calls.get("/v1/images/inspect", {"name": arguments.rest[0]})))
    return 0


def remove(arguments: Arguments) -> int:
    found = open_link(arguments).call(calls.post("/v1/images/remove", {"name": arguments.rest[0]}))
    tell(f"{found['removed']} removed, {size(found['bytes'])} given back")
    return 0


def prune(arguments: Arguments) -> int:
    found = open_link(arguments).call(calls.post("/v1/images/prune", {}))
    if arguments.json:
        print_json(found)
    else:
        tell(f"{len(found['images'])} images and {found['layers']} layers removed, {size(found['bytes'])} given back")
    return 0
