"""`AsyncSandbox.files`: the sandbox's file system. Relative paths start at /workspace; names keep their bytes.

The blocking face is generated from this one (scripts/unasync.py).
"""

import builtins
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from atoll.errors import NotFound

from .. import archive, calls
from ..results import Change, Event, FileInfo, Match, changes
from .driver import AsyncExchange, in_thread, pieces_of, save

WORKSPACE = "/workspace"

if TYPE_CHECKING:
    from ..calls import Path
    from ..wire import EditedWire
    from .sandbox import AsyncSandbox


class AsyncFiles:
    """File operations; all of them happen inside the sandbox.

    `user`, a name or number of the sandbox, is whose rights decide and who owns what is made; unsaid, root.
    """

    def __init__(self, sandbox: "AsyncSandbox") -> None:
        self._sandbox = sandbox

    async def read(
        self, path: "Path", *, offset: int | None = None, limit: int | None = None, user: str | None = None
    ) -> bytes:
        """Return the content of a file.

        Args:
            path: the file.
            offset: the byte to start at. None: the first.
            limit: read at most so many bytes. None: all.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        return b"".join([piece async for piece in self.read_stream(path, offset=offset, limit=limit, user=user)])

    async def read_text(
        self, path: "Path", encoding: str = "utf-8", errors: str = "strict", *, user: str | None = None
    ) -> str:
        """Return the content of a file as text.

        Args:
            path: the file.
            encoding: of the text.
            errors: what to do with bytes that are not of that encoding, as in `bytes.decode`.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        return (await self.read(path, user=user)).decode(encoding, errors)

    async def read_stream(
        self,
        path: "Path",
        *,
        offset: int | None = None,
        limit: int | None = None,
        user: str | None = None,
    ) -> AsyncIterator[bytes]:
        """Give the content piece by piece, for files that should not be held in memory.

        Args:
            path: the file.
            offset: the byte to start at. None: the first.
            limit: read at most so many bytes. None: all.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        ref, link = await self._sandbox._target()
        exchange = await link.open(calls.read_file(ref, path, offset, limit, user))
        try:
            await exchange.raise_for_status()
            while piece := await exchange.read():
                yield piece
        finally:
            exchange.close()

    async def write(
        self,
        path: "Path",
        data: bytes | str | IO[bytes] | AsyncIterable[bytes] | Iterable[bytes],
        *,
        mode: int | None = None,
        append: bool = False,
        offset: int | None = None,
        parents: bool = True,
        create: str | None = None,
        user: str | None = None,
    ) -> FileInfo:
        """Write text, bytes, or what a file or iterator gives, and return what the file is now.

        Without `append` or `offset` the old file is replaced whole, and nobody sees half of the new one.

        Args:
            path: the file.
            data: text (written as UTF-8), bytes, an open binary file, or an iterator of bytes.
            mode: permission bits. None: those of the old file, or 0644.
            append: write behind what is there.
            offset: write over the content from this byte on.
            parents: make the directories above it that are missing.
            create: `any` makes the file or replaces it (the default), `new` refuses one that exists, `existing` one that does not.
            user: whose rights decide, a name or number inside the sandbox. None: root. A new file is this user's.
        """
        ref, link = await self._sandbox._target()
        whole = (
            data.encode() if isinstance(data, str) else bytes(data) if isinstance(data, (bytes, bytearray)) else None
        )
        call = calls.write_file(
            ref, path, whole, mode=mode, append=append, offset=offset, parents=parents, create=create, user=user
        )
        exchange = await link.open(call, None if isinstance(data, (str, bytes, bytearray)) else pieces_of(data))
        return FileInfo((await exchange.json())["stat"])

    async def list(
        self,
        path: "Path" = WORKSPACE,
        *,
        recursive: bool = False,
        since: float | None = None,
        depth: int | None = None,
        limit: int | None = None,
        files_only: bool = False,
        user: str | None = None,
    ) -> list[FileInfo]:
        """Return the entries of a directory.

        Args:
            path: the directory.
            recursive: also the entries below its directories.
            since: only entries changed after this time, in seconds since 1970.
            depth: with `recursive`, go down at most so many levels.
            limit: return at most so many entries.
            files_only: leave directories out.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        fields = {"recursive": recursive, "since": since, "depth": depth, "limit": limit, "files_only": files_only}
        answer = await self._do("list", {**calls.path_fields(path=path), **fields}, user, repeatable=True)
        return [FileInfo(entry) for entry in answer["entries"]]

    async def stat(self, path: "Path", *, follow: bool = True, user: str | None = None) -> FileInfo:
        """Return what is known of one file or directory.

        Args:
            path: the file or directory.
            follow: of a symbolic link, describe its target and not the link.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        answer = await self._do("stat", {**calls.path_fields(path=path), "follow": follow}, user, repeatable=True)
        return FileInfo(answer["stat"])

    async def exists(self, path: "Path", *, user: str | None = None) -> bool:
        """Return whether a path exists. A symbolic link that leads nowhere does.

        Args:
            path: the path.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        try:
            await self.stat(path, follow=False, user=user)
        except NotFound as missing:
            if missing.code != "file_not_found":
                raise
            return False
        return True

    async def mkdir(
        self,
        path: "Path",
        *,
        parents: bool = True,
        mode: int | None = None,
        exist_ok: bool = False,
        user: str | None = None,
    ) -> None:
        """Make a directory.

        Args:
            path: the directory.
            parents: make the directories above it that are missing.
            mode: permission bits. None: 0755.
            exist_ok: a directory that exists is no error.
            user: whose rights decide, a name or number inside the sandbox. None: root. The new directory is this user's.
        """
        fields = {"parents": parents, "mode": mode, "exist_ok": exist_ok}
        await self._do("mkdir", {**calls.path_fields(path=path), **fields}, user)

    async def remove(
        self, path: "Path", *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> int:
        """Remove a file, an empty directory or a tree, and return how many entries were removed.

        Args:
            path: what to remove. A symbolic link is removed itself, not its target.
            recursive: remove a directory with all that is in it.
            missing_ok: a path that does not exist is no error.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        fields = {"recursive": recursive, "missing_ok": missing_ok}
        return int((await self._do("remove", {**calls.path_fields(path=path), **fields}, user)).get("removed") or 0)

    async def move(self, src: "Path", dst: "Path", *, overwrite: bool = False, user: str | None = None) -> None:
        """Move or rename a file or directory.

        Args:
            src: what to move.
            dst: its new path.
            overwrite: replace a file that exists.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        await self._do("move", {**calls.path_fields(src=src, dst=dst), "overwrite": overwrite}, user)

    async def copy(
        self, src: "Path", dst: "Path", *, recursive: bool = False, overwrite: bool = False, user: str | None = None
    ) -> None:
        """Copy a file, or with `recursive` a tree.

        Args:
            src: what to copy.
            dst: the path of the copy.
            recursive: copy a directory with all that is in it.
            overwrite: replace a file that exists.
            user: whose rights decide, a name or number inside the sandbox. None: root. The copy is this user's.
        """
        fields = {"recursive": recursive, "overwrite": overwrite}
        await self._do("copy", {**calls.path_fields(src=src, dst=dst), **fields}, user)

    async def chmod(
        self,
        path: "Path",
        mode: int | None = None,
        *,
        uid: int | None = None,
        gid: int | None = None,
        recursive: bool = False,
        user: str | None = None,
    ) -> None:
        """Change the permission bits or the owner.

        Args:
            path: the file or directory.
            mode: new permission bits. None: as they are.
            uid: new owner. None: as it is.
            gid: new group. None: as it is.
            recursive: also everything below a directory.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        fields = {"mode": mode, "uid": uid, "gid": gid, "recursive": recursive}
        await self._do("chmod", {**calls.path_fields(path=path), **fields}, user)

    async def symlink(self, target: "Path", path: "Path", *, user: str | None = None) -> None:
        """Make a symbolic link.

        Args:
            target: the text of the link: where it leads.
            path: the link.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        await self._do("symlink", calls.path_fields(target=target, path=path), user)

    async def du(self, path: "Path" = WORKSPACE, *, user: str | None = None) -> dict[str, int]:
        """Return how many `bytes` and `inodes` a tree uses.

        Args:
            path: the tree.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        answer: dict[str, int] = await self._do("du", calls.path_fields(path=path), user, repeatable=True)
        return answer

    async def grep(
        self,
        pattern: str,
        path: "Path" = WORKSPACE,
        *,
        recursive: bool = True,
        ignore_case: bool = False,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        max_matches: int | None = None,
        user: str | None = None,
    ) -> builtins.list[Match]:
        """Search files for a regular expression and return the lines that match.

        Args:
            pattern: the regular expression.
            path: a file, or a directory whose files are searched.
            recursive: also search the directories below.
            ignore_case: take upper and lower case for the same.
            include: only files whose name matches one of these globs.
            exclude: no file or directory whose name matches one of these globs.
            max_matches: stop after so many lines.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        fields = {"pattern": pattern, "recursive": recursive, "ignore_case": ignore_case, "max_matches": max_matches}
        globs = {"include": list(include), "exclude": list(exclude)}
        answer = await self._do("grep", {**calls.path_fields(path=path), **fields, **globs}, user, repeatable=True)
        return [Match(item) for item in answer["matches"]]

    async def sed(
        self,
        pattern: str,
        replacement: str,
        path: "Path | None" = None,
        *,
        files: Sequence[str] | None = None,
        recursive: bool = True,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        regex: bool = True,
        first_only: bool = False,
        ignore_case: bool = False,
        user: str | None = None,
    ) -> "builtins.list[EditedWire]":
        """Replace text in files, and return one entry for each file: path, replacements, error.

        Args:
            pattern: the regular expression to replace.
            replacement: the new text; `$1` stands for the first group.
            path: a file, or a directory whose files are changed. Give this or `files`.
            files: the files to change.
            recursive: also change files in the directories below.
            include: only files whose name matches one of these globs.
            exclude: no file or directory whose name matches one of these globs.
            regex: False takes `pattern` as plain text.
            first_only: replace only the first match of each file.
            ignore_case: take upper and lower case for the same.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        fields = {
            "pattern": pattern,
            "replacement": replacement,
            "recursive": recursive,
            "regex": regex,
            "first_only": first_only,
            "ignore_case": ignore_case,
            "include": list(include),
            "exclude": list(exclude),
            "files": None if files is None else list(files),
        }
        where = {} if path is None else calls.path_fields(path=path)
        answer = await self._do("sed", {**where, **fields}, user)
        return list(answer["results"])

    async def upload(self, local: "Path", remote: "Path", *, user: str | None = None) -> None:
        """Copy a local file to the path `remote`, or a local directory's content into the directory `remote`.

        Args:
            local: a file or directory of this machine.
            remote: the path inside the sandbox.
            user: whose rights decide, a name or number inside the sandbox. None: root. What is copied is this user's.
        """
        source = os.fsdecode(local)
        if not await in_thread(os.path.isdir, source):
            mode = (await in_thread(os.stat, source)).st_mode & 0o777
            with open(source, "rb") as file:  # noqa: ASYNC230  (read in a thread)
                await self.write(remote, file, mode=mode, user=user)
            return
        ref, link = await self._sandbox._target()
        await self.mkdir(remote, parents=True, exist_ok=True, user=user)
        tree = calls.tar(ref, remote, upload=True, user=user)
        exchange = await link.open(tree, pieces_of(archive.pack(source)))
        await exchange.json()

    async def download(self, remote: "Path", local: "Path", *, user: str | None = None) -> builtins.list[str]:
        """Copy a file to the path `local`, or a directory's content into the directory `local`.

        Returns the entries that were refused: links that lead out of the tree, devices and the like.

        Args:
            remote: a file or directory inside the sandbox.
            local: the path on this machine.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        target = os.fsdecode(local)
        found = await self.stat(remote, user=user)
        ref, link = await self._sandbox._target()
        tree = found.type == "directory"
        exchange = await link.open(
            calls.tar(ref, remote, upload=False, user=user) if tree else calls.read_file(ref, remote, user=user)
        )
        try:
            await exchange.raise_for_status()
            if not tree:
                await save(exchange, lambda pieces: archive.write_local(target, pieces, found.mode))
                return []
            await in_thread(os.makedirs, target, exist_ok=True)
            return (await save(exchange, lambda pieces: archive.unpack(pieces, target))).refused
        finally:
            exchange.close()

    async def watch(
        self, path: "Path" = WORKSPACE, *, recursive: bool = True, user: str | None = None
    ) -> AsyncIterator[Change]:
        """Return an iterator over changes, from the moment this returns until the iterator is closed.

        Args:
            path: the file or directory to watch.
            recursive: also watch the directories below, and those that are made later.
            user: whose rights decide, a name or number inside the sandbox. None: root.
        """
        ref, link = await self._sandbox._target()
        exchange = await link.open(calls.watch(ref, path, recursive, user))
        await exchange.raise_for_status()
        return _changes(exchange)

    async def _do(self, verb: str, fields: Mapping[str, object], user: str | None, *, repeatable: bool = False) -> Any:
        ref, link = await self._sandbox._target()
        return await link.call(calls.file_operation(ref, verb, {**fields, "user": user}, repeatable=repeatable))


async def _changes(exchange: AsyncExchange) -> AsyncIterator[Change]:
    try:
        async for value in exchange.frames():
            if isinstance(value, Event):
                for change in changes(value.data):
                    yield change
    finally:
        exchange.close()
