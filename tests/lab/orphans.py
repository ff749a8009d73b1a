"""What a dead agent leaves behind: its orphans become children of this process, where they can be found, killed and counted."""

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 60.0
_before: set[int] | None = None  # children that were there when gathering began; None while it is not on


@contextmanager
def gathered() -> Iterator[None]:
    """Orphans come here meanwhile; at the end nothing that was started in between may be left."""
    global _before
    assert _before is None, "one at a time"
    libc = ctypes.CDLL(None, use_errno=True)
    _before = set(_children(os.getpid()))
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
        deadline = time.monotonic() + PATIENCE
        while left := strangers(set()):
            assert time.monotonic() < deadline, [(pid, _words(pid)) for pid in left]
            time.sleep(0.02)
    finally:
        _before = None
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def strangers(known: set[int]) -> list[int]:
    """Living children that lead a session of their own, as agents and all that agents start do; not the known ones."""
    if _before is None:
        return []
    found = []
    for pid in set(_children(os.getpid())) - known - _before:
        stat = _stat(pid)
        if not stat or int(stat[3]) == os.getsid(0):
            continue
        if stat[0] == "Z":
            _reap(pid)
        else:
            found.append(pid)
    return found


def tree(pid: int) -> list[int]:
    """The process and its descendants."""
    return [pid, *(one for child in _children(pid) for one in tree(child))]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _stat(pid: int) -> list[str]:
    """The fields after the name: state, parent, group, session and so on; nothing of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
