"""From an image's reference to the directories of this machine that a sandbox is stacked from."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.backends.contract import Image
from atoll.errors import NotFound

if TYPE_CHECKING:
    from atoll.images import ImageStore

KEPT = 64


@dataclass(frozen=True, slots=True)
class Rootfs:
    """The read-only directories a sandbox starts from, top-most first."""

    lowers: tuple[str, ...]
    usr: tuple[str, ...] = ()  # a stack of its own for /usr: the machine's, in the `host` image


FindLayers = Callable[[Image], Awaitable[Rootfs]]


class Layers:
    """Finds images of the store below one directory by their digest.

    `ca_file` has the operator's certificate authorities, which every image gets with this machine's name server.
    """

    def __init__(self, root: Path, ca_file: Path | None = None) -> None:
        self._root = root
        self._ca_file = ca_file
        self._store: ImageStore | None = None
        self._host: dict[str, Rootfs] = {}  # images of the machine itself, by digest

    async def __call__(self, image: Image) -> Rootfs:
        """Return the directories of an image; NotFound when it is not on this machine any more."""
        kept = self._host.get(image.digest)
        if kept is not None and all(map(os.path.isdir, (*kept.lowers, *kept.usr))):
            return kept
        return await asyncio.to_thread(self._find, image)

    def _find(self, image: Image) -> Rootfs:
        from atoll.images.sources import site

        store = self._opened()
        if (host := store.find_host_image(image.digest)) is not None:
            found = Rootfs(tuple(map(str, host.lowers)), tuple(map(str, host.usr_lowers)))
            if len(self._host) >= KEPT:
                self._host.clear()
            self._host[image.digest] = found
            return found
        stored = store.find(image.digest)
        if stored is None:
            raise NotFound(
                f"the image {image.name!r:.120} is not on this machine any more",
                hint=f"get it with `atoll image pull {image.name:.120}`",
            )
        record = store.record(image.digest)
        if record is not None and record.host:
            stack, usr = store.stack(record.layers, record.host)
            return Rootfs(tuple(map(str, stack)), tuple(map(str, usr)))
        # Only the `host` image has this machine's name server and certificate authorities in itself.
        top = site.layer(self._root / "site", self._ca_file)
        return Rootfs((str(top), *map(str, stored.lowers)))

    def _opened(self) -> "ImageStore":
        if self._store is None:
            from atoll.images import ImageStore

            self._store = ImageStore(self._root, reserved_names=())
        return self._store
