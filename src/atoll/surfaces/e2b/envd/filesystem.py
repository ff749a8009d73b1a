"""filesystem.Filesystem: looking at files, moving, removing and watching them."""

import asyncio
import posixpath
from collections.abc import AsyncIterator
from contextlib import aclosing

from atoll import errors
from atoll.model import ListFiles, MakeDirectory, MoveFile, RemoveFile
from atoll.surfaces.e2b.envd import entries
from atoll.surfaces.e2b.envd.calls import Call, stream, unary
from atoll.surfaces.e2b.envd.connect import Fields, Json, RpcError
from atoll.surfaces.e2b.envd.people import resolve
from atoll.surfaces.e2b.replies import plain

SERVICE = "filesystem.Filesystem"
DEEPEST = 1000
TURN = 256  # entries that are shown before others have their turn
_EVENTS = {
    "create": "EVENT_TYPE_CREATE", "write": "EVENT_TYPE_WRITE", "remove": "EVENT_TYPE_REMOVE",
    "rename": "EVENT_TYPE_RENAME", "chmod": "EVENT_TYPE_CHMOD",
}  # fmt: skip


async def _path(call: Call, asked: Fields, name: str = "path") -> str:
    return resolve(asked.text(name), await call.person())


@unary(SERVICE, "Stat")
async def stat(call: Call, asked: Fields) -> Json:
    return {"entry": await entries.entry(call, await _path(call, asked))}


@unary(SERVICE, "ListDir")
async def list_directory(call: Call, asked: Fields) -> Json:
    path, depth = await _path(call, asked), asked.whole("depth") or 1
    if depth > DEEPEST:
        raise RpcError("invalid_argument", f"depth is at most {DEEPEST}")
    root = posixpath.normpath(path)
    if (await entries.stat(call, path)).get("type") == "symlink":
        path = await _directory(call, path)
    request = ListFiles(path=path, recursive=depth > 1, depth=depth)
    answer = await call.app.core.files.list(call.who, call.sandbox, request)
    found = []
    for one in answer["entries"]:
        below = posixpath.relpath(str(one.get("path") or one.get("name")), path) if one.get("path") else one["name"]
        found.append((below.split("/"), one))
    found.sort(key=lambda pair: pair[0])
    shown = []
    for number, (parts, one) in enumerate(found):
        if number % TURN == 0:
            await asyncio.sleep(0)  # others have their turn
        try:
            shown.append(await entries.entry(call, posixpath.join(root, *parts), one))
        except errors.FileNotFound:
            continue  # it has just gone
    return {"entries": shown}


async def _directory(call: Call, path: str) -> str:
    """Return where a link to a directory leads."""
    try:
        return await call.app.core.files.resolve(call.who, call.sandbox, path)
    except errors.InvalidArgument as loop:
        raise RpcError("failed_precondition", loop.message) from None


@unary(SERVICE, "MakeDir")
async def make_directory(call: Call, asked: Fields) -> Json:
    path, person = await _path(call, asked), await call.person()
    request = MakeDirectory(path=path, parents=True, exist_ok=False, uid=person.uid, gid=person.gid)
    try:
        await call.app.core.files.ask(call.who, call.sandbox, "mkdir", request)
    except errors.FileExists:
        there = await entries.entry(call, path)
        if there["type"] == entries.TYPES["directory"]:
            raise RpcError("already_exists", f"there is a directory already: {path!r:.200}") from None
        raise RpcError("invalid_argument", f"this is no directory: {path!r:.200}") from None
    return {"entry": await entries.entry(call, path)}


@unary(SERVICE, "Move")
async def move(call: Call, asked: Fields) -> Json:
    source, target = await _path(call, asked, "source"), await _path(call, asked, "destination")
    person = await call.person()
    await entries.stat(call, source)  # a missing one is told before anything is made
    parent = posixpath.dirname(posixpath.normpath(target))
    files = call.app.core.files
    above = MakeDirectory(path=parent, parents=True, exist_ok=True, uid=person.uid, gid=person.gid)
    await files.ask(call.who, call.sandbox, "mkdir", above)
    await files.ask(call.who, call.sandbox, "move", MoveFile(src=source, dst=target, overwrite=True))
    return {"entry": await entries.entry(call, target)}


@unary(SERVICE, "Remove")
async def remove(call: Call, asked: Fields) -> Json:
    request = RemoveFile(path=await _path(call, asked), recursive=True, missing_ok=True)
    await call.app.core.files.ask(call.who, call.sandbox, "remove", request)
    return {}


# Watching


async def _changes(call: Call, asked: Fields) -> AsyncIterator[Json]:
    """First an empty item once nothing can be missed any more, then changes."""
    path = await _path(call, asked)
    await _check_directory(call, path)
    with_entry = asked.flag("include_entry")
    watch = call.app.core.files.watch(call.who, call.sandbox, path, asked.flag("recursive"))
    root = posixpath.normpath(path)
    async with aclosing(watch) as items:  # type: ignore[type-var]
        async for item in items:
            if item.get("watching"):
                yield {}
            elif item.get("overflow"):
                raise RpcError("resource_exhausted", "more changed than could be followed: some changes were lost")
            for change in item.get("changes") or ():
                for event in await _events(call, root, change, with_entry):
                    yield event


async def _check_directory(call: Call, path: str) -> None:
    found = await entries.entry(call, path)
    if found["type"] != entries.TYPES["directory"]:
        raise RpcError("invalid_argument", f"this is no directory: {path!r:.200}")


async def _events(call: Call, root: str, change: Json, with_entry: bool) -> list[Json]:
    """A move within the tree is two events: the old name was renamed, the new one created."""
    kind = str(change.get("kind"))
    found = [(str(change.get("path")), kind)]
    if kind == "rename" and change.get("to"):
        found.append((str(change["to"]), "create"))
    told = []
    for path, what in found:
        if what not in _EVENTS:
            continue
        event: Json = {"name": plain(posixpath.relpath(path, root)), "type": _EVENTS[what]}
        if with_entry and what not in ("remove", "rename"):
            try:
                event["entry"] = await entries.entry(call, path)
            except (errors.FileNotFound, errors.FileError):
                pass  # it has gone since
        told.append(event)
    return told


@stream(SERVICE, "WatchDir", {"keepalive": {}})
async def watch_directory(call: Call, asked: Fields) -> AsyncIterator[Json]:
    async with aclosing(_changes(call, asked)) as changes:  # type: ignore[type-var]
        first = True
        async for event in changes:
            yield {"start": {}} if first else {"filesystem": event}
            first = False


@unary(SERVICE, "CreateWatcher")
async def create_watcher(call: Call, asked: Fields) -> Json:
    return {"watcherId": await call.app.watchers.add(call.sandbox, _changes(call, asked))}


@unary(SERVICE, "GetWatcherEvents")
async def get_watcher_events(call: Call, asked: Fields) -> Json:
    return {"events": await call.app.watchers.take(call.sandbox, asked.text("watcher_id"))}


@unary(SERVICE, "RemoveWatcher")
async def remove_watcher(call: Call, asked: Fields) -> Json:
    call.app.watchers.remove(call.sandbox, asked.text("watcher_id"))
    return {}
