"""Trees between here and a sandbox, as tar streams. What comes out of a sandbox is hostile.

`unpack` writes beneath one directory and nowhere else: every parent is opened relative to the last with O_NOFOLLOW, so
neither a name with `..` nor a link (sent by the sandbox, or lying in the target already) leads outside. Links are made
only when they cannot point out of the tree; devices, fifos and sockets never; setuid bits are dropped.
"""

from __future__ import annotations

import os
import secrets
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO

from .. import tar_reader
from ..errors import FileError, ImageError, InvalidArgument, TooLarge, Unsupported
from ..tar_reader import Entry, TarReader
from .portable import CLOSE_ON_EXEC, NO_FOLLOW

PIECE = 262_144
MAX_BYTES = 64 * 1024**3
MAX_ENTRIES = 1_000_000
_IS_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_DIRECTORY = os.O_RDONLY | _IS_DIRECTORY | NO_FOLLOW | CLOSE_ON_EXEC


class Unpacked:
    """The result of `unpack`: counts, and the entries it refused with the reason."""

    __slots__ = ("bytes", "files", "placed", "refused")

    def __init__(self) -> None:
        self.placed: set[tuple[str, ...]] = set()  # regular files written by this very call: what hard links may name
        self.files = 0
        self.bytes = 0
        self.refused: list[str] = []


def pack(source: str, name: str = "", *, keeps: Callable[[str], bool] | None = None) -> Iterator[bytes]:
    """The tree (or file) at `source` as a tar stream; names are relative to it, below `name` if given.

    `keeps` says of a path below `source` whether it is taken."""
    if not stat.S_ISDIR(os.lstat(source).st_mode):
        yield from _pack_one(source, name or os.path.basename(source))
    else:
        for parent, directories, files in os.walk(source):
            relative = os.path.relpath(parent, source)
            if keeps is not None:
                directories[:] = [d for d in directories if keeps(os.path.normpath(os.path.join(relative, d)))]
                files = [f for f in files if keeps(os.path.normpath(os.path.join(relative, f)))]
            directories.sort()
            if relative != "." or name:
                yield from _pack_one(parent, os.path.normpath(os.path.join(name, relative)))
            for entry in sorted(files + [d for d in directories if os.path.islink(os.path.join(parent, d))]):
                yield from _pack_one(os.path.join(parent, entry), os.path.normpath(os.path.join(name, relative, entry)))
    yield bytes(2 * tarfile.BLOCKSIZE)


def _pack_one(path: str, name: str) -> Iterator[bytes]:
    found = os.lstat(path)
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(found.st_mode), found.st_mtime
    if stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(found.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif stat.S_ISREG(found.st_mode):
        yield from _pack_file(path, info)
        return
    else:
        return  # a socket, fifo or device has no meaning elsewhere
    yield _header(info)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _pack_file(path: str, info: tarfile.TarInfo) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | NO_FOLLOW | CLOSE_ON_EXEC | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb", buffering=0) as file:
        left = info.size = os.fstat(descriptor).st_size
        yield _header(info)
        while left:
            piece = file.read(min(left, PIECE))
            if not piece:
                raise FileError(f"{path} became shorter while it was read")
            left -= len(piece)
            yield piece
    yield bytes(-info.size % tarfile.BLOCKSIZE)


def _reading(pieces: Iterator[bytes]) -> Callable[[int], bytes]:
    """Return a function that gives up to so many of the next bytes, and none at the end."""
    rest = memoryview(b"")

    def read(size: int) -> bytes:
        nonlocal rest
        while not rest:
            piece = next(pieces, None)
            if piece is None:
                return b""
            rest = memoryview(piece)
        taken, rest = bytes(rest[:size]), rest[size:]
        return taken

    return read


def unpack(
    pieces: Iterable[bytes], target: str, *, max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENTRIES
) -> Unpacked:
    """Extract a tar stream beneath the existing directory `target`."""
    done = Unpacked()
    if os.open not in os.supports_dir_fd:
        raise Unsupported("this system cannot unpack a directory safely", hint="fetch its files one by one")
    root = os.open(target, os.O_RDONLY | _IS_DIRECTORY | CLOSE_ON_EXEC)  # the caller's own word: may itself be a link
    try:
        source = iter(pieces)
        reader = tar_reader.TarReader(_reading(source))
        for count, entry in enumerate(reader.entries()):
            if count >= max_entries:
                raise TooLarge(f"more than {max_entries} entries")
            if done.bytes + entry.size > max_bytes:
                raise TooLarge(f"more than {max_bytes} bytes")
            _place(root, reader, entry, _text(entry.name), done)
        for _ in source:  # to the stream's end: only then is it known to be whole
            pass
    except ImageError as bad:
        raise FileError(f"the archive is broken: {bad.message}") from None
    finally:
        os.close(root)
    return done


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape").rstrip("/")


def _place(root: int, reader: TarReader, entry: Entry, name: str, done: Unpacked) -> None:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or name.startswith("/") or "\0" in name:
        done.refused.append(f"{name}: leads outside")
        return
    if not parts:
        return
    try:
        with _Parent(root, parts[:-1]) as parent:
            if entry.kind == tar_reader.HARDLINK:
                _link(root, parent.descriptor, parts, name, _text(entry.link), done)
            else:
                _make(parent.descriptor, parts, reader, entry, done)
    except OSError as bad:
        done.refused.append(f"{name}: {bad.strerror or bad}")


class _Parent:
    """The directory of an entry, opened component by component without following a link, made where missing."""

    def __init__(self, root: int, parts: list[str]) -> None:
        self.descriptor = os.dup(root)
        try:
            for part in parts:
                self._enter(part)
        except BaseException:
            os.close(self.descriptor)
            raise

    def _enter(self, part: str) -> None:
        try:
            below = os.open(part, _DIRECTORY, dir_fd=self.descriptor)
        except FileNotFoundError:
            os.mkdir(part, 0o755, dir_fd=self.descriptor)
            below = os.open(part, _DIRECTORY, dir_fd=self.descriptor)
        os.close(self.descriptor)
        self.descriptor = below

    def __enter__(self) -> _Parent:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


def _make(parent: int, parts: list[str], reader: TarReader, entry: Entry, done: Unpacked) -> None:
    name = parts[-1]
    if entry.kind == tar_reader.DIRECTORY:
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            os.close(os.open(name, _DIRECTORY, dir_fd=parent))  # fails for anything but a real directory
    elif entry.kind == tar_reader.REGULAR:
        done.bytes += write_beneath(parent, name, reader.chunks(), entry.mode, entry.mtime)
        done.files += 1
        done.placed.add(tuple(parts))
    elif entry.kind == tar_reader.SYMLINK:
        target = entry.link.decode("utf-8", "surrogateescape")
        if not stays_inside(parts, target):
            done.refused.append(f"{'/'.join(parts)}: a link to {target} leads outside")
            return
        _refuse_link(parent, name)
        temporary = _temporary()
        os.symlink(target, temporary, dir_fd=parent)
        os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        done.placed.discard(tuple(parts))  # a hard link to it would be this link at another depth
        done.files += 1
    else:
        done.refused.append(f"{'/'.join(parts)}: neither file, directory nor link")


def _link(root: int, parent: int, parts: list[str], name: str, target: str, done: Unpacked) -> None:
    """A hard link: only to a file that this archive brought."""
    source = [part for part in target.split("/") if part not in ("", ".")]
    if tuple(source) not in done.placed:
        done.refused.append(f"{name}: a hard link to {target}, which is not in the archive")
        return
    _refuse_link(parent, parts[-1])
    temporary = _temporary()
    with _Parent(root, source[:-1]) as place:
        os.link(source[-1], temporary, src_dir_fd=place.descriptor, dst_dir_fd=parent, follow_symlinks=False)
    try:
        _refuse_link(parent, temporary)  # who can write here may have put another thing in the file's place
        os.rename(temporary, parts[-1], src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        os.unlink(temporary, dir_fd=parent)
        raise
    done.files += 1
    done.placed.add(tuple(parts))


def stays_inside(parts: list[str], target: str) -> bool:
    """Whether a link at `parts` with this target cannot leave the tree: relative, `..` only in front and not too many.

    A `..` after a name could leave by way of another link, so it does not count as staying inside.
    """
    steps = target.split("/")
    if target.startswith("/") or not target or "\0" in target:
        return False
    ups = 0
    while ups < len(steps) and steps[ups] == "..":
        ups += 1
    return ups < len(parts) and ".." not in steps[ups:]


def _temporary() -> str:
    return f".atoll-{secrets.token_hex(8)}"


def _refuse_link(parent: int, name: str) -> None:
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise OSError("something that is no regular file is there already")


def write_beneath(
    parent: int, name: str, pieces: Iterable[bytes], mode: int = 0o644, mtime: float | None = None
) -> int:
    """Write a file into the directory `parent`: whole or not at all, never through a link that lies there."""
    _refuse_link(parent, name)
    temporary, written = _temporary(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | CLOSE_ON_EXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=parent)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            for piece in pieces:
                written += len(piece)
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) or 0 :]
            os.fchmod(descriptor, mode & 0o777)
            if mtime is not None:
                os.utime(descriptor, (mtime, mtime))
        os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        os.unlink(temporary, dir_fd=parent)
        raise
    return written


def write_local(path: str, pieces: Iterable[bytes], mode: int = 0o644) -> int:
    """`write_beneath` for a path of the caller's own choosing."""
    directory, name = os.path.split(os.path.abspath(path))
    if not name:
        raise InvalidArgument(f"{path} is a directory")
    parent = os.open(directory, os.O_RDONLY | _IS_DIRECTORY | CLOSE_ON_EXEC)
    try:
        return write_beneath(parent, name, pieces, mode)
    finally:
        os.close(parent)


def read_pieces(file: IO[bytes]) -> Iterator[bytes]:
    """A local file's content piece by piece."""
    while piece := file.read(PIECE):
        yield piece
