"""Snapshots: the files of a sandbox as a template of their own. Memory is not kept."""

import re

from atoll import errors
from atoll.core.access.principals import new_id
from atoll.model import SaveSnapshot, SnapshotInfo
from atoll.server.request import Exchange
from atoll.surfaces.e2b.control.pages import page_of
from atoll.surfaces.e2b.control.table import body_of, known, route
from atoll.surfaces.e2b.replies import WireError, query_of
from atoll.surfaces.e2b.served import Served
from atoll.surfaces.e2b.words import Snapshot

_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,62})(?::default)?\Z")


def name_of(text: str) -> str:
    """Return the snapshot's name in core; NotFound when it cannot be one of ours."""
    found = _ID.match(text)
    if found is None or ".." in text:
        raise errors.NotFound(f"template {text!r:.80} was not found")
    return found[1]


def _shown(info: SnapshotInfo) -> dict[str, object]:
    return {"snapshotID": f"{info.name}:default", "names": [info.name]}


@route("POST", "sandboxes/*/snapshots")
async def create_snapshot(app: Served, exchange: Exchange) -> None:
    asked = await body_of(exchange, Snapshot, optional=True)
    info = await known(app, exchange)
    if asked.memory is not False:
        raise WireError(501, "this server keeps files and no memory: ask for a snapshot of the file system alone")
    if asked.name is not None and _ID.match(asked.name) is None:
        raise errors.InvalidArgument("a snapshot's name is 1 to 63 letters, digits, `_`, `.` or `-`")
    name = name_of(asked.name) if asked.name is not None else f"snap-{new_id()}"
    made = await app.core.snapshots.save(exchange.who, info.id, SaveSnapshot(name=name, full=True, force=True))
    await exchange.answer(_shown(made), 201)


@route("GET", "snapshots")
async def list_snapshots(app: Served, exchange: Exchange) -> None:
    query = query_of(exchange)
    found = [one for one in await app.core.snapshots.list(exchange.who) if one.full]
    if query.get("sandboxID"):
        found = [one for one in found if one.sandbox_id == query["sandboxID"]]
    if query.get("name"):
        found = [one for one in found if query["name"] in (one.name, f"{one.name}:default")]
    page, more = page_of(found, query, lambda one: (one.created_at, one.name))
    await exchange.answer([_shown(one) for one in page], 200, more)
