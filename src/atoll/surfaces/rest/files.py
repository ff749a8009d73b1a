"""REST routes for files. Imported for its entries in the table of `rest`."""

from typing import Any

import msgspec

from atoll import errors
from atoll.core.verbs import VERBS
from atoll.model.fields import USER
from atoll.server import frames
from atoll.server.request import Exchange, flag, mode, whole
from atoll.server.routes import SANDBOX, Rest, route


@route("GET", f"{SANDBOX}/files", "A file's bytes", verb="files.read", query=("path", "offset", "limit", "user"))
async def read(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("path", "offset", "limit", "user")
    offset, limit = whole(query, "offset"), whole(query, "limit")

    async def work() -> None:
        async with rest.core.files.read(exchange.who, exchange.ref, _path(query), offset, limit, _user(query)) as (
            stat,
            data,
        ):
            plain = {key: value for key, value in stat.items() if isinstance(value, int | float) or key == "type"}
            headers = [(b"content-type", b"application/octet-stream"), (b"x-atoll-stat", msgspec.json.encode(plain))]
            await exchange.start(200, headers)
            async for piece in data:
                await exchange.write(piece)
        await exchange.end()

    await exchange.while_connected(work())


@route(
    "PUT",
    f"{SANDBOX}/files",
    "Write a file from the raw body",
    verb="files.write",
    query=("path", "mode", "append", "offset", "parents", "create", "user"),
)
async def write(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("path", "mode", "append", "offset", "parents", "create", "user")
    create = query.get("create") or None
    if create not in (None, "any", "new", "existing"):
        raise errors.InvalidArgument("create must be any, new or existing")
    work = rest.core.files.write(
        exchange.who,
        exchange.ref,
        _path(query),
        exchange.chunks(),
        mode=mode(query),
        append=flag(query, "append") or None,
        offset=whole(query, "offset"),
        parents=flag(query, "parents") or None,
        create=create,
        user=_user(query),
    )
    await exchange.answer(await exchange.while_reachable(work))


LISTED = {"list": "entries", "grep": "matches"}


def _file_operation(verb: str, does: str) -> None:
    kind: Any = VERBS[f"files.{verb}"].request

    @route("POST", f"{SANDBOX}/files/{verb}", does, verb=f"files.{verb}")
    async def operate(rest: Rest, exchange: Exchange) -> None:
        request = await exchange.json(kind)
        files = rest.core.files
        if verb == "list":
            work = files.list(exchange.who, exchange.ref, request)
        elif verb == "grep":
            work = files.grep(exchange.who, exchange.ref, request)
        else:
            work = files.ask(exchange.who, exchange.ref, verb, request)
        await exchange.answer_list(await exchange.while_connected(work), LISTED.get(verb, ""))


_file_operation("list", "List a directory")
_file_operation("stat", "What is known of a path")
_file_operation("mkdir", "Make a directory")
_file_operation("remove", "Remove a file or a tree")
_file_operation("move", "Move or rename")
_file_operation("copy", "Copy a file or a tree")
_file_operation("chmod", "Change mode or owner")
_file_operation("symlink", "Make a symbolic link")
_file_operation("grep", "Search file contents")
_file_operation("sed", "Replace in files")
_file_operation("du", "Disk use of a tree")


@route("GET", f"{SANDBOX}/tar", "A tree as a tar stream", verb="files.tar_out", query=("path", "gzip", "user"))
async def tar_out(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("path", "gzip", "user")

    async def work() -> None:
        async with rest.core.files.tar_out(
            exchange.who, exchange.ref, _path(query), flag(query, "gzip"), _user(query)
        ) as data:
            first = await anext(data, b"")
            await exchange.start(200, [(b"content-type", b"application/x-tar")])
            if first:
                await exchange.write(first)
            async for piece in data:
                await exchange.write(piece)
        await exchange.end()

    await exchange.while_connected(work())


@route("PUT", f"{SANDBOX}/tar", "Unpack a tar stream", verb="files.tar_in", query=("path", "user"))
async def tar_in(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("path", "user")
    work = rest.core.files.tar_in(exchange.who, exchange.ref, _path(query), exchange.chunks(), user=_user(query))
    await exchange.answer(await exchange.while_reachable(work))


@route(
    "GET",
    f"{SANDBOX}/watch",
    "Changes below a path as a frame stream",
    verb="files.watch",
    query=("path", "recursive", "user"),
)
async def watch(rest: Rest, exchange: Exchange) -> None:
    query = exchange.query("path", "recursive", "user")
    recursive = flag(query, "recursive", True)
    await frames.send(
        exchange, rest.core.files.watch(exchange.who, exchange.ref, _path(query), recursive, _user(query))
    )


def _path(query: dict[str, str]) -> str:
    return query.get("path") or ""


def _user(query: dict[str, str]) -> str | None:
    user = query.get("user") or None
    if user is not None and not USER.match(user):
        raise errors.InvalidArgument("user must be a name or number, optionally with `:group`")
    return user
