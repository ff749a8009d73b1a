"""The table of functions: id, request, answer, what does it. Every way in goes through `call`."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from atoll import errors
from atoll.surfaces.iii import files, lifecycle
from atoll.surfaces.iii import requests as r
from atoll.surfaces.iii.door import Door
from atoll.surfaces.iii.failure import CREATE_EXAMPLE, EXEC_EXAMPLE, Failure
from atoll.surfaces.iii.repairs import propose

log = logging.getLogger("atoll.functions")

RUN_EXAMPLE = '{"image": "python", "lang": "python", "code": "print(1)"}'


class Function(NamedTuple):
    work: Callable[[Door, Any], Awaitable[Any]]
    kind: type[Any]
    answer: type[Any]
    does: str
    example: str


def _of(path: str, more: str = "") -> str:
    return f'{{"sandbox_id": "<uuid>", "path": "{path}"{more}}}'


FUNCTIONS: dict[str, Function] = {
    "sandbox::run": Function(
        lifecycle.run, r.Run, r.Executed, "Run a snippet in a sandbox of its own and destroy it.", RUN_EXAMPLE
    ),
    "sandbox::create": Function(lifecycle.create, r.Create, r.Created, "Start a sandbox.", CREATE_EXAMPLE),
    "sandbox::exec": Function(
        lifecycle.execute, r.Exec, r.Executed, "Run one command; no shell, one at a time.", EXEC_EXAMPLE
    ),
    "sandbox::stop": Function(
        lifecycle.stop, r.Stop, r.Stopped, "Destroy a sandbox with all its files.", '{"sandbox_id": "<uuid>"}'
    ),
    "sandbox::list": Function(lifecycle.listed, r.Nothing, r.Sandboxes, "Sandboxes that are alive.", "{}"),
    "sandbox::catalog::list": Function(lifecycle.catalog, r.Nothing, r.CatalogList, "Images that can be booted.", "{}"),
    "sandbox::fs::write": Function(
        files.write, r.Write, r.Written, "Write a file whole or not at all.", _of("/tmp/a", ', "content": "text"')
    ),
    "sandbox::fs::read": Function(files.read, r.OfPath, r.ReadFile, "Read a file.", _of("/tmp/a")),
    "sandbox::fs::ls": Function(files.ls, r.OfPath, r.Entries, "List a directory.", _of("/tmp")),
    "sandbox::fs::stat": Function(files.stat, r.OfPath, r.Entry, "What is known of a path.", _of("/tmp/a")),
    "sandbox::fs::mkdir": Function(files.mkdir, r.Mkdir, r.MadeDirectory, "Make a directory.", _of("/tmp/d")),
    "sandbox::fs::rm": Function(files.rm, r.Rm, r.Removed, "Remove a file or a tree.", _of("/tmp/a")),
    "sandbox::fs::mv": Function(
        files.mv, r.Mv, r.Moved, "Move or rename.", '{"sandbox_id": "<uuid>", "src": "/tmp/a", "dst": "/tmp/b"}'
    ),
    "sandbox::fs::chmod": Function(
        files.chmod, r.Chmod, r.Updated, "Change mode and owner.", _of("/tmp/a", ', "mode": "0600"')
    ),
    "sandbox::fs::grep": Function(
        files.grep, r.Grep, r.Matches, "Search with a regular expression.", _of("/tmp", ', "pattern": "x+"')
    ),
    "sandbox::fs::sed": Function(
        files.sed, r.Sed, r.EditedFiles, "Replace in files.", _of("/tmp", ', "pattern": "a", "replacement": "b"')
    ),
}


async def call(door: Door, name: str, payload: Any) -> Any:
    """One call: its answer as plain values, or a Failure."""
    function = FUNCTIONS[name]
    try:
        request = r.decode(function.kind, payload, function.example)
        return msgspec.to_builtins(await function.work(door, request))
    except Failure as failure:
        if failure.code == "S001":
            fix = failure.fix or propose(function.kind, payload, door.settings.allowed())
            note = failure.note if failure.note is not None else function.example
            failure = Failure("S001", failure.message, fix=fix, note=note, details=failure.details)
        raise failure from None
    except errors.AtollError as error:
        code = "S216" if "::fs::" in name else "S300"
        raise Failure(code, error.message, note=error.hint or None) from None


def schemas(name: str) -> tuple[r.Schema, r.Schema]:
    function = FUNCTIONS[name]
    return r.schema(function.kind), r.schema(function.answer)
