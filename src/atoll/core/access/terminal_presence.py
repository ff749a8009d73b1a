"""Find who is at the other end of a local connection: a person at a terminal, or a program, and which.

An agent and its user have the same uid. What tells them apart is the kernel's session and the controlling terminal of the
calling process. A program that drives a terminal of its own from a process of its own can pretend; SECURITY.md says so.
"""

import errno
import os
import re
import select
import time
from contextvars import ContextVar
from typing import NamedTuple

PEER_PID: ContextVar[int] = ContextVar("atoll-peer-pid", default=0)  # of a local caller, set by the door; 0 is unknown

SHOW_SECONDS = 10.0
_BRACKETS = ("⟨", "⟩")
_SPLIT = re.compile("([⟨⟩])")
_DEEPEST = 64
_PTS_MAJOR = range(136, 144)
_CONSOLE_MAJOR = 4


class _Process(NamedTuple):
    parent: int
    session: int
    terminal: int


def _look(pid: int) -> _Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Process(int(fields[1]), int(fields[3]), int(fields[4]) & 0xFFFFFFFF)


def sessions(pid: int) -> frozenset[int]:
    """The session of a process, and those of its ancestors that have a terminal: all that it can act as."""
    found, process = set(), _look(pid)
    if process is None:
        return frozenset()
    found.add(process.session)
    for _ in range(_DEEPEST):
        process = _look(process.parent) if process.parent > 1 else None
        if process is None:
            break
        if process.terminal:
            found.add(process.session)
    return frozenset(found)


def terminal(pid: int) -> str | None:
    """The device of its controlling terminal."""
    process = _look(pid)
    if process is None or not process.terminal:
        return None
    number = process.terminal
    major, minor = (number >> 8) & 0xFFF, (number & 0xFF) | ((number >> 12) & 0xFFF00)
    if major in _PTS_MAJOR:
        path = f"/dev/pts/{(major - _PTS_MAJOR.start) * 256 + minor}"
    elif major == _CONSOLE_MAJOR and 0 < minor < 64:
        path = f"/dev/tty{minor}"
    else:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return path if status.st_rdev == os.makedev(major, minor) else None


def show(path: str, text: str) -> None:
    """Write all of it on somebody's terminal without taking it over, or fail. Waits a while for a slow one: call it in a thread.

    All but plain ASCII is written as escapes; the two brackets around what was made visible are the exception."""
    left = b"".join(
        part.encode() if part in _BRACKETS else part.encode("ascii", "backslashreplace") for part in _SPLIT.split(text)
    )
    fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        until = time.monotonic() + SHOW_SECONDS
        while left:
            try:
                left = left[os.write(fd, left[:2048]) :]
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TimeoutError(errno.ETIMEDOUT, "it does not take what is to be shown") from None
                select.select([], [fd], [], 0.2)
    finally:
        os.close(fd)
