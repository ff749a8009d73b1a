"""From an image's name to the layers a sandbox starts from."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from atoll.backends.contract import Rootfs


@dataclass(frozen=True)
class Chosen:
    """An image ready to start from, with the settings of its author that count."""

    name: str
    rootfs: Rootfs
    env: Mapping[str, str]
    user: str = ""
    workdir: str = ""


class Images(Protocol):
    """What core needs of images."""

    async def choose(self, name: str) -> Chosen: ...


class StoredImages:
    """Images of `atoll.images`: `host`, or what the store has or can pull."""

    def __init__(self, store: object) -> None:
        self._store = store

    async def choose(self, name: str) -> Chosen:
        return await asyncio.to_thread(self._choose, name)

    def _choose(self, name: str) -> Chosen:
        from atoll.images.store import ImageStore

        assert isinstance(self._store, ImageStore)
        if name == "host":
            host = self._store.host_image()
            rootfs = Rootfs(tuple(map(str, host.lowers)), tuple(map(str, host.usr_lowers)))
            return Chosen(host.name, rootfs, dict(host.env), host.user, host.workdir)
        image = self._store.find(name) or self._store.pull(name)
        return Chosen(image.name, Rootfs(tuple(map(str, image.lowers))), dict(image.env), image.user, image.workdir)
