"""Which layers builds have made, by what they were made from. One file for each owner, the least used go first.

A key is a digest of the image before the step, of the step, and of every file and variable that goes into it. Owners do not
share: nobody can put a layer where somebody else's build finds it, or learn from a hit what others have built.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from atoll.images.layers.tree import write_atomically

MAX_STEPS = 4096  # of one owner


class _Fields(TypedDict):
    layer: str
    size: int
    image: str
    used: float


@dataclass(frozen=True, slots=True)
class Step:
    """A step's result: its layer, its size, and the image after it."""

    layer: str
    size: int
    image: str


class Cache:
    """The steps of one owner's builds."""

    def __init__(self, directory: Path, owner: str) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = directory / f"{hashlib.sha256(owner.encode()).hexdigest()[:32]}.json"
        self.owner = owner
        self._steps: dict[str, _Fields] = {}
        try:
            self._steps = json.loads(self._path.read_bytes())["steps"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass

    def get(self, key: str) -> Step | None:
        """Return a step's result, and count it as used."""
        found = self._steps.get(key)
        if found is None:
            return None
        found["used"] = time.time()
        return Step(found["layer"], found["size"], found["image"])

    def put(self, key: str, step: Step) -> None:
        self._steps[key] = {"layer": step.layer, "size": step.size, "image": step.image, "used": time.time()}

    @property
    def size(self) -> int:
        """Return the bytes of its layers, each counted once."""
        return sum({step["layer"]: step["size"] for step in self._steps.values()}.values())

    def images(self) -> frozenset[str]:
        return frozenset(step["image"] for step in self._steps.values())

    def shrink(self, most: int) -> list[str]:
        """Forget the least used steps until the rest takes at most so many bytes; return their images."""
        gone: list[str] = []
        for key, step in sorted(self._steps.items(), key=lambda item: item[1]["used"]):
            if self.size <= most and len(self._steps) <= MAX_STEPS:
                break
            del self._steps[key]
            gone.append(step["image"])
        kept = self.images()
        return [image for image in gone if image not in kept]

    def merge_and_shrink(self, most: int) -> list[str]:
        """Write down this build's steps beside those that another build has written meanwhile; return what had to go."""
        try:
            others = json.loads(self._path.read_bytes())["steps"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            others = {}
        self._steps = {**others, **self._steps}
        gone = self.shrink(most)
        self.save()
        return gone

    def save(self) -> None:
        write_atomically(self._path, json.dumps({"owner": self.owner, "steps": self._steps}).encode(), 0o600)


def load_all(directory: Path) -> Iterator[Cache]:
    """Yield the cache of every owner."""
    for path in sorted(directory.glob("*.json")) if directory.is_dir() else ():
        try:
            owner = json.loads(path.read_bytes())["owner"]
        except (ValueError, KeyError, TypeError):
            continue
        yield Cache(directory, str(owner))
