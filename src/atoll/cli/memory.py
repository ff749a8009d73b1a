"""Saved memory: `sandbox checkpoint`, `sandbox restore`, `sandbox fork` and `sandbox checkpoints`."""

from __future__ import annotations

import time

from ..client import calls
from .output import print_json
from .session import open_link, reference, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..client.wire import CheckpointWire, SandboxWire
    from .grammar import Arguments


def save(arguments: Arguments) -> int:
    ref, name = reference(arguments.rest[0]), arguments.rest[1] if len(arguments.rest) > 1 else None
    wire = open_link(arguments).call(calls.save_checkpoint(ref, name, force=bool(arguments.force)))
    print_json({"ok": True, **_shown(wire)})
    return 0


def restore(arguments: Arguments) -> int:
    name = arguments.rest[0]
    call = calls.restore_checkpoint(
        name, name=arguments.name, lifetime=arguments.lifetime, network=not arguments.no_network
    )
    print_json({**_made(open_link(arguments).call(call)), "restored_from": name})
    return 0


def fork(arguments: Arguments) -> int:
    ref = reference(arguments.rest[0])
    wire = open_link(arguments).call(calls.fork(ref, arguments.count or 1))
    print_json({"forked_from": shown(ref), "sandboxes": [_made(one) for one in wire["sandboxes"]]})
    return 0


def list_checkpoints(arguments: Arguments) -> int:
    wire = open_link(arguments).call(calls.get("/v1/checkpoints"))
    print_json({"checkpoints": [_shown(one) for one in wire["checkpoints"]]})
    return 0


def delete(arguments: Arguments) -> int:
    wire = open_link(arguments).call(calls.Call("DELETE", calls.checkpoint_path(arguments.rest[0])))
    print_json({"ok": True, "freed_bytes": wire["freed_bytes"]})
    return 0


def _made(wire: SandboxWire) -> Mapping[str, object]:
    return {"session_id": shown(wire["id"]), "runtime_class": wire["runtime"], "name": wire["name"]}


def _shown(wire: CheckpointWire) -> Mapping[str, object]:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(wire["created_at"]))
    found = {"name": wire["name"], "created_at": at, "size_bytes": wire["size_bytes"]}
    return {**found, "session_id": shown(wire["sandbox_id"]), "runtime_class": wire["runtime"], "image": wire["image"]}
