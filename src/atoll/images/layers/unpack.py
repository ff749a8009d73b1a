"""Unpacks one image layer into a directory, in the form overlayfs stacks.

The archive is attacker input. Every path is walked from a directory descriptor, one component at a time, never through
a link; nothing is written outside the target, no device, fifo or socket is made, set-id bits are cleared, extended
attributes are dropped, and `/dev`, `/proc` and `/sys` can only be directories, which stay empty because the runtime
mounts over them (CVE-2026-41579 and its family). A layer that tries any of the tricks is refused as a whole.

Deletions are kept as overlayfs has them: a 0/0 character device hides a name, an attribute makes a directory opaque.
"""

import errno
import os
import stat
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll import tar_reader as tar
from atoll.errors import DiskFull, ImageError
from atoll.images.layers.decompress import LayerStream
from atoll.images.layers.limits import Limits
from atoll.images.layers.tree import OverlayFlavour

_MAX_ID = 65535
_SQUASHED_ID = 65534
_WHITEOUT = b".wh."
_AUFS = b".wh..wh."
_OPAQUE = b".wh..wh..opq"
_KERNEL_DIRS = frozenset({b"dev", b"proc", b"sys"})
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_TIME = float(1 << 33)
_SPARE_DIRECTORIES = 16

Path_ = tuple[bytes, ...]


@dataclass(slots=True)
class LayerReport:
    """The result of unpacking: totals, and how often something was left out or changed."""

    digest: str = ""
    entries: int = 0
    size: int = 0
    notes: Counter[str] = field(default_factory=Counter)


def unpack_layer(
    stream: LayerStream,
    target: int,
    flavour: OverlayFlavour,
    limits: Limits,
    progress: Callable[[int], None] = lambda consumed: None,
) -> LayerReport:
    """Unpack `stream` into the empty directory open as `target`; the caller throws the directory away on any error."""
    layer = _Layer(stream, target, flavour, limits)
    try:
        for entry in layer.reader.entries():
            layer.add(entry)
            progress(stream.consumed)
        stream.drain()
        layer.finish()
        progress(stream.consumed)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull("no space left to unpack the image", hint="run `atoll image prune`") from error
        raise ImageError(f"the layer cannot be unpacked: {error.strerror or error}") from error
    finally:
        layer.close()
    layer.report.digest = stream.digest
    return layer.report


class _Layer:
    def __init__(self, stream: LayerStream, target: int, flavour: OverlayFlavour, limits: Limits) -> None:
        self.reader = tar.TarReader(stream.read)
        self.report = LayerReport()
        self._root = target
        self._flavour = flavour
        self._limits = limits
        self._open: OrderedDict[Path_, int] = OrderedDict()
        self._whiteouts: set[Path_] = set()
        self._directories: dict[Path_, tuple[int, float]] = {}

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def add(self, entry: tar.Entry) -> None:
        self.report.entries += 1
        if self.report.entries > self._limits.entries:
            raise ImageError(f"the layer has more than {self._limits.entries} entries")
        path = self._components(entry.name)
        if not path:
            self._add_root(entry)
        elif self._is_kernel_path(path, entry):
            self.report.notes["entries below /dev, /proc or /sys left out"] += 1
        elif any(part.startswith(_WHITEOUT) for part in path):
            self._add_whiteout(path)
        else:
            self._add_plain(path, entry)

    def finish(self) -> None:
        """Directory modes and times last, deepest first: filling a directory needs the one and changes the other."""
        for path, (mode, mtime) in sorted(self._directories.items(), key=lambda item: -len(item[0])):
            fd = self._directory(path)
            os.fchmod(fd, mode)
            os.utime(fd, (mtime, mtime))

    # paths

    def _components(self, name: bytes) -> Path_:
        if name.startswith(b"/"):
            raise ImageError(f"the layer has an absolute path: {_shown(name)}")
        parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
        if b".." in parts:
            raise ImageError(f"the layer has a path that climbs out: {_shown(name)}")
        limits = self._limits
        if len(parts) > limits.depth or len(name) > limits.path_bytes or any(len(part) > 255 for part in parts):
            raise ImageError(f"the layer has a path that is too long or too deep: {_shown(name)}")
        return parts

    def _is_kernel_path(self, path: Path_, entry: tar.Entry) -> bool:
        if path[0] not in _KERNEL_DIRS:
            return False
        if len(path) == 1 and entry.kind != tar.DIRECTORY:
            raise ImageError(f"the image has a /{path[0].decode()} that is not a directory")
        return len(path) > 1

    def _directory(self, path: Path_) -> int:
        """A descriptor of the directory at `path`, made where missing, reached without following any link."""
        if not path:
            return self._root
        fd = self._open.get(path)
        if fd is not None:
            self._open.move_to_end(path)
            return fd
        parent = self._directory(path[:-1])
        try:
            fd = os.open(path[-1], _DIR_FLAGS, dir_fd=parent)
        except FileNotFoundError:
            self._make_directory(path, parent)
            fd = os.open(path[-1], _DIR_FLAGS, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            if path not in self._whiteouts:
                raise ImageError(f"the layer writes through a link or file: {_shown(b'/'.join(path))}") from error
            self._make_directory(path, parent)
            fd = os.open(path[-1], _DIR_FLAGS, dir_fd=parent)
        self._remember(path, fd)
        return fd

    def _remember(self, path: Path_, fd: int) -> None:
        self._open[path] = fd
        if len(self._open) > _SPARE_DIRECTORIES + 2 * self._limits.depth:
            _, oldest = self._open.popitem(last=False)
            os.close(oldest)

    # entries

    def _add_root(self, entry: tar.Entry) -> None:
        if entry.kind != tar.DIRECTORY:
            raise ImageError("the layer has a root that is not a directory")
        self._own(self._root, entry)
        os.fchmod(self._root, entry.mode & 0o1777 | 0o500)

    def _make_directory(self, path: Path_, parent: int) -> None:
        """A new directory; over a whiteout of the same layer it hides what lower layers have, so it is opaque."""
        hidden = path in self._whiteouts
        if hidden:
            os.unlink(path[-1], dir_fd=parent)
            self._whiteouts.discard(path)
        os.mkdir(path[-1], 0o755, dir_fd=parent)
        if hidden:
            fd = os.open(path[-1], _DIR_FLAGS, dir_fd=parent)
            try:
                self._flavour.make_opaque(fd)
            finally:
                os.close(fd)

    def _add_plain(self, path: Path_, entry: tar.Entry) -> None:
        if entry.kind in (tar.CHARACTER, tar.BLOCKDEV, tar.FIFO):
            self.report.notes["device nodes and fifos left out"] += 1
            return
        parent = self._directory(path[:-1])
        if entry.kind == tar.DIRECTORY:
            self._add_directory(path, parent, entry)
            return
        self._clear(path, parent)
        if entry.kind == tar.REGULAR:
            self._add_file(path[-1], parent, entry)
        elif entry.kind == tar.SYMLINK:
            self._add_symlink(path[-1], parent, entry)
        else:
            self._add_hardlink(path, parent, entry)

    def _clear(self, path: Path_, parent: int) -> None:
        """Remove what an earlier entry of this layer put there: the last one wins."""
        try:
            found = os.lstat(path[-1], dir_fd=parent)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(found.st_mode):
            raise ImageError(f"the layer replaces a directory by a file: {_shown(b'/'.join(path))}")
        self._whiteouts.discard(path)
        os.unlink(path[-1], dir_fd=parent)

    def _add_directory(self, path: Path_, parent: int, entry: tar.Entry) -> None:
        try:
            found = os.lstat(path[-1], dir_fd=parent)
            if not stat.S_ISDIR(found.st_mode) and path not in self._whiteouts:
                os.unlink(path[-1], dir_fd=parent)
        except FileNotFoundError:
            pass
        fd = self._directory(path)
        self._own(fd, entry)
        self._directories[path] = (self._mode(entry, 0o1777), _clamp(entry.mtime))

    def _add_file(self, name: bytes, parent: int, entry: tar.Entry) -> None:
        fd = os.open(name, _FILE_FLAGS, 0o600, dir_fd=parent)
        try:
            for chunk in self.reader.chunks():
                _write_all(fd, chunk)
            self._own(fd, entry)
            os.fchmod(fd, self._mode(entry, 0o777))
            os.utime(fd, (_clamp(entry.mtime),) * 2)
        finally:
            os.close(fd)
        self.report.size += entry.size

    def _add_symlink(self, name: bytes, parent: int, entry: tar.Entry) -> None:
        if not entry.link or len(entry.link) >= self._limits.path_bytes:
            raise ImageError(f"the layer has a link with an impossible target: {_shown(entry.name)}")
        os.symlink(entry.link, name, dir_fd=parent)
        uid, gid = self._ids(entry)
        self._chown(lambda: os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False))
        os.utime(name, (_clamp(entry.mtime),) * 2, dir_fd=parent, follow_symlinks=False)

    def _add_hardlink(self, path: Path_, parent: int, entry: tar.Entry) -> None:
        """A second name for a file of this very layer; it cannot reach a link's target or another layer."""
        source = self._components(entry.link.lstrip(b"/"))
        if not source or source == path:
            raise ImageError(f"the layer has a hard link to itself: {_shown(entry.name)}")
        try:
            source_parent = self._existing_directory(source[:-1])
            found = os.lstat(source[-1], dir_fd=source_parent)
        except FileNotFoundError:
            raise ImageError(f"the layer has a hard link to a file it does not contain: {_shown(entry.link)}") from None
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            raise ImageError(f"the layer has a hard link to something that is not a file: {_shown(entry.link)}")
        parent = self._directory(path[:-1])
        os.link(source[-1], path[-1], src_dir_fd=source_parent, dst_dir_fd=parent, follow_symlinks=False)

    def _existing_directory(self, path: Path_) -> int:
        """Like `_directory`, for reading: nothing is made, and a missing component is FileNotFoundError."""
        for depth in range(1, len(path) + 1):
            if path[:depth] in self._open:
                continue
            parent = self._directory(path[: depth - 1])
            found = os.lstat(path[depth - 1], dir_fd=parent)
            if not stat.S_ISDIR(found.st_mode):
                raise ImageError(f"the layer has a hard link through a link or file: {_shown(b'/'.join(path))}")
        return self._directory(path)

    # deletions

    def _add_whiteout(self, path: Path_) -> None:
        *above, name = path
        if any(part.startswith(_AUFS) for part in above) or (name.startswith(_AUFS) and name != _OPAQUE):
            self.report.notes["leftovers of an old storage driver left out"] += 1
            return
        if any(part.startswith(_WHITEOUT) for part in above):
            raise ImageError(f"the layer has an entry below a deletion mark: {_shown(b'/'.join(path))}")
        parent_path = tuple(above)
        if name == _OPAQUE:
            self._flavour.make_opaque(self._directory(parent_path))
            return
        hidden = name[len(_WHITEOUT) :]
        if hidden in (b"", b".", b".."):
            raise ImageError(f"the layer has a deletion mark for an impossible name: {_shown(b'/'.join(path))}")
        target = (*parent_path, hidden)
        if len(target) == 1 and hidden in _KERNEL_DIRS:
            return
        parent = self._directory(parent_path)
        try:
            found = os.lstat(hidden, dir_fd=parent)
        except FileNotFoundError:
            self._flavour.make_whiteout(hidden, parent)
            self._whiteouts.add(target)
            return
        # The mark speaks of lower layers: what this layer itself brings stays, but no longer merges with them.
        if stat.S_ISDIR(found.st_mode):
            self._flavour.make_opaque(self._directory(target))

    # ownership and mode

    def _mode(self, entry: tar.Entry, keep: int) -> int:
        if entry.mode & 0o6000:
            self.report.notes["set-id bits cleared"] += 1
        return entry.mode & keep

    def _ids(self, entry: tar.Entry) -> tuple[int, int]:
        if entry.uid > _MAX_ID or entry.gid > _MAX_ID:
            self.report.notes[f"owners above {_MAX_ID} given to {_SQUASHED_ID}"] += 1
        return (
            entry.uid if entry.uid <= _MAX_ID else _SQUASHED_ID,
            entry.gid if entry.gid <= _MAX_ID else _SQUASHED_ID,
        )

    def _own(self, fd: int, entry: tar.Entry) -> None:
        uid, gid = self._ids(entry)
        self._chown(lambda: os.fchown(fd, uid, gid))

    def _chown(self, change: Callable[[], None]) -> None:
        """In a user namespace with a single id no other owner exists; the file then stays ours."""
        try:
            change()
        except OSError as error:
            single = error.errno == errno.EINVAL or (error.errno == errno.EPERM and os.geteuid() != 0)
            if not single:
                raise
            self.report.notes["owners not kept: this user has no ids to give"] += 1


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _clamp(mtime: float) -> float:
    return mtime if 0 <= mtime <= _MAX_TIME else 0.0


def _shown(name: bytes) -> str:
    """A hostile name, safe to print."""
    return repr(os.fsdecode(name[:200]))[1:-1]
