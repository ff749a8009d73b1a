"""Snapshots in agentkernel's words.

A snapshot keeps the whole file system. What is restored from it gets the resources and permissions of the sandbox it was
taken of, as long as atoll remembers that one.
"""

import time
from collections.abc import Mapping

from atoll import errors, model
from atoll.core.access.principals import Principal
from atoll.core.store.typed import SandboxRow
from atoll.model import CreateSandbox, SaveSnapshot, SnapshotInfo
from atoll.server.request import Exchange
from atoll.surfaces.agentkernel.http import bodies
from atoll.surfaces.agentkernel.http.table import Served, ok, route
from atoll.words import agentkernel as words

_KEPT = ("runtime", "profile", "mode", "security", "env", "limits", "hosts", "network", "read_only_root", "persistent")


@route("GET", "snapshots")
async def list_snapshots(app: Served, exchange: Exchange) -> None:
    found = await app.core.snapshots.list(exchange.who)
    await ok(exchange, [_shown(app, exchange.who, info) for info in found])


@route("POST", "snapshots")
async def take(app: Served, exchange: Exchange) -> None:
    request = await app.body(exchange, bodies.TakeSnapshot)
    name = words.sandbox_name(request.name or f"{request.sandbox}-{time.strftime('%Y%m%d')}")
    try:
        info = await app.core.sandboxes.get(exchange.who, words.sandbox_name(request.sandbox))
    except errors.NotFound:
        raise errors.NotFound("Sandbox not found") from None
    made = await app.core.snapshots.save(exchange.who, info.id, SaveSnapshot(name=name, full=True))
    await ok(exchange, _shown(app, exchange.who, made), 201)


@route("GET", "snapshots/*")
async def get(app: Served, exchange: Exchange) -> None:
    await ok(exchange, _shown(app, exchange.who, await _find(app, exchange)))


@route("DELETE", "snapshots/*")
async def delete(app: Served, exchange: Exchange) -> None:
    found = await _find(app, exchange)
    await app.core.snapshots.delete(exchange.who, found.name)
    await ok(exchange, "Snapshot deleted")


@route("POST", "snapshots/*/restore")
async def restore(app: Served, exchange: Exchange) -> None:
    request = await app.body(exchange, bodies.Restore)
    found = await _find(app, exchange)
    origin = _origin(app, exchange.who, found)
    was: Mapping[str, object] = origin["spec"] if origin is not None else {}
    name = request.as_name or f"{(origin['name'] if origin is not None else '') or found.name}-restored"
    kept = {key: was[key] for key in _KEPT if key in was}
    spec = model.convert(CreateSandbox, {**kept, "name": words.sandbox_name(name), "persistent": True})
    work = app.core.snapshots.restore(exchange.who, found.name, spec)
    await ok(exchange, words.sandbox(await exchange.while_connected(work)), 201)


async def _find(app: Served, exchange: Exchange) -> SnapshotInfo:
    name = exchange.parts[1]
    for info in await app.core.snapshots.list(exchange.who):
        if info.name == name:
            return info
    raise errors.NotFound("Snapshot not found")


def _origin(app: Served, who: Principal, info: SnapshotInfo) -> SandboxRow | None:
    """The record of the sandbox it was taken of, if it is still known and was this caller's."""
    row = app.core.store.sandbox(info.sandbox_id)
    return row if row is not None and row["owner"] == who.owner else None


def _shown(app: Served, who: Principal, info: SnapshotInfo) -> Mapping[str, object]:
    origin = _origin(app, who, info)
    held = origin["record"].get("limits", {}) if origin is not None else {}
    limits = {name: limit["value"] for name, limit in held.items()}
    return {
        "name": info.name,
        "sandbox": (origin["name"] if origin is not None else "") or info.sandbox_id,
        "image_tag": info.name,
        "backend": origin["runtime"] if origin is not None else "container",
        "base_image": info.image,
        "vcpus": max(1, int(limits.get("cpus") or 1)),
        "memory_mb": limits.get("memory_mb"),
        "created_at": words.moment(info.created_at),
        "size_bytes": info.size_bytes,
        "files": info.file_count,
    }
