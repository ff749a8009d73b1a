"""Published snapshot manifests: a name and the digests of its layers, for each owner.

A manifest is a list that its owner wrote down. It refers to no content here, so a digest in it gives
access to nothing. File names are hashes, so no name of a caller reaches the file system.
"""

import hashlib
import json
import os
import re
import threading
from pathlib import Path

from atoll.errors import Exhausted, InvalidArgument

MAX_LAYERS = 4096
MAX_MANIFESTS = 1000  # of one owner
_LAYER = re.compile(r"[0-9a-f]{64}")


class Manifests:
    """The manifests of this machine. Blocking; one daemon writes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writing = threading.Lock()

    def put(self, owner: str, name: str, layers: list[str]) -> None:
        """Write a manifest; an older one of the same owner and name is replaced."""
        if not 1 <= len(layers) <= MAX_LAYERS or not all(map(_LAYER.fullmatch, layers)):
            raise InvalidArgument(f"layers must be 1 to {MAX_LAYERS} SHA-256 digests in hex")
        with self._writing:
            path = self._path(owner, name)
            if not path.exists() and len(self.names(owner)) >= MAX_MANIFESTS:
                raise Exhausted(f"there are {MAX_MANIFESTS} manifests already", hint="delete one")
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            fresh = path.with_suffix(".new")
            with open(fresh, "w", opener=_private) as file:
                json.dump({"name": name, "layers": layers}, file)
                file.flush()
                os.fsync(file.fileno())
            fresh.rename(path)

    def get(self, owner: str, name: str) -> list[str] | None:
        try:
            kept = json.loads(self._path(owner, name).read_bytes())
        except FileNotFoundError:
            return None
        return [str(layer) for layer in kept["layers"]]

    def names(self, owner: str) -> list[str]:
        kept = self._owned(owner).glob("*.json")
        return sorted(str(json.loads(path.read_bytes())["name"]) for path in kept)

    def delete(self, owner: str, name: str) -> bool:
        """Remove a manifest; False when there is none."""
        path = self._path(owner, name)
        found = path.exists()
        path.unlink(missing_ok=True)
        return found

    def _owned(self, owner: str) -> Path:
        return self._directory / hashlib.sha256(owner.encode()).hexdigest()[:32]

    def _path(self, owner: str, name: str) -> Path:
        return self._owned(owner) / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
