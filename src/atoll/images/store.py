"""The images of one user on disk: pull, build, find, list, remove.

    blobs/    downloads under way              images/   one record per complete image
    layers/   unpacked layers, by content      names/    what people call them
    host/     the machine's own image          tmp/      work in progress, worthless after a crash

Pulls and builds hold the store's lock shared, removal holds it alone: several processes can use one store, and none
ever sees half an image. All calls block; the daemon makes them in threads.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from atoll.errors import AtollError, FailedPrecondition, InvalidArgument, NotFound
from atoll.images.catalog import HOST, Catalog
from atoll.images.image import Image
from atoll.images.interpreter import image as interpreter
from atoll.images.layers.layers import Layer, LayerStore
from atoll.images.layers.limits import Limits
from atoll.images.layers.tree import remove_tree
from atoll.images.layers.written import add_written
from atoll.images.locks import file_lock
from atoll.images.progress import Progress, ProgressCallback, silent
from atoll.images.records import ImageRecord, Records
from atoll.images.registry.client import Registry
from atoll.images.registry.credentials import DockerConfig
from atoll.images.registry.platforms import Platform
from atoll.images.registry.public import ANONYMOUS, Guest, Quota
from atoll.images.registry.pull import pull
from atoll.images.registry.reference import Reference, is_digest
from atoll.images.sources import debian
from atoll.images.sources.host import HostImage, build_host_image, find_host_image, forget_host_images

_LOCAL_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_REMOVAL_SECONDS = 30.0
_BUILD_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """The images and bytes that `prune` removed."""

    images: tuple[str, ...]
    layers: int
    bytes: int


class ImageStore:
    """Everything about images below one directory."""

    def __init__(
        self,
        root: Path,
        *,
        credentials: DockerConfig | None = None,
        insecure_registries: Iterable[str] = (),
        ca_file: Path | None = None,
        limits: Limits | None = None,
        reserved_names: Collection[str] | None = None,
    ) -> None:
        self.root = root
        self._credentials = credentials
        self.insecure = set(insecure_registries)  # registries that may be spoken to without encryption
        self._ca_file = ca_file
        self.room: Callable[[], int] | None = None  # bytes that are free and promised to nobody; None: all that is free
        self._limits = limits or Limits()
        names = Catalog.load().names() if reserved_names is None else reserved_names
        self._reserved = frozenset(names) | {HOST, interpreter.NAME}
        for name in ("", "blobs", "layers", "images", "names", "host", "tmp"):
            (root / name).mkdir(mode=0o711, parents=True, exist_ok=True)
        self._lock = root / "lock"
        self._layers = LayerStore(root / "layers", root / "tmp", self._limits)
        self._records = Records(root / "images", root / "names")
        self._quota = Quota(root / "key-pulls.json")

    # getting images

    def pull(
        self,
        ref: str,
        platform: str | None = None,
        progress: ProgressCallback = silent,
        guest: Guest | None = None,
    ) -> Image:
        """Pull from a registry, also when a copy is here already: a tag may have moved.

        For a `guest` without a login, from public registries only, and no more than it may take."""
        reference = Reference.parse(ref)
        wanted = Platform.parse(platform) if platform else Platform.here()
        if guest is None:
            record = self._pull_within(reference, wanted, progress)
        else:
            record = self._pull_for(guest, reference, wanted, progress)
        progress(Progress("done", str(reference)))
        return self._image(str(reference), record)

    def _pull(
        self,
        reference: Reference,
        platform: Platform,
        progress: ProgressCallback,
        credentials: DockerConfig | None,
        limits: Limits,
        *,
        public: bool,
    ) -> ImageRecord:
        registry = Registry(
            reference,
            credentials=credentials,
            insecure=frozenset(self.insecure),
            ca_file=self._ca_file,
            limits=limits,
            public=public,
        )
        if self.room is not None:
            left = max(0, self.room())
            limits = replace(
                limits, unpacked_bytes=min(left, limits.unpacked_bytes), total_bytes=min(left, limits.total_bytes)
            )
        layers = self._layers if limits is self._limits else LayerStore(self.root / "layers", self.root / "tmp", limits)
        try:
            with file_lock(self._lock, shared=True):
                record = pull(reference, platform, registry, layers, self.root / "blobs", limits, progress)
                self._records.save(record, str(reference))
        finally:
            registry.close()
        return record

    def _pull_within(self, reference: Reference, platform: Platform, progress: ProgressCallback) -> ImageRecord:
        """Pull into the room there is. What a pull that failed has brought stays for the next one, unless it takes promised room."""
        before = set(self._layers.digests())
        try:
            return self._pull(reference, platform, progress, self._credentials, self._limits, public=False)
        except BaseException:
            if self.room is not None and self.room() <= 0:
                self._discard(before)
            raise

    def _pull_for(
        self, guest: Guest, reference: Reference, platform: Platform, progress: ProgressCallback
    ) -> ImageRecord:
        left = self._quota.begin(guest, lambda digest: self.find(digest) is not None)
        before, record = set(self._layers.digests()), None
        limits = replace(
            self._limits,
            download_bytes=min(left, self._limits.download_bytes),
            unpacked_bytes=min(left, self._limits.unpacked_bytes),
            total_bytes=left,
        )
        try:
            record = self._pull(reference, platform, progress, ANONYMOUS, limits, public=not guest.anywhere)
            return record
        finally:
            self._quota.end(guest, record.digest if record else None, record.size if record else 0)
            if record is None:
                self._discard(before)

    def _discard(self, before: set[str]) -> None:
        """Remove what a pull that failed has left. While another pull runs it stays, for `prune`."""
        with suppress(AtollError), file_lock(self._lock, seconds=_REMOVAL_SECONDS):
            self._layers.remove(digest for digest in self._unreferenced_layers() if digest not in before)
            for entry in os.scandir(self.root / "blobs"):
                os.unlink(entry.path)

    def build_debian(
        self,
        name: str,
        packages: Sequence[str],
        progress: ProgressCallback = silent,
        *,
        catalog_build: bool = False,
        variant: str = "minbase",
    ) -> Image:
        """Build an image of Debian packages from the machine's own package sources."""
        if _LOCAL_NAME.fullmatch(name) is None or len(name) > 63:
            raise InvalidArgument(
                f"not a name for a local image: {name!r}", hint="lower-case letters and digits, joined by . _ or -"
            )
        if name in self._reserved and not catalog_build:
            raise InvalidArgument(f"{name!r} is a name of the catalog; choose another for a local image")
        with file_lock(self._lock, shared=True):
            record = debian.build(packages, self._layers, progress, variant=variant)
            self._records.save(record, name)
        progress(Progress("done", name))
        return self._image(name, record)

    def host_image(self, *, extra_ca: Path | None = None) -> HostImage:
        """The machine's own image, prepared again only when something it is made of has changed."""
        with file_lock(self.root / "host" / "lock"):
            return build_host_image(self.root / "host", self._layers.flavour, extra_ca=extra_ca or self._ca_file)

    def find_host_image(self, digest: str) -> HostImage | None:
        """The very `host` image a stopped sandbox was made from, or one that adds to it, while it is kept."""
        found = find_host_image(self.root / "host", digest)
        return found or interpreter.find(
            self.root / "interpreter", digest, lambda at: find_host_image(self.root / "host", at)
        )

    def interpreter_image(self, progress: ProgressCallback = silent, *, may_fetch: bool = True) -> HostImage | None:
        """Return the image with Jupyter kernels, built on first use; None when it is not built and may not be."""
        host, root = self.host_image(), self.root / "interpreter"
        root.mkdir(mode=0o711, exist_ok=True)
        if not may_fetch and not interpreter.is_built(root):
            return None
        with file_lock(self._lock, shared=True), file_lock(root / "lock", seconds=_BUILD_SECONDS):
            return interpreter.build(root, host, self._layers.flavour, self._ca_file, progress)

    def built_interpreter(self, progress: ProgressCallback = silent) -> HostImage:
        """Return that image, built if it is not here."""
        image = self.interpreter_image(progress)
        assert image is not None
        return image

    # building images

    def add_layer(self, produce: Callable[[BinaryIO], None], limits: Limits) -> Layer:
        """Store the layer that `produce` writes as a tar, in a thread of its own. A half written one is not kept."""
        left = limits.unpacked_bytes if self.room is None else min(limits.unpacked_bytes, max(0, self.room()))
        layers = LayerStore(self.root / "layers", self.root / "tmp", replace(limits, unpacked_bytes=left))
        with file_lock(self._lock, shared=True):
            return add_written(layers, produce)

    def has_layer(self, digest: str) -> bool:
        """Return whether a layer is completely here."""
        return self._layers.get(digest) is not None

    def keep(self, record: ImageRecord, *names: str) -> None:
        """Write down a built image, with or without names; NotFound when one of its layers has gone meanwhile."""
        with file_lock(self._lock, shared=True):
            if not self._is_complete(record):
                raise NotFound("a layer of the image was removed while it was built", hint="build it again")
            if names or self._records.by_digest(record.digest) is None:
                self._records.save(record, *names)

    def record(self, digest: str) -> ImageRecord | None:
        """Return what is written down of an image that is completely here."""
        found = self._records.by_digest(digest)
        return found if found is not None and self._is_complete(found) else None

    def stack(self, layers: Sequence[str], host: str = "") -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """Return the directories of `/` and, on the machine's own image, those of `/usr`, top-most first."""
        root = self.root / "layers"
        own = tuple(dict.fromkeys(root / digest.partition(":")[2] for digest in reversed(layers)))
        if not host:
            return own, ()
        below = self.find_host_image(host)
        if below is None:
            raise NotFound("the machine's own image that this one was built on is gone", hint="build it again")
        usr = tuple(path / "usr" for path in own if (path / "usr").is_dir() and not (path / "usr").is_symlink())
        return (*own, *below.lowers), (*usr, *below.usr_lowers)

    def local_name(self, name: str) -> str:
        """Return the name under which a built image is kept."""
        if _LOCAL_NAME.fullmatch(name) is not None and len(name) <= 63:
            if name in self._reserved:
                raise InvalidArgument(f"{name!r} is a name of the catalog; choose another for a local image")
            return name
        return str(Reference.parse(name))

    def forget(self, digests: Iterable[str], in_use: Collection[str]) -> None:
        """Remove built images that nothing names or uses any more, and their layers."""
        with file_lock(self._lock, seconds=_REMOVAL_SECONDS):
            kept = set(self._records.names().values()) | set(in_use)
            for digest in digests:
                found = self._records.by_digest(digest) if digest not in kept else None
                if found is not None and found.source == "built":
                    self._records.forget_image(digest)
            self._layers.remove(self._unreferenced_layers())

    # finding images

    def find(self, name: str) -> Image | None:
        """A local image by local name, digest or reference; None if it is not here."""
        if is_digest(name):
            return self._checked(name, self._records.by_digest(name))
        found = self._records.by_name(name)
        if found is not None or name == HOST:
            return self._checked(name, found)
        reference = Reference.parse(name)
        return self._checked(str(reference), self._records.by_name(str(reference)) or self._by_pinned(reference))

    def resolve(self, name: str) -> Image:
        """Like `find`, but an image that is not here is an error."""
        image = self.find(name)
        if image is None:
            raise NotFound(f"no local image {name!r}", hint=f"get it with `atoll image pull {name}`")
        return image

    def inspect(self, name: str) -> Image:
        return self.resolve(name)

    def list(self) -> tuple[Image, ...]:
        """Every named image, sorted by name."""
        named = ((name, self._records.by_digest(digest)) for name, digest in self._records.names().items())
        return tuple(self._image(name, record) for name, record in named if record and self._is_complete(record))

    def disk_bytes(self) -> int:
        """Bytes of all unpacked layers, shared ones counted once."""
        found = (self._layers.get(digest) for digest in self._layers.digests())
        return sum(layer.size for layer in found if layer is not None)

    # removing images

    def remove(self, name: str, in_use: Collection[str] = ()) -> int:
        """Remove a name, and its image if nothing else names it; bytes given back.

        `in_use` are the digests of images that sandboxes, running or stopped, are made of.
        """
        with file_lock(self._lock, seconds=_REMOVAL_SECONDS):
            image = self.resolve(name)
            if image.digest in in_use:
                raise FailedPrecondition(
                    f"the image {name!r} is in use", hint="remove the sandboxes made from it first"
                )
            for known, digest in self._records.names().items():
                if known == image.name or (image.name == image.digest == digest):
                    self._records.forget_name(known)
            if image.digest not in self._records.names().values():
                self._records.forget_image(image.digest)
            return self._layers.remove(self._unreferenced_layers())

    def prune(self, in_use: Collection[str] = ()) -> Pruned:
        """Remove images without a name, layers without an image, and what crashes and old downloads left."""
        with file_lock(self._lock, seconds=_REMOVAL_SECONDS):
            kept = set(self._records.names().values()) | set(in_use)
            hosts = {record.host for record in self._records.images() if record.digest in kept}
            nameless = [record.digest for record in self._records.images() if record.digest not in kept]
            for digest in nameless:
                self._records.forget_image(digest)
            orphans = self._unreferenced_layers()
            freed = self._layers.remove(orphans)
            for entry in os.scandir(self.root / "blobs"):
                freed += entry.stat(follow_symlinks=False).st_size
                os.unlink(entry.path)
            for entry in os.scandir(self.root / "tmp"):
                remove_tree(Path(entry.path))
            with file_lock(self.root / "host" / "lock"):
                used = frozenset((*in_use, *hosts))
                interpreter.forget(self.root / "interpreter", used)
                forget_host_images(self.root / "host", used | interpreter.hosts_of(self.root / "interpreter", used))
            return Pruned(tuple(nameless), len(orphans), freed)

    def _unreferenced_layers(self) -> tuple[str, ...]:
        referenced = {layer for record in self._records.images() for layer in record.layers}
        return tuple(digest for digest in self._layers.digests() if digest not in referenced)

    def _by_pinned(self, reference: Reference) -> ImageRecord | None:
        """A digest names the same content under every tag, whether it is the image's or its index's."""
        if reference.digest is None:
            return None
        for record in self._records.images():
            if reference.digest in (record.digest, record.index_digest):
                return record
        return None

    def _checked(self, name: str, record: ImageRecord | None) -> Image | None:
        """An image only if all of it is still on disk."""
        return self._image(name, record) if record is not None and self._is_complete(record) else None

    def _is_complete(self, record: ImageRecord) -> bool:
        return all(self._layers.has(digest) for digest in record.layers)

    def _image(self, name: str, record: ImageRecord) -> Image:
        settings = record.settings
        root = self.root / "layers"
        return Image(
            name=name,
            digest=record.digest,
            # overlayfs refuses a directory that is listed twice; the top-most occurrence hides the others anyway
            lowers=tuple(dict.fromkeys(root / digest.partition(":")[2] for digest in reversed(record.layers))),
            env=settings.env,
            user=settings.user,
            workdir=settings.workdir,
            entrypoint=settings.entrypoint,
            cmd=settings.cmd,
            size=record.size,
            created=record.created,
            source=record.source,
            platform=record.platform,
            notes=record.notes,
        )
