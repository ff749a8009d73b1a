"""Locks between threads and processes that use one image store."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import Unavailable

_POLL_SECONDS = 0.05


@contextmanager
def file_lock(path: Path, *, shared: bool = False, seconds: float | None = None) -> Iterator[None]:
    """Hold a lock on `path`, which the kernel drops if we die. With `seconds`, give up after that long."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _acquire(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, seconds)
        yield
    finally:
        os.close(fd)


def _acquire(fd: int, kind: int, seconds: float | None) -> None:
    if seconds is None:
        fcntl.flock(fd, kind)
        return
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Unavailable("the image store is busy: an image is being pulled or built") from None
            time.sleep(_POLL_SECONDS)
