"""Answers of the runtimes' probes, shared by the homes of one run: an engine is tried out once, not once for every daemon.

A home that gets them behaves like one whose daemon has been restarted: an answer is believed while engine, kernel and our own
programs are the same. tests/backend has the tests of the probes themselves, which start with an empty home.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = "probes.json"
_place: list[Path] = []  # where the answers of this run are kept


def share_in(directory: Path) -> None:
    """Keep the answers in this directory, which all processes of the run have in common."""
    _place[:] = [directory / NAME]


def give(home: str | Path) -> None:
    """Put what is known into a home that has no answers yet."""
    if _place and (known := _read(_place[0])) and not Path(home, NAME).exists():
        Path(home).mkdir(parents=True, exist_ok=True)
        _write(Path(home, NAME), known)


def keep(home: str | Path) -> None:
    """Take over the answers of a home. Only those that say that an engine works: a failure is tried again."""
    found = {name: entry for name, entry in _read(Path(home, NAME)).items() if entry.get("works")}
    if _place and found.keys() - (known := _read(_place[0])).keys():
        _write(_place[0], {**known, **found})


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


def _write(path: Path, entries: dict[str, Any]) -> None:
    half = path.with_suffix(f".{os.getpid()}")
    half.write_text(json.dumps(entries))
    half.rename(path)
