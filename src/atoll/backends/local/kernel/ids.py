"""Ranges of user ids: each sandbox has 65536 of its own, far above real users, and never one that somebody else holds.

A range is held by a lock file named after it, machine-wide, so that two daemons never share one. The file says whose
it is: `<mark of the home>/<sandbox id>`. A stopped sandbox keeps its range, because its files carry it.
"""

import os
import random
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from atoll.errors import Exhausted

COUNT = 65536
FIRST = 0x1000_0000
LAST = 0x6FFF_0000
_TRIES = 4096


class IdRanges:
    """Takes and gives back ranges. Plain files: nothing to rebuild after a crash."""

    def __init__(self, directory: Path, mark: str) -> None:
        self._directory = directory
        self._mark = mark

    def take(self, box: str) -> int:
        """The base of a range that is free now."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        taken = _delegated()
        for _ in range(_TRIES):
            base = random.randrange(FIRST, LAST + 1, COUNT)
            if not any(start < base + COUNT and base < end for start, end in taken) and self.hold(base, box):
                return base
        raise Exhausted("no free range of user ids is left on this machine")

    def hold(self, base: int, box: str) -> bool:
        """Take this very range; true if it is now, or already was, held for that sandbox."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        name, owner = self._name(base), f"{self._mark}/{box}"
        with suppress(FileExistsError):
            os.symlink(owner, name)  # a link is made and filled in one step
            return True
        return _owner(name) == owner

    def release(self, box: str, base: int | None = None) -> None:
        """Give back what the sandbox holds; without the base all of them are looked through."""
        names: Iterable[Path] = [self._name(base)] if base is not None else self._all()
        for name in names:
            if _owner(name) == f"{self._mark}/{box}":
                name.unlink(missing_ok=True)

    def holders(self) -> set[str]:
        """Ids of our home's sandboxes that hold a range."""
        owners = (_owner(name).partition("/") for name in self._all())
        return {box for mark, _, box in owners if mark == self._mark}

    def _name(self, base: int) -> Path:
        return self._directory / f"{base:08x}"

    def _all(self) -> list[Path]:
        return sorted(self._directory.iterdir()) if self._directory.is_dir() else []


class OwnIds:
    """For a daemon that has few ids: all its sandboxes have all of them."""

    def take(self, box: str) -> int:
        return 0

    def hold(self, base: int, box: str) -> bool:
        return base == 0

    def release(self, box: str, base: int | None = None) -> None:
        pass

    def holders(self) -> set[str]:
        return set()


def _owner(name: Path) -> str:
    try:
        return os.readlink(name)
    except OSError:
        return ""


def _delegated() -> list[tuple[int, int]]:
    """Ranges the administrator gave to others."""
    ranges = []
    for path in ("/etc/subuid", "/etc/subgid"):
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.strip().split(":")
                if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
                    ranges.append((int(fields[1]), int(fields[1]) + int(fields[2])))
    return ranges
