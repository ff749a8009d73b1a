"""Default limits that this host cannot hold: said once on stderr, and again when they are others than the last time."""

from __future__ import annotations

import os

from ..client.spawn import home_directory
from .output import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_WORDS = {"cpus": "CPU", "memory_mb": "memory", "pids": "processes", "disk_mb": "disk", "files": "open files"}


def note_unheld(names: Iterable[str]) -> None:
    """One asked for would have been refused; these are defaults, and dropped."""
    text = ", ".join(word for name, word in _WORDS.items() if name in set(names))
    told = os.path.join(home_directory(), "unheld-limits")
    try:
        with open(told, encoding="ascii") as file:
            if file.read() == text:
                return
    except OSError:
        pass  # not told yet
    try:
        with open(told, "w", encoding="ascii") as file:
            file.write(text)
    except OSError:
        pass  # then it is told again
    say(f"atoll: this host does not hold the default limits for {text}; `atoll doctor` says why (this is said once)")
