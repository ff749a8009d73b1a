"""Unpacked layers on disk, each stored once under the digest of its content and shared by every image.

A layer is either wholly there or not at all: it is unpacked in a temporary directory, brought to disk, and renamed.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from atoll.errors import DiskFull, ImageError
from atoll.images.layers.decompress import LayerStream
from atoll.images.layers.limits import Limits
from atoll.images.layers.tree import (
    OverlayFlavour,
    overlay_flavour,
    remove_tree,
    sync_directory,
    sync_tree,
    write_atomically,
)
from atoll.images.layers.unpack import unpack_layer

_RESERVE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Layer:
    """One unpacked layer: where it is, how big, and what unpacking changed."""

    digest: str
    path: Path
    size: int
    notes: dict[str, int]


class LayerStore:
    """Layers below one directory: `layers/<hex>` is the tree, `layers/<hex>.json` describes it."""

    def __init__(self, root: Path, temporary: Path, limits: Limits) -> None:
        self._root = root
        self._temporary = temporary
        self._limits = limits
        self._known_flavour: OverlayFlavour | None = None

    @property
    def flavour(self) -> OverlayFlavour:
        if self._known_flavour is None:
            self._known_flavour = overlay_flavour(self._temporary)
        return self._known_flavour

    def get(self, digest: str) -> Layer | None:
        """The layer, if it is completely there."""
        path = self._path(digest)
        try:
            described = json.loads(path.with_name(f"{path.name}.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        if not path.is_dir():
            return None
        return Layer(digest, path, int(described["size"]), dict(described["notes"]))

    def has(self, digest: str) -> bool:
        return self._path(digest).is_dir()

    def add(
        self,
        source: BinaryIO,
        expected: str | None,
        progress: Callable[[int], None],
        amend: Callable[[Path], None] | None = None,
    ) -> Layer:
        """Unpack a layer whose content must have the digest `expected`; None takes what comes, as a local build does.

        `amend` may change the tree before it is stored; the digest stays that of the archive.
        """
        if shutil.disk_usage(self._temporary).free < _RESERVE_BYTES:
            raise DiskFull("no space left to unpack the image", hint="run `atoll image prune`")
        work = self._temporary / f"layer-{os.getpid()}-{os.urandom(8).hex()}"
        work.mkdir(mode=0o755)
        try:
            fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                report = unpack_layer(LayerStream(source, self._limits), fd, self.flavour, self._limits, progress)
            finally:
                os.close(fd)
            if expected is not None and report.digest != expected:
                raise ImageError(f"the layer's content does not have the digest {expected}")
            if amend is not None:
                amend(work)
            return self._commit(work, Layer(report.digest, self._path(report.digest), report.size, dict(report.notes)))
        finally:
            remove_tree(work)

    def _commit(self, work: Path, layer: Layer) -> Layer:
        os.chmod(work, os.stat(work).st_mode & 0o7777 | 0o555)
        sync_tree(work)
        described = {"digest": layer.digest, "size": layer.size, "notes": layer.notes}
        write_atomically(layer.path.with_name(f"{layer.path.name}.json"), json.dumps(described).encode())
        try:
            os.rename(work, layer.path)
        except OSError:
            existing = self.get(layer.digest)
            if existing is None:
                raise
            return existing  # another process was faster, with the same content
        sync_directory(self._root)
        return layer

    def digests(self) -> Iterator[str]:
        """Every layer on disk, complete or not."""
        for entry in os.scandir(self._root):
            if not entry.name.endswith(".json") and len(entry.name) == 64:
                yield f"sha256:{entry.name}"

    def remove(self, digests: Iterable[str]) -> int:
        """Remove layers and say how many bytes that gave back. A layer stops counting before its files go."""
        freed = 0
        for digest in digests:
            layer, path = self.get(digest), self._path(digest)
            grave = self._temporary / f"removed-{os.urandom(8).hex()}"
            try:
                os.rename(path, grave)
            except FileNotFoundError:
                continue
            path.with_name(f"{path.name}.json").unlink(missing_ok=True)
            remove_tree(grave)
            freed += layer.size if layer else 0
        return freed

    def _path(self, digest: str) -> Path:
        return self._root / digest.partition(":")[2]
