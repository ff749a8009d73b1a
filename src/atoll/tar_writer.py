"""Writes a directory tree of overlayfs as the tar of an image layer: its files, and marks for what it deletes.

The tree may be a hostile sandbox's work. It is walked through directory descriptors, no link is followed, and what a layer
cannot hold (devices, sockets, fifos) is left out. Numbers of owners are those inside: `base` is taken away.
"""

import os
import stat
import tarfile
from collections.abc import Callable, Collection
from typing import BinaryIO

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
_OPAQUE_MARKS = ("trusted.overlay.opaque", "user.overlay.opaque")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PIECE = 1 << 20
_DEEPEST = 128


class TarWriter:
    """Writes entries one by one; `close` ends the archive."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def header(
        self, path: str, kind: bytes, *, mode: int = 0o644, uid: int = 0, gid: int = 0, mtime: float = 0.0,
        size: int = 0, link: str = "",
    ) -> None:  # fmt: skip
        """Write an entry without a body, or the head of a regular file of so many bytes."""
        info = tarfile.TarInfo(path)
        info.type, info.mode, info.linkname = kind, mode & 0o7777, link
        info.uid, info.gid, info.size, info.mtime = uid, gid, size, int(max(0.0, mtime))
        self._out.write(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))

    def file(self, path: str, read: Callable[[int], bytes], size: int, **fields: int | float) -> None:
        """Write a regular file. One that turns out shorter is filled with zeros, so that the archive stays whole."""
        self.header(path, tarfile.REGTYPE, size=size, **fields)  # type: ignore[arg-type]  # numbers, by name
        left = size
        while left:
            piece = read(min(left, _PIECE)) or bytes(min(left, _PIECE))
            self._out.write(piece)
            left -= len(piece)
        self._out.write(bytes(-size % tarfile.BLOCKSIZE))

    def close(self) -> None:
        self._out.write(bytes(2 * tarfile.BLOCKSIZE))
        self._out.flush()


class TreePacker:
    """Writes trees of one layer. Several names of one file stay one file."""

    def __init__(self, writer: TarWriter, *, base: int = 0, leave_out: Collection[str] = ()) -> None:
        self._writer = writer
        self._base = base
        self._leave_out = frozenset(leave_out)
        self._links: dict[tuple[int, int], str] = {}

    def add(self, root: int, prefix: str = "") -> None:
        """Write everything below the directory open as `root`, under `prefix`."""
        if prefix:
            self._directory(root, prefix)
        self._below(root, prefix, 0)

    def _below(self, directory: int, path: str, depth: int) -> None:
        if depth > _DEEPEST:
            return
        for name in sorted(os.listdir(directory)):
            full = f"{path}/{name}" if path else name
            if full in self._leave_out or name.startswith(WHITEOUT):
                continue
            state = os.lstat(name, dir_fd=directory)
            if stat.S_ISDIR(state.st_mode):
                inner = os.open(name, _DIRECTORY, dir_fd=directory)
                try:
                    self._directory(inner, full)
                    self._below(inner, full, depth + 1)
                finally:
                    os.close(inner)
            else:
                self._leaf(directory, name, full, path, state)

    def _directory(self, fd: int, path: str) -> None:
        state = os.fstat(fd)
        self._writer.header(path, tarfile.DIRTYPE, **self._fields(state))  # type: ignore[arg-type]  # numbers, by name
        if any(_attribute(fd, mark) == b"y" for mark in _OPAQUE_MARKS):
            self._writer.header(f"{path}/{OPAQUE}", tarfile.REGTYPE)

    def _leaf(self, directory: int, name: str, full: str, above: str, state: os.stat_result) -> None:
        if stat.S_ISCHR(state.st_mode) and state.st_rdev == 0:
            self._writer.header(f"{above}/{WHITEOUT}{name}" if above else f"{WHITEOUT}{name}", tarfile.REGTYPE)
            return
        if not (stat.S_ISREG(state.st_mode) or stat.S_ISLNK(state.st_mode)):
            return
        key = state.st_dev, state.st_ino
        if state.st_nlink > 1 and (first := self._links.setdefault(key, full)) != full:
            self._writer.header(full, tarfile.LNKTYPE, link=first)
        elif stat.S_ISLNK(state.st_mode):
            link = os.readlink(name, dir_fd=directory)
            self._writer.header(full, tarfile.SYMTYPE, link=link, **self._fields(state))
        else:
            fd = os.open(name, _FILE, dir_fd=directory)
            try:
                size = os.fstat(fd).st_size
                self._writer.file(full, lambda count: os.read(fd, count), size, **self._fields(state))
            finally:
                os.close(fd)

    def _fields(self, state: os.stat_result) -> dict[str, int]:
        return {
            "mode": stat.S_IMODE(state.st_mode),
            "uid": max(0, state.st_uid - self._base),
            "gid": max(0, state.st_gid - self._base),
            "mtime": int(state.st_mtime),
        }


def _attribute(fd: int, name: str) -> bytes:
    try:
        return os.getxattr(fd, name)
    except OSError:
        return b""
