"""Sessions: a named sandbox per agent, `session-NAME`, that can be stopped and taken up again."""

from __future__ import annotations

import os

from atoll.cli.grammar import UsageError
from atoll.cli.output import print_json, tell
from atoll.cli.session import open_link
from atoll.client import calls
from atoll.profiles import mode_name

from .words import runtime, sandbox_name, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from atoll.cli.grammar import Arguments

PREFIX = "session-"


def _name(text: str) -> str:
    return sandbox_name(PREFIX + sandbox_name(text))


def start(arguments: Arguments) -> int:
    if not arguments.name:
        raise UsageError("session start needs --name NAME")
    name, mode = _name(arguments.name), mode_name(arguments.agent)
    options: dict[str, object] = {
        "name": name, "mode": mode, "persistent": True, "runtime": runtime(arguments.backend),
        "labels": {"agent": mode, "session": arguments.name, "project": os.getcwd()},
    }  # fmt: skip
    if mode != "native":
        here = os.path.realpath(os.getcwd())
        options["mounts"] = [{"source": here, "target": "/workspace", "read_only": False}] if here != "/" else None
    made = open_link(arguments).call(calls.create(options))
    tell(f"Session '{arguments.name}' started in sandbox {made['name']}")
    return 0


def list_all(arguments: Arguments) -> int:
    link = open_link(arguments)
    found = link.call(calls.list_sandboxes("active"))["sandboxes"]
    saved = {item["name"] for item in link.call(calls.get("/v1/snapshots"))["snapshots"]}
    rows = []
    for item in found:
        labels = item.get("labels") or {}
        if labels.get("session") and item.get("name") == PREFIX + labels["session"]:
            state = "saved" if item["state"] == "stopped" and item["name"] in saved else item["state"]
            rows.append((labels["session"], labels.get("agent") or "-", state, item["name"]))
    rows.sort()
    if arguments.json:
        print_json([dict(zip(("name", "agent", "status", "sandbox"), row, strict=True)) for row in rows])
    else:
        tell(table(("NAME", "AGENT", "STATUS", "SANDBOX"), rows) if rows else "No sessions.")
    return 0


def stop(arguments: Arguments) -> int:
    open_link(arguments).call(calls.lifecycle(_name(arguments.rest[0]), "stop"))
    tell(f"Session '{arguments.rest[0]}' stopped")
    return 0


def resume(arguments: Arguments) -> int:
    open_link(arguments).call(calls.lifecycle(_name(arguments.rest[0]), "start"))
    tell(f"Session '{arguments.rest[0]}' running")
    return 0


def save(arguments: Arguments) -> int:
    """A snapshot, then a rest; resume takes it up where it was."""
    from .snapshots import save as save_snapshot

    link, name = open_link(arguments), _name(arguments.rest[0])
    save_snapshot(link, name, name, force=True)
    link.call(calls.lifecycle(name, "stop"))
    tell(f"Session '{arguments.rest[0]}' saved")
    return 0


def delete(arguments: Arguments) -> int:
    open_link(arguments).call(calls.destroy(_name(arguments.rest[0])))
    tell(f"Session '{arguments.rest[0]}' deleted")
    return 0
