"""`atoll volume ...`: make, list and remove volumes; and how `--volume` is read."""

from __future__ import annotations

from urllib.parse import quote

from ..client import calls
from ..client.calls import Call
from ..errors import InvalidArgument
from ..surfaces.agentkernel.cli.words import table
from .output import print_json, tell
from .session import open_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .grammar import Arguments


def create(arguments: Arguments) -> int:
    fields = {"name": arguments.rest[0], **({"size_mb": arguments.size} if arguments.size else {})}
    made = open_link(arguments).call(calls.post("/v1/volumes", fields))
    tell(f"{made['name']}  {made['size_mb']} MB")
    return 0


def list_all(arguments: Arguments) -> int:
    found = open_link(arguments).call(calls.get("/v1/volumes"))
    if arguments.json:
        print_json(found)
        return 0
    rows = [(one["name"], f"{one['size_mb']} MB", ", ".join(one["used_by"])) for one in found["volumes"]]
    tell(table(("NAME", "SIZE", "USED BY"), rows) if rows else "No volumes. Make one with `atoll volume create NAME`.")
    return 0


def remove(arguments: Arguments) -> int:
    name = arguments.rest[0]
    open_link(arguments).call(Call("DELETE", f"/v1/volumes/{quote(name, safe='')}"))
    tell(f"{name} removed")
    return 0


def read_volumes(texts: Sequence[str]) -> list[dict[str, object]]:
    """Return `NAME:/path[:ro]` as the fields of a create."""
    found: list[dict[str, object]] = []
    for text in texts:
        name, _, rest = text.partition(":")
        path, colon, mode = rest.rpartition(":") if rest.endswith((":ro", ":rw")) else (rest, "", "")
        if not name or not path.startswith("/"):
            raise InvalidArgument(f"--volume needs NAME:/path or NAME:/path:ro, not {text!r}")
        found.append({"name": name, "target": path, "read_only": bool(colon) and mode == "ro"})
    return found
