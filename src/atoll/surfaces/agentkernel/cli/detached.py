"""Commands that were started with `exec -d`: list them, read them, end them."""

from __future__ import annotations

from atoll.cli.output import print_json, safe, tell, write
from atoll.cli.session import open_link, reference
from atoll.client import calls
from atoll.client.results import CommandInfo

from .words import called_agentkernel, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from atoll.cli.grammar import Arguments


def list_all(arguments: Arguments) -> int:
    target = calls.sandbox_path(reference(arguments.rest[0]), "commands")
    found = [item for item in open_link(arguments).call(calls.get(target))["commands"] if item.get("background")]
    if not called_agentkernel():
        keys = ("command_id", "argv", "pid", "status", "exit_code", "started_at")
        print_json({"commands": [{key: item.get(key) for key in keys} for item in found]})
        return 0
    rows = [(item["command_id"], item["status"], safe(" ".join(item["argv"]))[:60]) for item in found]
    tell(table(("ID", "STATUS", "COMMAND"), rows))
    return 0


def logs(arguments: Arguments) -> int:
    """Its output so far, each stream on its own."""
    found = CommandInfo(open_link(arguments).call(calls.poll(reference(arguments.rest[0]), arguments.rest[1])))
    write(1, found.raw_stdout)
    write(2, found.raw_stderr)
    return 0


def kill(arguments: Arguments) -> int:
    made = open_link(arguments).call(calls.kill(reference(arguments.rest[0]), arguments.rest[1]))
    if called_agentkernel():
        tell(f"Command {arguments.rest[1]} ended: {made.get('status')}")
    else:
        print_json({"ok": True, "command_id": made.get("command_id"), "status": made.get("status")})
    return 0
