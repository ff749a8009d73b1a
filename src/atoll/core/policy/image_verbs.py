"""The verbs of images: list, inspect, detect, pull, build, remove, prune."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, TypedDict

from atoll import errors
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.policy.images import AUTO, HOST, INTERPRETER, ImageDone, Images, ImageStep, StoredImages
from atoll.core.store.records import Store
from atoll.model import BuildImage, DetectImage, PullImage, Request

if TYPE_CHECKING:
    from atoll.images.image import ImageFields


class ListedImage(TypedDict):
    name: str
    digest: str
    source: str
    size: int
    created: str
    platform: str


class Known(TypedDict):
    """An image of the catalog."""

    name: str
    oci: str
    kind: str


class Listed(TypedDict):
    images: list[ListedImage]
    catalog: list[Known]
    disk_bytes: int


class Removed(TypedDict):
    removed: str
    bytes: int


class Pruned(TypedDict):
    images: list[str]
    layers: int
    bytes: int


class ImageVerbs(Part):
    def __init__(self, images: Images, store: Store, built: Callable[[], frozenset[str]] = frozenset) -> None:
        self._given = images
        self._records = store
        self._built = built  # digests of built images that must stay

    @verb("images.list")
    async def list(self, who: Principal) -> Listed:
        images = self._images()
        found = await asyncio.to_thread(lambda: [_shown(image.to_json()) for image in images.store.list()])
        catalog: list[Known] = [
            {"name": entry.name, "oci": entry.oci, "kind": entry.kind} for entry in images.catalog.images
        ]
        return {"images": found, "catalog": catalog, "disk_bytes": await asyncio.to_thread(images.store.disk_bytes)}

    @verb("images.inspect")
    async def inspect(self, who: Principal, name: str) -> "ImageFields":
        images = self._images()
        if name == HOST:
            return await asyncio.to_thread(lambda: images.store.host_image().to_json())
        if name == INTERPRETER and (made := await asyncio.to_thread(images.store.interpreter_image, may_fetch=False)):
            return made.to_json()
        entry = images.catalog.get(name)
        names = (entry.oci, name) if entry is not None else (name,)
        found = await asyncio.to_thread(lambda: next(filter(None, map(images.store.find, names)), None))
        if found is None:
            raise errors.NotFound(f"no local image {name!r:.120}", hint=f"get it with `atoll image pull {name:.120}`")
        return found.to_json()

    @verb("images.detect")
    async def detect(self, who: Principal, program: str) -> str | None:
        """Return the catalog's image for a command; None where the command alone means none."""
        image, is_default = await asyncio.to_thread(self._images().detect, program)
        return None if is_default else image

    @verb("images.detect_here")
    async def detect_here(self, who: Principal, asked: DetectImage) -> str:
        """Return the image for a command in a directory."""
        image, is_default = await asyncio.to_thread(
            self._images().detect, asked.program, asked.runtime, sorted(asked.names), asked.procfile
        )
        # For a program that nothing knows no image is fetched, which by its name it would be.
        return AUTO if is_default and asked.program else image

    @verb("images.pull")
    async def pull(self, who: Principal, asked: PullImage) -> AsyncIterator[ImageStep | ImageDone]:
        """Pull an image: how far it is, and the image last. Leaving gives it up."""
        images = self._images()
        entry = images.catalog.get(asked.name)
        images.allowlist.check(asked.name, images.catalog)
        if asked.name == INTERPRETER:
            async with aclosing(images.watch(images.store.built_interpreter)) as steps:  # type: ignore[type-var]
                async for step in steps:
                    yield step
            return
        name = entry.oci if entry is not None else asked.name
        work = images.watch(lambda step: images.store.pull(name, progress=step))
        async with aclosing(work) as steps:  # type: ignore[type-var]  # it is a generator
            async for step in steps:
                yield step

    @verb("images.build")
    async def build(self, who: Principal, asked: BuildImage) -> AsyncIterator[ImageStep | ImageDone]:
        """Build an image of Debian packages, telling as `pull` does."""
        images = self._images()
        work = images.watch(lambda step: images.store.build_debian(asked.name, asked.debian, step))
        async with aclosing(work) as steps:  # type: ignore[type-var]  # it is a generator
            async for step in steps:
                yield step

    @verb("images.remove")
    async def remove(self, who: Principal, asked: PullImage) -> Removed:
        """Remove an image's name, and the image with its last name."""
        images = self._images()
        entry = images.catalog.get(asked.name)
        name = entry.oci if entry is not None and images.store.find(entry.oci) is not None else asked.name
        freed = await asyncio.to_thread(images.store.remove, name, self._in_use())
        return {"removed": name, "bytes": freed}

    @verb("images.prune")
    async def prune(self, who: Principal, asked: Request) -> Pruned:
        """Remove what no name and no sandbox needs."""
        pruned = await asyncio.to_thread(self._images().store.prune, self._in_use())
        return {"images": list(pruned.images), "layers": pruned.layers, "bytes": pruned.bytes}

    def _images(self) -> StoredImages:
        if not isinstance(self._given, StoredImages):
            raise errors.Unsupported("this daemon has no image store")
        return self._given

    def _in_use(self) -> frozenset[str]:
        """Return the digests of the images that living and stopped sandboxes of every owner are made of."""
        found = frozenset(image for row in self._records.living() if (image := row["record"].get("image")))
        return found | self._built()


def _shown(image: "ImageFields") -> ListedImage:
    return {
        "name": image["name"],
        "digest": image["digest"],
        "source": image["source"],
        "size": image["size"],
        "created": image["created"],
        "platform": image["platform"],
    }
