"""Space of the home's file system: what is free, and what of it is promised already.

A disk is a sparse file: it takes what is written and may grow to its size. What it may still grow by is promised to it, from
create to the end of the sandbox, also while it is stopped. A create, a snapshot, an image or kept output gets only what is free
beyond all promises and a reserve.

A size that was asked for, and every disk of a key, is promised in full. The default size of a local user's sandbox is a ceiling
nobody asked for: it counts with one part in `overcommit`, so that many small uses fit on an ordinary machine.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from atoll.core.store.typed import SandboxRow
from atoll.errors import DiskFull

log = logging.getLogger("atoll.space")

RESERVE = 256 << 20  # the host keeps this much: a full host under a sparse file is an I/O error inside
FRESH = 1.0  # seconds for which a look at the disk is good enough for small things

Used = Callable[[str], int | None]


class Promise(NamedTuple):
    size: int
    thin: bool  # a default size of the local user's: a ceiling, not a promise in full


class Space:
    def __init__(self, home: Path, overcommit: float, used: Used) -> None:
        self._home = home
        self._overcommit = overcommit
        self._used = used  # what the disk of a sandbox takes now; None where this backend keeps none on the home
        self._promises: dict[str, Promise] = {}
        self._looked = (-FRESH, 0)

    def load(self, row: SandboxRow) -> int:
        """Take over the promise to a sandbox that an earlier daemon made, and answer its size."""
        promise = _promised(row)
        if self._used(row["id"]) is None:
            return 0
        self._promises[row["id"]] = promise
        return promise.size

    def promise(self, row: SandboxRow) -> int:
        """Promise a new sandbox its disk, and answer its size; DiskFull when there is not that much left."""
        sandbox, wanted = row["id"], _promised(row)
        if (used := self._used(sandbox)) is None:
            return 0
        free, promised = self._free(), self._promised()
        need = self._weight(wanted, used)
        if free - promised - RESERVE < need:
            raise DiskFull(
                f"a disk of {wanted.size >> 20} MB does not fit: {free >> 20} MB are free on the host, "
                f"{promised >> 20} MB of them are promised to other sandboxes and {RESERVE >> 20} MB stay free",
                hint="ask for a smaller --disk, destroy sandboxes, or free space below ATOLL_HOME",
                details={"free_mb": free >> 20, "promised_mb": promised >> 20, "reserve_mb": RESERVE >> 20},
            )
        self._promises[sandbox] = wanted
        return wanted.size

    def hold(self, volume: str, size: int) -> None:
        """Promise a volume its whole size; `forget` takes that back."""
        self._promises[volume] = Promise(size, thin=False)

    def forget(self, sandbox: str) -> None:
        self._promises.pop(sandbox, None)

    def left(self) -> int:
        """Bytes that are free and promised to nobody."""
        return self._free() - self._promised() - RESERVE

    def left_lately(self) -> int:
        """As `left`, as it was a moment ago at most: for what is written in many small pieces."""
        at, left = self._looked
        if time.monotonic() - at >= FRESH:
            left = self.left()
            self._looked = (time.monotonic(), left)
        return left

    def check(self, size: int, what: str) -> None:
        """DiskFull when so many more bytes would take what is promised or reserved."""
        if size > self.left():
            raise DiskFull(
                f"the host has no room for {what}: what is free is promised to sandboxes",
                hint="destroy sandboxes, delete snapshots or images, or free space below ATOLL_HOME",
            )

    def _free(self) -> int:
        there = os.statvfs(self._home)
        return there.f_bavail * there.f_frsize

    def _promised(self) -> int:
        """Return by how much all disks may still grow."""
        return sum(self._weight(promise, self._used(box) or 0) for box, promise in list(self._promises.items()))

    def _weight(self, promise: Promise, used: int) -> int:
        growth = max(0, promise.size - used)
        return int(growth / self._overcommit) if promise.thin else growth


def _promised(row: SandboxRow) -> Promise:
    held = row["record"].get("limits", {}).get("disk_mb")
    limit = held["value"] if held is not None and held["value"] else 0
    asked = (row["spec"].get("limits") or {}).get("disk_mb") is not None
    return Promise(int(limit) << 20, thin=not asked and row["owner"].startswith("uid:"))
