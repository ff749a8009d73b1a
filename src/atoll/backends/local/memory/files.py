"""Where saved memories lie: one directory each, which appears whole or not at all.

    memories/<name>/sealed          everything below in one sealed file, or
    memories/<name>/state/...       what the runtime wrote, and
    memories/<name>/disk.img        the disk of the same moment, where one was kept

A save works in `<name>.new`. What a killed daemon leaves of one, the next daemon's sweep removes.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from atoll.backends.local.paths import ID, check_id
from atoll.errors import AlreadyExists, NotFound

STATE, DISK, SEALED = "state", "disk.img", "sealed"
HALF = ".new"


class Memories:
    """All saved memories of one home."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def begin(self, name: str) -> Path:
        """Make the directory that a save fills, and answer where it is."""
        self._root.mkdir(mode=0o711, exist_ok=True)
        self._root.chmod(0o711)  # the sandbox's own ids pass through to what is theirs
        half = self._root / f"{check_id(name)}{HALF}"
        if half.exists() or self.place(name).exists():
            raise AlreadyExists(f"there is a saved memory {name} already")
        half.mkdir(mode=0o711)
        half.chmod(0o711)
        (half / STATE).mkdir(mode=0o700)
        return half

    def finish(self, half: Path) -> None:
        """Give a filled directory its name; from here on the memory is there."""
        for file in half.rglob("*"):
            _sync(file)
        _sync(half)
        half.chmod(0o700)
        half.rename(half.with_name(half.name.removesuffix(HALF)))
        _sync(self._root)

    def place(self, name: str) -> Path:
        return self._root / check_id(name)

    def find(self, name: str) -> Path:
        """The directory of a saved memory; NotFound when there is none."""
        place = self.place(name)
        if not place.is_dir():
            raise NotFound(f"the saved memory {name} is gone", hint="remove the checkpoint; its files are not there")
        return place

    def forget(self, name: str) -> None:
        """Remove a saved memory, also one half saved. Its name goes first, so that a crash leaves no half of one."""
        place = self.place(name)
        half = place.with_name(f"{name}{HALF}")
        with suppress(FileNotFoundError):
            shutil.rmtree(half)
        with suppress(FileNotFoundError):
            place.rename(half)
            shutil.rmtree(half)

    def sweep(self, known: set[str]) -> list[str]:
        """Remove what nobody knows, and everything half saved; the names of what was removed."""
        with suppress(FileNotFoundError):
            found = {entry.removesuffix(HALF): entry for entry in sorted(os.listdir(self._root))}
            strays = [
                name for name, entry in found.items() if ID.fullmatch(name) and (name not in known or entry != name)
            ]
            for name in strays:
                if name in known:  # a save that was to replace nothing: only its half goes
                    shutil.rmtree(self._root / found[name], ignore_errors=True)
                else:
                    self.forget(name)
            return strays
        return []

    def used(self, name: str) -> int:
        """Bytes that it takes on the disk; 0 where there is none."""
        total = 0
        for file in self.place(name).rglob("*"):
            with suppress(FileNotFoundError):
                total += os.stat(file).st_blocks * 512
        return total


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
