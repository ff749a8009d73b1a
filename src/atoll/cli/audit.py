"""`atoll audit` and `atoll audit verify`."""

from __future__ import annotations

import time

from ..client import calls
from ..client.http import FRAMES
from ..client.results import Event
from .output import print_json, tell
from .session import open_link, reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .grammar import Arguments


def path(arguments: Arguments) -> int:
    """Print where the log is."""
    from ..client.spawn import home_directory

    tell(f"{home_directory()}/audit/audit.jsonl")
    return 0


def show(arguments: Arguments) -> int:
    if arguments.path:
        return path(arguments)
    link = open_link(arguments)
    sandbox = ""
    if arguments.sandbox:
        sandbox = reference(arguments.sandbox)
        if sandbox == arguments.sandbox:  # a name: records have the id
            sandbox = link.call(calls.info(sandbox))["id"]
    wire = link.call(calls.get("/v1/audit", {"limit": arguments.last or arguments.limit, "sandbox": sandbox or None}))
    for record in wire["records"]:
        _print(record, arguments.json)
    if not arguments.follow:
        return 0
    after = wire["records"][-1]["seq"] if wire["records"] else 0
    call = calls.get("/v1/audit", {"after": after, "sandbox": sandbox or None, "follow": 1}, timeout=None)
    call.headers = (("Accept", FRAMES),)
    exchange = link.open(call)
    exchange.raise_for_status()
    for value in exchange.frames():
        if isinstance(value, Event) and "seq" in value.data:
            _print(value.data, arguments.json)
    return 0


def verify(arguments: Arguments) -> int:
    wire = open_link(arguments).call(calls.get("/v1/audit/verify"))
    if arguments.json:
        print_json(wire)
    elif wire["ok"]:
        tell(f"the audit log holds: {wire['records']} records")
    else:
        tell(f"the audit log was damaged: {wire['problem']} ({wire['records']} records hold)")
    return 0 if wire["ok"] else 1


def _print(record: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["at"]))
    details = " ".join(f"{key}={value}" for key, value in record["details"].items())
    line = f"{at}  {record['who']}  {record['action']}  {record['sandbox'] or '-'}  {record['result']}  {details}"
    tell(line.replace("\n", "\\n"))
