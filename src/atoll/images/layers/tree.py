"""Directory trees on disk that overlayfs stacks: deletion marks, durable writes, removal.

Everything here works on trees that may hold hostile names and modes, so it goes through directory descriptors and never
follows a link.
"""

import ctypes
import errno
import logging
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import Unsupported

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class OverlayFlavour:
    """The extended attributes that overlayfs reads: `trusted.` as real root, `user.` in a user namespace."""

    prefix: str

    def make_opaque(self, fd: int) -> None:
        """The directory hides everything lower layers have under its name."""
        os.setxattr(fd, f"{self.prefix}.overlay.opaque", b"y")

    def make_whiteout(self, name: bytes | str, parent: int) -> None:
        """The name does not exist, whatever lower layers say. Making this one device needs no privilege."""
        os.mknod(name, stat.S_IFCHR | 0o000, os.makedev(0, 0), dir_fd=parent)


def overlay_flavour(directory: Path) -> OverlayFlavour:
    """Find out by trying: only real root may set `trusted.` attributes."""
    probe = tempfile.mkdtemp(prefix="xattr-", dir=directory)
    try:
        for prefix in ("trusted", "user"):
            try:
                os.setxattr(probe, f"{prefix}.overlay.opaque", b"y")
                return OverlayFlavour(prefix)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                    raise
    finally:
        os.rmdir(probe)
    raise Unsupported(
        f"the file system of {directory} keeps no extended attributes, which image layers need",
        hint="set ATOLL_HOME to a directory on ext4, xfs or btrfs",
    )


def remove_entry(parent: int, name: bytes | str) -> None:
    """Remove one name below the open directory, with everything below it."""
    if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
        shutil.rmtree(name, dir_fd=parent)
    else:
        os.unlink(name, dir_fd=parent)


def remove_tree(path: Path) -> None:
    """Remove a tree; what cannot be removed is logged by name and left."""
    try:
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        try:
            remove_entry(parent, path.name)
        except PermissionError:
            _grant_owner(path)
            remove_entry(parent, path.name)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("left behind: %s (%s)", path, error.strerror)
    finally:
        os.close(parent)


def _grant_owner(path: Path) -> None:
    """A directory its owner may not write stops an ordinary user from emptying it."""
    for _, names, _, fd in os.fwalk(path, follow_symlinks=False):
        os.fchmod(fd, 0o700)
        for name in names:
            if stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode):
                os.chmod(name, 0o700, dir_fd=fd)


def sync_tree(path: Path) -> None:
    """Bring everything of the tree's file system to disk before a rename declares the tree complete."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed")
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """All of `data` under `path`, or what was there before: never a part."""
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name[:64]}-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_directory(path.parent)
