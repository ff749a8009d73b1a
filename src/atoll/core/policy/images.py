"""Core's seam to images: from a name, or from the program to be run, to the image a sandbox starts from."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, final

import msgspec

from atoll import config, errors
from atoll.backends import contract
from atoll.model import EntryBegun

if TYPE_CHECKING:
    from atoll.images import Allowlist, Catalog, Choice, HostImage, Image, ImageStore, Progress
    from atoll.images.image import ImageFields

HOST = "host"
INTERPRETER = "code-interpreter-v1"  # `host` with Jupyter kernels and packages for data
MADE_HERE = (HOST, INTERPRETER)  # of this machine's own files
AUTO = "auto"  # as an image's name: the one the program means
POD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KEPT = 64
DEFAULTS = config.Images()
LOOK_AGAIN = 5.0  # seconds after which the `host` image is compared with the machine again, beside the caller
STALE = 300.0  # and after which a caller waits for that

# A name, the program the image was detected for, and the owner for whom it is pulled when that is a key without rights.
Wish = tuple[str, str | None, str | None]


class Stage(TypedDict):
    """How far a pull or build is: `done` of `total` bytes, 0 when that is not known."""

    stage: str
    text: str
    done: int
    total: int


@final
class ImageStep(TypedDict):
    progress: Stage


class ImageDone(TypedDict):
    image: "ImageFields"


Step = ImageStep | EntryBegun  # on the way to a sandbox
Watcher = Callable[[Step], None]
WATCHER: ContextVar[Watcher | None] = ContextVar("image_watcher", default=None)  # is told how far a pull or build is


@dataclass(frozen=True)
class Chosen:
    """An image ready to start from, with the settings of its author that count."""

    name: str
    env: Mapping[str, str]
    user: str = ""
    workdir: str = ""
    digest: str = ""
    why: str = ""

    @property
    def reference(self) -> contract.Image:
        """Return the image as a backend takes it."""
        return contract.Image(self.name, self.digest)

    @property
    def is_host(self) -> bool:
        """It is the machine's own image."""
        return self.name == HOST


class Images(Protocol):
    """A chosen image, as core needs it. `program`: the image was detected for it, not named. `digest`: of a stopped sandbox's.
    `guest`: the owner of a key that may not use the operator's logins and networks."""

    room: Callable[[], int] | None  # how many bytes an image may take on the disk

    async def choose(
        self, name: str, program: str | None = None, digest: str | None = None, guest: str | None = None
    ) -> Chosen: ...


class StoredImages:
    """Images of `atoll.images` below one directory. The store is opened with the first use."""

    def __init__(self, store: "ImageStore | Path", settings: config.Images = DEFAULTS) -> None:
        self._given = store
        self._settings = settings
        self.room: Callable[[], int] | None = None
        self._store: ImageStore | None = None
        self._host: dict[Wish, tuple[float, Chosen]] = {}
        self._looking: dict[Wish, asyncio.Task[Chosen]] = {}
        self._watchers: dict[Wish, list[Watcher]] = {}

    # For sandboxes

    async def choose(
        self, name: str, program: str | None = None, digest: str | None = None, guest: str | None = None
    ) -> Chosen:
        """Comparing the `host` image with the machine costs more than starting a sandbox, so that happens behind the
        callers' back; all other answers are found anew each time."""
        if digest is not None:
            return await asyncio.to_thread(self._choose, name, program, guest, digest)
        wish = (name, program, None if name in MADE_HERE else guest)
        at, kept = self._host.get(wish, (-STALE, None))
        age = time.monotonic() - at
        if age >= LOOK_AGAIN and wish not in self._looking:
            self._looking[wish] = asyncio.create_task(self._look(wish))
        if kept is not None and age < STALE:
            return kept
        watcher = WATCHER.get()
        watchers = self._watchers.setdefault(wish, [])
        if watcher is not None:
            watchers.append(watcher)
        try:
            return await asyncio.shield(self._looking[wish])
        finally:
            if watcher is not None:
                watchers.remove(watcher)
            if not watchers:
                self._watchers.pop(wish, None)

    async def _look(self, wish: "Wish") -> Chosen:
        loop = asyncio.get_running_loop()

        def tell(told: ImageStep) -> None:
            for watcher in self._watchers.get(wish, ()):
                watcher(told)

        def step(progress: "Progress") -> None:
            loop.call_soon_threadsafe(tell, as_step(progress))

        try:
            found = await asyncio.to_thread(self._choose, *wish, None, step)
        except BaseException:
            self._host.pop(wish, None)  # the next caller waits and gets the reason
            raise
        finally:
            del self._looking[wish]
        if found.name in MADE_HERE:
            if len(self._host) > KEPT:
                self._host.clear()
            self._host[wish] = (time.monotonic(), found)
        else:
            self._host.pop(wish, None)
        return found

    def _choose(
        self,
        name: str,
        program: str | None,
        guest: str | None,
        digest: str | None,
        progress: "Callable[[Progress], None] | None" = None,
    ) -> Chosen:
        kept = self._again(name, digest) if digest else None
        if kept is not None:
            return self._chosen(kept, "the one it was made from")
        choice = self.obtain(name, program, progress, guest=guest)
        return self._chosen(choice.image, choice.why)

    def _chosen(self, image: "Image | HostImage", why: str) -> Chosen:
        """With variables for programs that would not look at this machine's certificate authorities."""
        from atoll.images.registry import authorities

        authority = self._settings.ca_file
        env = {**authorities.environment(Path(authority) if authority else None), **image.env}
        return Chosen(image.name, env, image.user, image.workdir, image.digest, why)

    def _again(self, name: str, digest: str) -> "Image | HostImage | None":
        """The very image a stopped sandbox was made from: its disk holds only what differs."""
        store = self.store
        return store.find_host_image(digest) or store.find(digest)

    def obtain(
        self,
        name: str,
        program: str | None = None,
        progress: "Callable[[Progress], None] | None" = None,
        guest: str | None = None,
    ) -> "Choice":
        """Find, pull or build it. Blocks; the operator's allowlist holds for every way here."""
        from atoll.images import Detection, detect, obtain

        catalog, allowlist = self.catalog, self.allowlist
        if name == AUTO:
            found = detect([program] if program else [], None, catalog)
        else:
            found = Detection(name, f"the image {name}", program or "", explicit=program is None)
        more: dict[str, Any] = {} if progress is None else {"progress": progress}
        if guest is not None:
            from atoll.images.registry.public import Guest

            more["guest"] = Guest(guest, self._settings.key_pull_mb << 20)
        more["prefer"] = self._settings.prefer
        return obtain(found, self.store, catalog, allowlist=allowlist, **more)

    # For people

    def detect(
        self, program: str, runtime: str = "", names: Sequence[str] = (), procfile: str = ""
    ) -> tuple[str, bool]:
        """The image a command means in a directory with these files, and whether it is only the default."""
        from atoll.images.detect import DEFAULT, Project, detect

        project = Project(runtime=runtime, names=names, procfile=procfile)
        found = detect([program] if program else [], project, self.catalog)
        return found.image_name, found.why == DEFAULT

    async def watch(
        self, work: "Callable[[Callable[[Progress], None]], Image | HostImage]"
    ) -> AsyncIterator[ImageStep | ImageDone]:
        """Pull or build in a thread: its steps as they come, the image last. Leaving gives it up."""
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[ImageStep | None] = asyncio.Queue()
        left = False

        def step(progress: "Progress") -> None:
            if left:
                raise errors.Cancelled("the caller went away")
            loop.call_soon_threadsafe(steps.put_nowait, as_step(progress))

        task = asyncio.ensure_future(asyncio.to_thread(work, step))
        task.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (item := await steps.get()) is not None:
                yield item
            yield {"image": task.result().to_json()}
        finally:
            left = True
            if not task.done():
                task.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def store(self) -> "ImageStore":
        if self._store is None:
            from atoll.images import ImageStore

            given, known = self._given, self._settings
            if isinstance(given, ImageStore):
                self._store = given
            else:
                authority = known.ca_file
                self._store = ImageStore(
                    given,
                    insecure_registries=known.insecure_registries,
                    ca_file=Path(authority) if authority else None,
                )
            self._store.room = self.room
        return self._store

    def allow_plain(self, registries: Iterable[str]) -> frozenset[str]:
        """Let images come from these without encryption; return those for which that is new."""
        fresh = frozenset(registries) - self.store.insecure
        self.store.insecure |= fresh
        return fresh

    def forbid_plain(self, registries: frozenset[str]) -> None:
        """Take that back."""
        if registries:
            self.store.insecure -= registries

    @property
    def catalog(self) -> "Catalog":
        from atoll.images import Catalog

        return Catalog.load(self._settings.custom)

    @property
    def allowlist(self) -> "Allowlist":
        from atoll.images import Allowlist

        allow = self._settings.allow
        return Allowlist.of(None if allow is msgspec.UNSET else allow)


def as_step(progress: "Progress") -> ImageStep:
    """Return a step as it is sent to callers."""
    stage: Stage = {"stage": progress.stage, "text": progress.text, "done": progress.done, "total": progress.total}
    return {"progress": stage}


class PodImages:
    """Images of a cluster's pools, which the cluster fetches. A name is passed on as it is; `auto` is the default pool's."""

    room: Callable[[], int] | None = None

    async def choose(
        self, name: str, program: str | None = None, digest: str | None = None, guest: str | None = None
    ) -> Chosen:
        return Chosen(HOST if name == AUTO else name, {"PATH": POD_PATH})
