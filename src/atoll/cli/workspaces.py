"""Snapshots, sub-agents and manifests: `sandbox snapshot ...`, `sandbox subagent` and what fills a new sandbox."""

from __future__ import annotations

import os
import time

from ..client import calls
from ..client.http import FRAMES, quote, with_query
from ..client.portable import CLOSE_ON_EXEC
from ..client.results import Event
from ..errors import InvalidArgument
from ..words import k8e as words
from .output import print_json, say, write
from .progress import tell_entry
from .session import create_options, open_link, reference, setting, shown, tenant_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..client._sync.driver import Link
    from ..client.options import CreateOptions
    from ..client.wire import SandboxWire, SnapshotWire
    from .grammar import Arguments

LARGE = 500 << 20
PIECE = 1 << 20


def save(arguments: Arguments) -> int:
    ref, name = reference(arguments.rest[0]), arguments.rest[1]
    fields = {"name": _checked(name), "full": arguments.full or None, "force": arguments.force or None}
    call = calls.post(calls.sandbox_path(ref, "snapshots"), fields)
    call.timeout = None
    wire = open_link(arguments).call(call)
    if wire["size_bytes"] > LARGE:
        say(f"atoll: this snapshot holds {wire['size_bytes'] >> 20} MB")
    for path in wire["skipped"][:5]:
        say(f"atoll: not kept: {path}")
    found = {"ok": True, "name": name, "size_bytes": wire["size_bytes"], "file_count": wire["file_count"]}
    print_json({**found, "stored_bytes": wire["stored_bytes"], "full": wire["full"], "skipped": wire["skipped"]})
    return 0


def list_snapshots(arguments: Arguments) -> int:
    wire = open_link(arguments).call(calls.get("/v1/snapshots"))
    print_json({"snapshots": [_shown(item) for item in wire["snapshots"]]})
    return 0


def inspect(arguments: Arguments) -> int:
    wire = open_link(arguments).call(calls.get(_path(arguments.rest[0])))
    print_json({**_shown(wire), **{key: wire[key] for key in ("chunks", "shared_chunks", "missing_chunks", "files")}})
    return 0


def restore(arguments: Arguments) -> int:
    name, link = arguments.rest[0], open_link(arguments)
    if arguments.base is not None:
        base = link.call(calls.get(_path(name)))
        say(f"atoll: {base['shared_chunks']} pieces shared with other snapshots, {base['missing_chunks']} missing")
    options = create_options(arguments)
    tenant = tenant_of(arguments) if arguments.tenant or setting("TENANT") else ""
    options["labels"] = words.tenant_labels(tenant) or None
    options["name"] = arguments.name
    call = calls.post(_path(name) + "/restore", {"sandbox": calls.create_fields(options)})
    call.timeout = None
    wire = link.call(call)
    print_json({"session_id": shown(wire["id"]), "pod_ip": "", "tenant_id": tenant, "restored_from": name})
    return 0


def delete(arguments: Arguments) -> int:
    wire = open_link(arguments).call(calls.Call("DELETE", _path(arguments.rest[0])))
    print_json({"ok": True, "freed_bytes": wire["freed_bytes"]})
    return 0


def export(arguments: Arguments) -> int:
    name, target = arguments.rest
    exchange = open_link(arguments).open(calls.get(_path(name) + "/archive", timeout=None))
    exchange.raise_for_status()
    if target == "-":
        while piece := exchange.read():
            write(1, piece)
        return 0
    fresh, size = f"{target}.part", 0
    try:
        with open(fresh, "xb") as file:
            while piece := exchange.read():
                size += file.write(piece)
        os.replace(fresh, target)
    except OSError as error:
        raise InvalidArgument(f"cannot write {target}: {error.strerror}") from None
    finally:
        if os.path.exists(fresh):
            os.unlink(fresh)
    print_json({"ok": True, "name": name, "path": target, "bytes": size})
    return 0


def bring_in(arguments: Arguments) -> int:
    source, name = arguments.rest
    target = with_query(_path(name) + "/archive", {"force": True if arguments.force else None})
    call = calls.Call("PUT", target, None, (("Content-Type", "application/x-tar"),), timeout=None)
    try:
        descriptor = 0 if source == "-" else os.open(source, os.O_RDONLY | CLOSE_ON_EXEC)
    except OSError as error:
        raise InvalidArgument(f"cannot read {source}: {error.strerror}") from None
    wire = open_link(arguments).open(call, iter(lambda: os.read(descriptor, PIECE), b"")).json()
    print_json({"ok": True, **_shown(wire)})
    return 0


def subagent(arguments: Arguments) -> int:
    fields = {
        "name": arguments.name,
        "hosts": [] if arguments.allowed_hosts == ["none"] else arguments.allowed_hosts,
        "network": False if arguments.no_network else None,
        "env": dict(arguments.env) or None,
        "limits": {
            key: value
            for key, value in (("cpus", arguments.cpus), ("memory_mb", arguments.memory), ("pids", arguments.pids))
            if value is not None
        },
    }
    wire = open_link(arguments).call(calls.post(calls.sandbox_path(reference(arguments.rest[0]), "subagents"), fields))
    print_json({"session_id": shown(wire["id"], wire["parent_id"])})
    return 0


def filling_of(arguments: Arguments) -> Mapping[str, object]:
    """Return what --manifest and --git-repo say, as the daemon takes it."""
    fields: dict[str, object] = {}
    if arguments.manifest:
        fields["manifest"] = _manifest(arguments.manifest)
    if arguments.git_repo:
        entry = {"path": arguments.git_path or "repo", "repo": arguments.git_repo, "ref": arguments.git_ref or "main"}
        fields["entries"] = [{"gitRepo": entry}]
    return fields


def create_filled(link: Link, arguments: Arguments, options: CreateOptions) -> tuple[SandboxWire, int]:
    """A sandbox with the entries of --manifest and --git-repo done, and how many those were."""
    call = calls.post("/v1/manifests", {"sandbox": calls.create_fields(options), **filling_of(arguments)})
    call.headers, call.timeout = (*call.headers, ("Accept", FRAMES)), None
    exchange, count = link.open(call), 0
    exchange.raise_for_status()
    for value in exchange.frames():
        if isinstance(value, dict):
            return value, count  # type: ignore[return-value]  # this stream makes a sandbox
        if isinstance(value, Event):
            count = value.data["of"]
            tell_entry(value.data)
    raise AssertionError("unreachable")


def _manifest(path: str) -> str:
    try:
        data = b"".join(iter(lambda: os.read(0, PIECE), b"")) if path == "-" else open(path, "rb").read()  # noqa: SIM115
        return data.decode()
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not UTF-8") from None


def _shown(wire: SnapshotWire) -> Mapping[str, object]:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(wire["created_at"]))
    found = {"name": wire["name"], "created_at": at, "size_bytes": wire["size_bytes"], "file_count": wire["file_count"]}
    session = wire["sandbox_id"]
    found["session_id"] = shown(session) if session and not session.startswith("sess-") else session
    return {**found, "tenant_id": wire["tenant"], "image": wire["image"], "full": wire["full"]}


def _checked(name: str) -> str:
    """The daemon checks it again; here it must not change the meaning of a path."""
    if (
        not name
        or len(name) > 63
        or not name[0].isalnum()
        or ".." in name
        or not all(c.isalnum() or c in "_.-" for c in name)
    ):
        raise InvalidArgument(
            f"{name!r:.80} is not a snapshot's name",
            hint="1 to 63 letters, digits, `_`, `.` or `-`, starting with a letter or digit",
        )
    return name


def _path(name: str) -> str:
    return "/v1/snapshots/" + quote(_checked(name))
