"""Differences between Linux, where sandboxes run, and systems that only talk to a gateway there."""

from __future__ import annotations

import os
import select
import sys

from ..errors import Unsupported

CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0)
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def is_linux() -> bool:
    return sys.platform == "linux"


def require_linux() -> None:
    """Raise Unsupported where no sandbox can run."""
    if not is_linux():
        raise Unsupported(
            f"sandboxes run on Linux, and this is {sys.platform}: it has the client alone",
            hint="name a gateway on a Linux machine: --endpoint HOST:50051, or ATOLL_ENDPOINT",
        )


def lock(descriptor: int) -> None:
    """Wait for the lock of an open file. It is let go when the descriptor is closed."""
    try:
        import fcntl
    except ImportError:
        _lock_first_byte(descriptor)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _lock_first_byte(descriptor: int) -> None:
    """The lock of a system without flock. It waits ten seconds for another holder, then raises OSError."""
    try:
        import msvcrt
    except ImportError:
        return  # neither: two calls at once may both write; the file is replaced in one step all the same
    msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined]


def wait_ready(descriptor: int, timeout: float | None, *, write: bool = False) -> tuple[bool, bool, bool]:
    """Whether a socket can be read, can be written, and is broken or closed. All are False after the time."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if write else 0))
        events = poll.poll(None if timeout is None else timeout * 1000)
        seen = events[0][1] if events else 0
        over = select.POLLHUP | select.POLLERR | select.POLLNVAL
        return bool(seen & select.POLLIN), bool(seen & select.POLLOUT), bool(seen & over)
    readable, writable, broken = select.select([descriptor], [descriptor] if write else [], [descriptor], timeout)
    return bool(readable), bool(writable), bool(broken)
