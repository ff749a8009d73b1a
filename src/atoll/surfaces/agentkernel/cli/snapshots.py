"""`snapshot take|list|delete|restore`: a sandbox's whole file system, kept under a name and brought back in a new one."""

from __future__ import annotations

import time

from atoll.cli.output import print_json, tell
from atoll.cli.session import open_link, reference
from atoll.client import calls
from atoll.client.calls import Call
from atoll.client.http import quote
from atoll.errors import NotFound

from .words import runtime, sandbox_name, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from atoll.cli.grammar import Arguments
    from atoll.client._sync.driver import Link
    from atoll.client.wire import SandboxFields, SandboxWire


def take(arguments: Arguments) -> int:
    source = arguments.rest[0]
    name = sandbox_name(arguments.name or f"{source}-{time.strftime('%Y%m%d')}")
    save(open_link(arguments), reference(source), name)
    tell(f"Snapshot '{name}' taken of '{source}'")
    return 0


def save(link: Link, ref: str, name: str, force: bool = False) -> None:
    call = calls.post(calls.sandbox_path(ref, "snapshots"), {"name": name, "full": True, "force": force})
    call.timeout = None
    link.call(call)


def list_all(arguments: Arguments) -> int:
    link = open_link(arguments)
    found = link.call(calls.get("/v1/snapshots"))["snapshots"]
    rows = []
    for item in found:
        origin = _origin(link, item["sandbox_id"])
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(item["created_at"]))
        rows.append((item["name"], origin.get("name") or item["sandbox_id"], origin.get("runtime") or "-", when))
    rows.sort()
    if arguments.json:
        print_json([dict(zip(("name", "sandbox", "backend", "created_at"), row, strict=True)) for row in rows])
    else:
        tell(table(("NAME", "SANDBOX", "BACKEND", "CREATED"), rows) if rows else "No snapshots.")
    return 0


def delete(arguments: Arguments) -> int:
    open_link(arguments).call(Call("DELETE", f"/v1/snapshots/{quote(arguments.rest[0])}"))
    tell(f"Snapshot '{arguments.rest[0]}' deleted")
    return 0


def restore(arguments: Arguments) -> int:
    link, name = open_link(arguments), arguments.rest[0]
    found = next((item for item in link.call(calls.get("/v1/snapshots"))["snapshots"] if item["name"] == name), None)
    if found is None:
        raise NotFound(f"no snapshot is called {name!r:.80}")
    origin = _origin(link, found["sandbox_id"])
    target = sandbox_name(arguments.values.get("as") or f"{origin.get('name') or name}-restored")
    fields = {**_permissions(origin), "name": target, "persistent": True}
    chosen = runtime(arguments.backend) or origin.get("runtime")
    if chosen:
        fields["runtime"] = chosen
    call = calls.post(f"/v1/snapshots/{quote(name)}/restore", {"sandbox": fields})
    call.timeout = None
    link.call(call)
    tell(f"Sandbox '{target}' restored from '{name}'")
    return 0


def _origin(link: Link, sandbox: str) -> SandboxWire:
    try:
        found: SandboxWire = link.call(calls.info(sandbox))
        return found
    except NotFound:
        return {}


def _permissions(origin: SandboxWire) -> SandboxFields:
    """Resources and permissions of the sandbox it was taken of."""
    isolation = (origin.get("policy") or {}).get("isolation")
    fields: SandboxFields = {"limits": {k: v["value"] for k, v in (origin.get("limits") or {}).items()}}
    if isolation and isolation["profile"]:
        fields["profile"] = isolation["profile"]
    if isolation and isolation["mode"]:
        fields["mode"] = isolation["mode"]
    if isolation and isolation["network"] is False:
        fields["network"] = False
    if origin.get("hosts") is not None:
        fields["hosts"] = origin["hosts"]
    return fields
