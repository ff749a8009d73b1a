"""Files of a sandbox as the contract shows them."""

import posixpath
import stat as modes
from datetime import UTC, datetime

from atoll import errors
from atoll.model import StatFile
from atoll.surfaces.e2b.envd.calls import Call
from atoll.surfaces.e2b.envd.connect import Json
from atoll.surfaces.e2b.envd.people import People
from atoll.surfaces.e2b.replies import plain

TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY"}
_KINDS = {
    "file": modes.S_IFREG, "directory": modes.S_IFDIR, "symlink": modes.S_IFLNK, "fifo": modes.S_IFIFO,
    "socket": modes.S_IFSOCK, "char": modes.S_IFCHR, "block": modes.S_IFBLK,
}  # fmt: skip


async def stat(call: Call, path: str) -> Json:
    """Return what core says of a path, not following a link."""
    answer = await call.app.core.files.ask(call.who, call.sandbox, "stat", StatFile(path=path, follow=False))
    found = answer.get("stat")
    return found if isinstance(found, dict) else {}


async def entry(call: Call, path: str, found: Json | None = None) -> Json:
    """Return a path's entry. A link has its target's type and mode."""
    people = await call.people()
    found = found or await stat(call, path)
    path = posixpath.normpath(path)
    shown = found
    links: Json = {}
    if found.get("type") == "symlink":
        links = {
            "isSymlink": True,
            "symlinkTarget": plain(await call.app.core.files.resolve(call.who, call.sandbox, path)),
        }
        try:
            answer = await call.app.core.files.ask(call.who, call.sandbox, "stat", StatFile(path=path, follow=True))
            shown = answer.get("stat") or found
        except (errors.FileNotFound, errors.FileError):
            pass  # it leads nowhere
    return {**_described(path, shown, people), **links}


def _described(path: str, found: Json, people: People) -> Json:
    mode = int(found.get("mode") or 0) & 0o7777
    kind = str(found.get("type"))
    uid, gid = int(found.get("uid") or 0), int(found.get("gid") or 0)
    return {
        "name": plain(posixpath.basename(path) or "/"),
        "type": TYPES.get(kind, "FILE_TYPE_SYMLINK" if kind == "symlink" else "FILE_TYPE_UNSPECIFIED"),
        "path": plain(path),
        "size": str(found.get("size") or 0),
        "mode": mode & 0o777,
        "permissions": modes.filemode(_KINDS.get(kind, 0) | mode),
        "owner": people.owners.get(uid, str(uid)),
        "group": people.groups.get(gid, str(gid)),
        "modifiedTime": _moment(float(found.get("mtime") or 0)),
    }


def _moment(at: float) -> str:
    """Return a time as text. A guest may have set it to anything."""
    try:
        found = datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):
        found = datetime.fromtimestamp(0, UTC)
    return found.isoformat(timespec="microseconds").replace("+00:00", "Z")
