"""`atoll cp`: files and trees between here and a sandbox, `-` for standard input and output.

What is copied out was made by untrusted code: see `client/archive.py` for what is written and what is refused.
"""

from __future__ import annotations

import os
import stat

from ..client import archive, calls
from ..client.results import FileInfo
from ..errors import FileNotFound, InvalidArgument, NotFound
from .grammar import UsageError
from .output import FAILED, OWN_FAILURE, program_name, say, tell, write
from .session import open_link, reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..client._sync.driver import Link
    from .grammar import Arguments

PIECE = 262_144


def copy(arguments: Arguments) -> int:
    source, target = arguments.rest
    here, there = _place(source), _place(target)
    if (here is None) == (there is None):
        raise UsageError(
            "one of the two must be in a sandbox, the other not", "such as: atoll cp data.csv REF:/workspace/"
        )
    link, user = open_link(arguments), arguments.values.get("user")
    place = source if there is not None else target
    if here is not None and os.path.isdir(target):
        place = os.path.join(target, os.path.basename(here[1].rstrip("/")))
    try:
        if there is not None:
            code = _copy_in(link, source, *there, user)
        else:
            code = _copy_out(link, *(here or ("", "")), target, user)
        if code == 0 and place != "-" and program_name() == "agentkernel":
            tell(f"Copied {_size(place)} bytes from {source} to {target}")
        return code
    except OSError as failure:
        say(f"atoll: {failure.filename or source}: {failure.strerror or failure}")
        return OWN_FAILURE


def _size(path: str) -> int:
    """Bytes of a file, or of all files of a tree."""
    if not os.path.isdir(path):
        return os.stat(path).st_size
    return sum(os.lstat(os.path.join(top, name)).st_size for top, _, names in os.walk(path) for name in names)


def _place(text: str) -> tuple[str, str] | None:
    """`REF:/path` as its two parts; None for a local path (which may hold a colon after a slash)."""
    ref, colon, path = text.partition(":")
    if not colon or not ref or "/" in ref or ref in (".", ".."):
        return None
    if not path:
        raise UsageError(f"{text!r} names no path", f"such as {text}/workspace")
    return reference(ref), path


def _stat(link: Link, ref: str, path: str, user: str | None) -> FileInfo | None:
    try:
        fields = {**calls.path_fields(path=path), "user": user}
        return FileInfo(link.call(calls.file_operation(ref, "stat", fields, repeatable=True))["stat"])
    except FileNotFound:
        return None


def _copy_in(link: Link, source: str, ref: str, path: str, user: str | None) -> int:
    if source == "-":
        call = calls.write_file(ref, path, None, parents=True, user=user)
        link.open(call, iter(lambda: os.read(0, PIECE), b"")).json()
        return 0
    found = os.stat(source)
    existing = _stat(link, ref, path, user)
    into = path.endswith("/") or (existing is not None and existing.type == "directory")
    if into:
        path = path.rstrip("/") + "/" + os.path.basename(os.path.abspath(source))
    if stat.S_ISDIR(found.st_mode):
        fields = {**calls.path_fields(path=path), "parents": True, "exist_ok": True, "user": user}
        link.call(calls.file_operation(ref, "mkdir", fields))
        link.open(calls.tar(ref, path, upload=True, user=user), archive.pack(source)).json()
        return 0
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgument(f"{source} is neither a file nor a directory")
    with open(source, "rb", buffering=0) as file:
        mode = stat.S_IMODE(found.st_mode) & 0o777
        call = calls.write_file(ref, path, None, mode=mode, parents=True, user=user)
        link.open(call, archive.read_pieces(file)).json()
    return 0


def _copy_out(link: Link, ref: str, path: str, target: str, user: str | None) -> int:
    found = _stat(link, ref, path, user)
    if found is None:
        raise NotFound(f"{path}: no such file or directory in the sandbox")
    if found.type == "directory":
        return _copy_tree_out(link, ref, path, target, user)
    exchange = link.open(calls.read_file(ref, path, user=user))
    exchange.raise_for_status()
    pieces = iter(exchange.read, b"")
    if target == "-":
        for piece in pieces:
            write(1, piece)
        return 0
    if os.path.isdir(target):
        target = os.path.join(target, _base_name(path))
    archive.write_local(target, pieces, found.mode)
    return 0


def _copy_tree_out(link: Link, ref: str, path: str, target: str, user: str | None) -> int:
    if target != "-":
        if os.path.isdir(target):
            target = os.path.join(target, _base_name(path))
            if os.path.islink(target):
                raise InvalidArgument(f"{target} is a link; nothing was written through it")
        os.makedirs(target, exist_ok=True)
    exchange = link.open(calls.tar(ref, path, upload=False, user=user))
    exchange.raise_for_status()
    pieces = iter(exchange.read, b"")
    if target == "-":
        for piece in pieces:
            write(1, piece)
        return 0
    refused = archive.unpack(pieces, target).refused
    for entry in refused:
        say(f"atoll: not copied: {entry}")
    return FAILED if refused else 0


def _base_name(path: str) -> str:
    name = path.rstrip("/").rpartition("/")[2]
    if name in ("", ".", ".."):
        raise InvalidArgument(f"{path} has no name of its own; name the local path")
    return name
