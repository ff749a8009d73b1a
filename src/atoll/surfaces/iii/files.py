"""The ten `sandbox::fs::` functions. The agent inside does the work; here names and errors are translated."""

import base64
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from atoll import errors, model
from atoll.core.files.verbs import Entry
from atoll.surfaces.iii import requests as r
from atoll.surfaces.iii.door import Door
from atoll.surfaces.iii.failure import Failure, Patch, of_file

ANSWER = 8 * 1024 * 1024 - 64 * 1024  # what fits into one message of the bus, with room for what is around it
BODY = 1024 * 1024
MOST_MATCHES = 1_000_000
PIECE = 64 * 1024


async def _ask(door: Door, sandbox: str, op: str, request: model.Request) -> Entry:
    try:
        return await door.core.files.ask(door.who, sandbox, op, request)
    except errors.AtollError as error:
        raise of_file(error) from None


def _request(kind: type[model.T], **fields: Any) -> model.T:
    try:
        return model.convert(kind, fields)
    except errors.AtollError as error:
        raise Failure("S001", error.message) from None


def _reach(door: Door, text: str) -> str:
    sandbox = r.sandbox_id(text)
    door.find(sandbox)
    return sandbox


def entry(stat: Entry, name: str) -> r.Entry:
    return r.Entry(
        name=name,
        is_dir=stat.get("type") == "directory",
        size=stat.get("size", 0),
        mode=format(stat.get("mode", 0) & 0o7777, "04o"),
        mtime=int(stat.get("mtime", 0)),
        is_symlink=stat.get("type") == "symlink",
        uid=stat.get("uid", 0),
        gid=stat.get("gid", 0),
        link_target=stat.get("target"),
    )


async def ls(door: Door, request: r.OfPath) -> r.Entries:
    path = r.absolute("path", request.path)
    sandbox = _reach(door, request.sandbox_id)
    try:
        found = await door.core.files.list(door.who, sandbox, _request(model.ListFiles, path=path))
    except errors.AtollError as error:
        raise of_file(error) from None
    entries, size, cut = [], 0, bool(found.get("truncated"))
    for stat in found["entries"]:
        made = entry(stat, str(stat.get("name") or str(stat.get("path", "")).rpartition("/")[2]))
        size += len(msgspec.json.encode(made)) + 1
        if size > ANSWER:
            cut = True
            break
        entries.append(made)
    return r.Entries(sorted(entries, key=lambda one: one.name), cut)


async def stat(door: Door, request: r.OfPath) -> r.Entry:
    path = r.absolute("path", request.path)
    sandbox = _reach(door, request.sandbox_id)
    found = (await _ask(door, sandbox, "stat", _request(model.StatFile, path=path, follow=False))).get("stat")
    name = path.rstrip("/").rpartition("/")[2] or path
    return entry(found if isinstance(found, dict) else {}, name)


async def mkdir(door: Door, request: r.Mkdir) -> r.MadeDirectory:
    mode, path = r.octal(request.mode, "0755"), r.absolute("path", request.path)
    sandbox = _reach(door, request.sandbox_id)
    wanted = _request(model.MakeDirectory, path=path, mode=mode, parents=request.parents, exist_ok=request.parents)
    try:
        answer = await _ask(door, sandbox, "mkdir", wanted)
    except Failure as failure:
        if failure.code == "S212" and request.parents:
            raise Failure("S213", failure.message, note="a file is in the way") from None
        note = "parents: true accepts an existing directory"
        if failure.code == "S213" and not request.parents and await _is_directory(door, sandbox, path):
            raise Failure("S213", failure.message, fix={"parents": True}, note=note) from None
        raise _explained(failure, request.parents, note) from None
    return r.MadeDirectory(bool(answer.get("created")))


async def _is_directory(door: Door, sandbox: str, path: str) -> bool:
    found = (await _ask(door, sandbox, "stat", _request(model.StatFile, path=path, follow=True))).get("stat")
    return isinstance(found, dict) and found.get("type") == "directory"


async def rm(door: Door, request: r.Rm) -> r.Removed:
    path = r.absolute("path", request.path)
    sandbox = _reach(door, request.sandbox_id)
    await _ask(door, sandbox, "remove", _request(model.RemoveFile, path=path, recursive=request.recursive))
    return r.Removed(True)


async def chmod(door: Door, request: r.Chmod) -> r.Updated:
    mode, path = r.octal(request.mode), r.absolute("path", request.path)
    sandbox = _reach(door, request.sandbox_id)
    wanted = _request(
        model.ChangeMode, path=path, mode=mode, uid=request.uid, gid=request.gid, recursive=request.recursive
    )
    answer = await _ask(door, sandbox, "chmod", wanted)
    return r.Updated(int(answer.get("updated") or 0))


async def mv(door: Door, request: r.Mv) -> r.Moved:
    src, dst = r.absolute("src", request.src), r.absolute("dst", request.dst)
    sandbox = _reach(door, request.sandbox_id)
    try:
        await _ask(door, sandbox, "move", _request(model.MoveFile, src=src, dst=dst, overwrite=request.overwrite))
    except Failure as failure:
        raise _explained(failure, True, "overwrite: true replaces what is at dst") from None
    return r.Moved(True)


def _explained(failure: Failure, parents: bool, existing: str) -> Failure:
    """A missing parent can be mended by the caller's program; what would destroy something is only named."""
    if failure.code == "S211" and not parents:
        return Failure("S211", failure.message, fix={"parents": True}, note="parents: true makes missing directories")
    if failure.code == "S213":
        return Failure("S213", failure.message, note=existing)
    return failure


def _literal(failure: Failure, fix: Patch) -> Failure:
    """A pattern that does not compile is searched for as the text it is."""
    return Failure("S217", failure.message, fix=fix, note=failure.note) if failure.code == "S217" else failure


def _quoted(pattern: str) -> str:
    return re.sub(r"([^\w\s])", r"\\\1", pattern)


def _globs(include: list[str], exclude: list[str]) -> None:
    bad = [glob for glob in (*include, *exclude) if glob.startswith("!") or not glob or "\0" in glob]
    if not bad:
        return
    left_out = [glob[1:] for glob in include if glob.startswith("!")]
    fix = {
        "include_glob": [glob for glob in include if glob not in bad],
        "exclude_glob": [glob for glob in (*exclude, *left_out) if glob and glob not in bad and "\0" not in glob],
    }
    note = "to leave files out use exclude_glob, without `!`"
    raise Failure("S210", f"not a glob: {bad[0]!r:.80}", fix=fix, note=note)


async def grep(door: Door, request: r.Grep) -> r.Matches:
    path = r.absolute("path", request.path)
    _globs(request.include_glob, request.exclude_glob)
    sandbox = _reach(door, request.sandbox_id)
    wanted = _request(
        model.Grep,
        path=path,
        pattern=request.pattern or "(?:)",
        recursive=request.recursive,
        ignore_case=request.ignore_case,
        include=request.include_glob,
        exclude=request.exclude_glob,
        max_matches=min(request.max_matches or MOST_MATCHES, MOST_MATCHES),
        max_line_bytes=min(request.max_line_bytes or model.MIB, model.MIB),
    )
    try:
        found = await door.core.files.grep(door.who, sandbox, wanted)
    except errors.IsADirectory as error:
        raise Failure(
            "S210", error.message, fix={"recursive": True}, note="recursive: true searches a directory"
        ) from None
    except errors.AtollError as error:
        raise _literal(of_file(error), {"pattern": _quoted(request.pattern)}) from None
    matches, size, cut = [], 0, bool(found.get("truncated"))
    for one in found["matches"]:
        line = one.get("line", 0)
        made = r.Match(one.get("path", ""), line, one.get("content") or "", line, one.get("offset", 0))
        size += len(msgspec.json.encode(made)) + 1
        if size > ANSWER:
            cut = True
            break
        matches.append(made)
    return r.Matches(matches, cut)


async def sed(door: Door, request: r.Sed) -> r.EditedFiles:
    if bool(request.files) == (request.path is not None):
        raise Failure(
            "S210",
            "exactly one of files and path is needed",
            fix={"path": None} if request.files else None,
            note='"path": "/dir" or "files": ["/a", "/b"]',
        )
    if not request.regex and not request.pattern:
        raise Failure("S210", "an empty text cannot be replaced", note="give a pattern")
    _globs(request.include_glob, request.exclude_glob)
    files = [r.absolute("files", path) for path in request.files]
    path = None if request.path is None else r.absolute("path", request.path)
    sandbox = _reach(door, request.sandbox_id)
    wanted = _request(
        model.Sed,
        files=files or None,
        path=path,
        pattern=request.pattern or "(?:)",
        replacement=request.replacement,
        recursive=request.recursive,
        include=request.include_glob,
        exclude=request.exclude_glob,
        regex=request.regex,
        first_only=request.first_only,
        ignore_case=request.ignore_case,
    )
    try:
        found = await door.core.files.ask(door.who, sandbox, "sed", wanted)
    except errors.IsADirectory as error:
        raise Failure("S210", error.message, note="recursive: true edits the files of a directory") from None
    except errors.AtollError as error:
        raise _literal(of_file(error), {"regex": False}) from None
    results = [_edited(one) for one in found.get("results") or [] if isinstance(one, dict)]
    return r.EditedFiles(results, sum(one.replacements for one in results if one.success))


def _edited(one: Entry) -> r.Edited:
    error = one.get("error")
    path, count = str(one.get("path", "")), int(one.get("replacements") or 0)
    if error is None:
        return r.Edited(path=path, replacements=count, success=True)
    text = str(error.get("message") or error.get("code")) if isinstance(error, dict) else str(error)
    return r.Edited(path=path, replacements=0, success=False, error=text)


async def write(door: Door, request: r.Write) -> r.Written:
    if isinstance(request.content, r.Ref):
        raise Failure("S001", "a channel can only be read by a worker on the engine's bus", note=WRITE_NOTE)
    if (request.content is None) == (request.content_b64 is None):
        fix = {"content_b64": None} if request.content is not None else None
        raise Failure("S001", "exactly one of content and content_b64 is needed", fix=fix, note=WRITE_NOTE)
    if request.content is not None:
        data = request.content.encode("utf-8", "replace")
    else:
        try:
            data = r.base64_bytes("content_b64", request.content_b64 or "")
        except Failure as failure:
            as_text = {"content_b64": None, "content": request.content_b64}
            raise Failure("S001", failure.message, fix=as_text, note=failure.note) from None
    return await write_stream(door, request, data)


WRITE_NOTE = '{"path": "/tmp/a", "content": "text"}, or content_b64, or content as a channel to read'


async def write_stream(door: Door, request: r.Write, source: AsyncIterator[bytes] | bytes) -> r.Written:
    mode, path = r.octal(request.mode, "0644"), r.absolute("path", request.path)
    sandbox = _reach(door, request.sandbox_id)
    try:
        answer = await door.core.files.write(
            door.who, sandbox, path, source, mode=mode, parents=request.parents or None, follow=False, fsync=True
        )
    except errors.AtollError as error:
        raise _explained(of_file(error), request.parents, "it is there already") from None
    return r.Written(int(answer.get("bytes") or 0), path)


async def read(door: Door, request: r.OfPath) -> r.ReadFile:
    """For callers without a bus: the bytes in the answer, or for a large file where to get them."""
    path = r.absolute("path", request.path)
    sandbox = _reach(door, request.sandbox_id)
    try:
        async with door.core.files.read(door.who, sandbox, path) as (found, data):
            answer = described(found)
            if answer.size > ANSWER // 2:
                answer.content_url = "/functions/sandbox::fs::read/content"
                return answer
            pieces, size = [], 0
            async for piece in data:
                pieces.append(piece)
                size += len(piece)
                if size > ANSWER // 2:
                    answer.content_url = "/functions/sandbox::fs::read/content"
                    return answer
    except errors.AtollError as error:
        raise of_file(error) from None
    text, encoded = model.shown(b"".join(pieces))
    answer.size = size
    if size < BODY and encoded is msgspec.UNSET:
        answer.body = text
    else:
        answer.content_b64 = encoded if encoded is not msgspec.UNSET else base64.b64encode(text.encode()).decode()
    return answer


def described(found: Entry) -> r.ReadFile:
    return r.ReadFile(
        content=None,
        size=found.get("size", 0),
        mode=format(found.get("mode", 0) & 0o7777, "04o"),
        mtime=int(found.get("mtime", 0)),
    )
