"""Network verbs: `allow-hosts`, `expose`, `unexpose`, `exposed`, and `egress log`."""

from __future__ import annotations

import time

from ..client import calls
from ..client.http import FRAMES
from ..client.results import Event
from ..errors import InvalidArgument, NotFound
from .output import print_json, program_name, say, tell
from .session import open_link, reference, setting, shown, state_of, tenant_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..client._sync.driver import Link
    from ..client.wire import CommandWire
    from .grammar import Arguments

NOTED = 5  # refusals told after one command


def allow_hosts(arguments: Arguments) -> int:
    """Without hosts and flags: show the list. The word `none` is no host at all."""
    link = open_link(arguments)
    names = [name.strip() for word in (*arguments.rest, *(arguments.hosts or ())) for name in word.split(",")]
    names = [name for name in names if name]
    if names and arguments.session_id is None and _is_sandbox(link, names[0]):
        arguments.values["session_id"] = names.pop(0)
    _refuse_sandboxes(link, arguments, names)
    session = _session(link, arguments)
    change = _change(arguments, names)
    target = calls.sandbox_path(reference(session), "hosts")
    wire = link.call(calls.get(target) if change is None else calls.post(target, change, repeatable=True))
    print_json(
        {"session_id": session, "allowed_hosts": wire["hosts"], "used": wire["used"], "refused": wire["refused"]}
    )
    return 0


def _is_sandbox(link: Link, name: str) -> bool:
    """Return whether this is a sandbox of the caller's and cannot be a host."""
    if "." in name or "*" in name or ":" in name or name == "none":
        return False
    try:
        link.call(calls.get(calls.sandbox_path(reference(name))))
    except (NotFound, InvalidArgument):
        return False
    return True


def _refuse_sandboxes(link: Link, arguments: Arguments, names: list[str]) -> None:
    """A sandbox's name or id where a host belongs would replace a list with a host that does not exist."""
    for name in names:
        if not _is_sandbox(link, name):
            continue
        flags = "".join(f" --{flag}" for flag in ("add", "remove", "clear") if getattr(arguments, flag))
        raise InvalidArgument(
            f"{name!r} is a sandbox, not a host",
            hint=f"name the sandbox with --session-id: atoll sandbox allow-hosts{flags} HOST --session-id {name}",
        )


def _change(arguments: Arguments, names: list[str]) -> Mapping[str, list[str]] | None:
    chosen = [flag for flag in ("add", "remove", "clear") if getattr(arguments, flag)]
    if len(chosen) > 1:
        raise InvalidArgument("only one of --add, --remove and --clear")
    if chosen == ["clear"]:
        if names:
            raise InvalidArgument("--clear restores the default list and takes no hosts")
        return {}
    if chosen:
        if not names:
            raise InvalidArgument(f"--{chosen[0]} needs at least one host")
        return {chosen[0]: names}
    if not names:
        return None
    if "none" in names:
        if len(names) > 1:
            raise InvalidArgument("`none` stands alone: it means no host at all")
        return {"hosts": []}
    return {"hosts": names}


def expose(arguments: Arguments) -> int:
    _take_sandbox(arguments, 2)
    link, port = open_link(arguments), _port(arguments)
    session = _session(link, arguments)
    wire = link.call(calls.expose(reference(session), port, arguments.host))
    print_json({"url": wire["url"], "site_url": wire["site_url"], "port": port, "session_id": session})
    return 0


def unexpose(arguments: Arguments) -> int:
    _take_sandbox(arguments, 2)
    link, port = open_link(arguments), _port(arguments)
    session = _session(link, arguments)
    wire = link.call(calls.unexpose(reference(session), port))
    print_json({"ok": bool(wire["ok"]), "port": port, "session_id": session})
    return 0


def exposed(arguments: Arguments) -> int:
    _take_sandbox(arguments, 1)
    link = open_link(arguments)
    session = _session(link, arguments)
    wire = link.call(calls.get(calls.sandbox_path(reference(session), "exposures")))
    services = [
        {"port": one["port"], "url": one["url"], "host": one["host"], "started_at": int(one["started_at"])}
        for one in wire["exposures"]
    ]
    print_json({"session_id": session, "services": services})
    return 0


def egress_log(arguments: Arguments) -> int:
    """One line a refusal, oldest first; with --follow it goes on."""
    link = open_link(arguments)
    wire = link.call(calls.get("/v1/egress/log", {"limit": arguments.limit}))
    for event in wire["events"]:
        _print(event, arguments.json)
    if not arguments.follow:
        return 0
    after = wire["events"][-1]["seq"] if wire["events"] else 0
    call = calls.get("/v1/egress/log", {"after": after, "follow": 1}, timeout=None)
    call.headers = (("Accept", FRAMES),)
    exchange = link.open(call)
    exchange.raise_for_status()
    for value in exchange.frames():
        if isinstance(value, Event) and value.data.get("kind") == "blocked":
            _print(value.data, arguments.json)
    return 0


def _print(event: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(event)
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
    tell(f"{at}  {shown(event['sandbox_id'])}  {event['note']}".replace("\n", " "))


def add_hosts(link: Link, session: str, arguments: Arguments) -> None:
    """Add the hosts of --allow-host to a sandbox's list, at once; they stay there."""
    names = arguments.values.get("allow_host")
    if names:
        link.call(calls.post(calls.sandbox_path(reference(session), "hosts"), {"add": names}, repeatable=True))


def note_blocked(wire: CommandWire, session: str, remedy: str = "") -> None:
    """After a command: what its network policy refused, and what would allow it (`remedy`, else a change of its list)."""
    blocked = wire.get("blocked") or []
    for item in blocked[:NOTED]:
        note = str(item.get("note") or "blocked")
        name = item.get("name")
        if name and item.get("reason") == "not an allowed host":
            allow = f"{program_name()} exec --allow-host {name} {session} ..."
            note += f"; allow it with: {remedy.format(name=name) if remedy else allow}"
        say(note.replace("\n", " "))
    if len(blocked) > NOTED:
        say(f"blocked: {len(blocked) - NOTED} more; see: {program_name()} egress log")


def _take_sandbox(arguments: Arguments, count: int) -> None:
    """A sandbox may stand first: then there are `count` arguments, and the rest is read without it."""
    if len(arguments.rest) >= count:
        first = arguments.rest.pop(0)
        if arguments.session_id not in (None, first):
            raise InvalidArgument("two sandboxes are named: the first argument and --session-id")
        arguments.values["session_id"] = first


def _port(arguments: Arguments) -> int:
    text = arguments.rest[0] if arguments.rest else arguments.port
    if text is None:
        raise InvalidArgument("which port? give a number from 1 to 65535")
    if not (str(text).isascii() and str(text).isdigit() and 1 <= int(text) <= 65535):
        raise InvalidArgument(
            f"{text!r} is not a port from 1 to 65535", hint="the sandbox comes before it, or by --session-id"
        )
    return int(text)


def _session(link: Link, arguments: Arguments) -> str:
    """The sandbox meant: named, or the tenant's own, found or made."""
    chosen = arguments.session_id or setting("SESSION_ID")
    if chosen:
        return str(chosen)
    from .run import obtain

    return obtain(state_of(arguments, tenant_of(arguments)), link, {})[0]
