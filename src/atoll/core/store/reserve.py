"""Room on the disk that belongs to the records alone, so that an ending can be written down when everything else is full.

Each record file has blocks of its own beyond its end (`Headroom`): nobody else can take them. A daemon that is not running
has no such file open, and SQLite removes its log when it is closed; for the next start there is one file of blank blocks
(`Ballast`) that is given up when the store does not open without it.
"""

import ctypes
import errno
import logging
import os
from pathlib import Path

log = logging.getLogger("atoll.reserve")

BALLAST = 24 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
_KEEP_SIZE = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def allocate(fd: int, end: int) -> None:
    """Give a file blocks up to `end` without changing its size. OSError when there are none."""
    if _libc.fallocate(fd, _KEEP_SIZE, 0, max(end, 1)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Headroom:
    """The blocks beyond the end of one file that is only ever appended to."""

    def __init__(self, fd: int, kept: int, step: int) -> None:
        self._fd = fd
        self._kept = kept  # bytes that only endings may use
        self._step = step  # what is asked for at once, so that an ordinary record rarely asks
        self._end = 0
        self.supported = True

    def moved(self, fd: int) -> None:
        """The file is another one from now on."""
        self._fd, self._end = fd, 0

    def take(self, size: int, more: int, *, ending: bool) -> None:
        """Make sure that `more` bytes fit behind `size`; OSError when they do not. What is kept is for endings."""
        if not self.supported or size + more + self._kept <= self._end:
            return
        wanted = size + more + self._kept + self._step
        try:
            allocate(self._fd, wanted)
            self._end = wanted
        except OSError as error:
            if error.errno not in FULL:
                self.supported = False  # a file system that cannot promise blocks: a write finds out by itself
                log.warning("no room can be kept for records on this file system: %s", error.strerror)
            elif not ending or size + more > self._end:
                raise

    def lost(self) -> None:
        """The file was cut, and its blocks beyond the end went with that."""
        self._end = 0


class Ballast:
    """A file of blank blocks in the home, for the start of a daemon on a full disk."""

    def __init__(self, home: Path) -> None:
        self._path = home / "reserve"

    def give_up(self) -> bool:
        """Whether there was something to give up."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        log.warning("the disk is full: the reserve for the store is in use now")
        return True

    def keep(self) -> None:
        """Take the room again, once there is plenty."""
        there = os.statvfs(self._path.parent)
        if self._path.exists() or there.f_bavail * there.f_frsize < 2 * BALLAST:
            return
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            allocate(fd, BALLAST)
        except OSError as error:
            log.warning("no reserve can be kept for the store: %s", error.strerror)
            self._path.unlink(missing_ok=True)
        finally:
            os.close(fd)
