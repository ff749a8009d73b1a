"""The verbs of builds: take a build's files, build an image from a Dockerfile, and what a build's caller is told meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from atoll import errors
from atoll.accounts import DISK, owner
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal, new_id
from atoll.core.builds.label import LABEL
from atoll.core.builds.uploads import Uploads
from atoll.core.policy.images import ImageDone, ImageStep, StoredImages, as_step
from atoll.model import BuildFile

if TYPE_CHECKING:
    from atoll.core import Core
    from atoll.images.build.cache import Cache
    from atoll.images.build.engine import Build, Built
    from atoll.images.progress import Progress

MAX_CONTEXT_FILES = 200_000
MAX_LOG = 100_000  # lines of a build that are passed on; what comes after is dropped
MAX_WAITING = 1000  # lines that wait for a slow caller; while they do, more are dropped
STEP = "build:"  # begins the name of an image that a build has so far


class Uploaded(TypedDict):
    context: str


class Builds(Part):
    """Every build, its cache, and the images that builds have so far."""

    def __init__(self, core: "Core", home: Path) -> None:
        self._core = core
        self._root = home / "builds"
        most = core.config.images.build_context_mb << 20
        self.uploads = Uploads(self._root / "uploads", core.accounts, core.sandboxes.space, most)
        self._running: dict[str, int] = {}  # by owner
        self._steps: dict[str, tuple[str, str]] = {}  # a name of a step's image: its owner and digest
        self._charged: dict[str, int] = {}  # bytes of each owner's cache
        self._caching: dict[str, asyncio.Lock] = {}
        self.resolvers: list[Callable[[Principal, str], str | None]] = []
        self.keepers: list[Callable[[], frozenset[str]]] = []  # digests of built images that are in use

    async def start(self) -> None:
        """Take over the caches, and end what an earlier daemon was building."""
        self.uploads.start()
        if left := list(self._root.glob("work-*")):
            from atoll.images.layers.tree import remove_tree

            for path in left:
                await asyncio.to_thread(remove_tree, path)
        if (self._root / "cache").is_dir():  # else nothing of images is needed yet
            from atoll.images.build.cache import load_all

            for cache in await asyncio.to_thread(lambda: list(load_all(self._root / "cache"))):
                with suppress(errors.Exhausted):  # of an operator who has lowered the cap: new builds are refused
                    self._core.accounts.charge(DISK, cache.size, owner(cache.owner))
                    self._charged[cache.owner] = cache.size
        for row in self._core.store.living():
            if LABEL in (row["spec"].get("labels") or {}):
                await self._core.sandboxes.end(row["id"], "destroyed", "its build ended with the daemon", "atoll")

    # The verbs

    @verb("images.upload")
    async def upload(self, who: Principal, pieces: AsyncIterator[bytes]) -> Uploaded:
        """Keep a build's files, a tar that may be compressed, until the build or for an hour."""
        return {"context": await self.uploads.take(who, pieces)}

    @verb("images.build_file")
    async def build(self, who: Principal, asked: BuildFile) -> AsyncIterator[ImageStep | ImageDone]:
        """Build an image, telling how far it is; the image last. Leaving gives it up."""
        from atoll.images.build.dockerfile import parse

        images = self._images()
        name = images.store.local_name(asked.name) if asked.name else ""
        path = self.uploads.find(who, asked.context)
        if path is None:
            raise errors.NotFound("the build's files are not here", hint="upload them first; they are kept for an hour")

        async def work(tell: "Callable[[Progress], None]") -> "Built":
            async with self.prepared(who, [("", path)], tell, asked.args, asked.runtime, asked.no_cache) as build:
                return await build.make(parse(asked.dockerfile), asked.target)

        try:
            async for item in self.watched(work):
                if isinstance(item, dict):
                    yield item
                    continue
                if name:
                    await asyncio.to_thread(images.store.keep, item.record, name)
                image = images.store.find(item.record.digest)
                assert image is not None
                yield {"image": {**image.to_json(), "name": name or image.digest}}
        finally:
            self.uploads.drop(who, asked.context)

    # For other builders

    async def watched(
        self, work: "Callable[[Callable[[Progress], None]], Awaitable[Built]]"
    ) -> "AsyncIterator[ImageStep | Built]":
        """Do a build: its steps as they come, then what came of it. Leaving gives it up and waits until nothing is left."""
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[ImageStep | None] = asyncio.Queue()
        lines = 0

        def tell(progress: "Progress") -> None:
            nonlocal lines
            lines += progress.stage == "log"
            if progress.stage != "log" or (lines <= MAX_LOG and steps.qsize() < MAX_WAITING):
                loop.call_soon_threadsafe(steps.put_nowait, as_step(progress))

        task = asyncio.ensure_future(work(tell))
        task.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (item := await steps.get()) is not None:
                yield item
            yield task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    @asynccontextmanager
    async def prepared(
        self, who: Principal, uploads: Sequence[tuple[str, Path]], tell: "Callable[[Progress], None]",
        args: dict[str, str], runtime: str, no_cache: bool = False,
    ) -> "AsyncIterator[Build]":  # fmt: skip
        """Make everything ready for one build, and clean up after it: its files, its place, its share of the cache."""
        from atoll.core.builds.steps import SandboxRunner
        from atoll.images.build.context import Context
        from atoll.images.build.engine import Build
        from atoll.images.layers.limits import Limits
        from atoll.images.layers.tree import remove_tree
        from atoll.images.progress import Progress

        images, settings = self._images(), self._core.config.images
        limits = Limits(unpacked_bytes=settings.build_context_mb << 20, entries=MAX_CONTEXT_FILES)
        directory = self._root / f"work-{new_id()}"
        build_id = new_id()
        with self._core.accounts.lease(DISK, 0, owner(who.owner)) as lease, self._place(who.owner):
            try:
                directory.mkdir(mode=0o700)
                context = Context(directory, limits, lease.grow)

                def read() -> None:
                    for prefix, path in uploads:
                        try:
                            file = open(path, "rb")  # noqa: SIM115
                        except FileNotFoundError:
                            raise errors.NotFound(
                                "files of this build are gone: they were uploaded anew meanwhile, or kept too long",
                                hint="upload them again",
                            ) from None
                        with file:
                            context.read(file, prefix)

                await self._core.workers.run(who.owner, read)
                async with asyncio.timeout(settings.build_timeout_s), self._cache(who.owner) as cache:
                    runner = SandboxRunner(
                        self._core, images, who, build_id, runtime,
                        log=lambda line: tell(Progress("log", line)), fetch=tell,
                    )  # fmt: skip
                    wide = replace(limits, unpacked_bytes=settings.build_disk_mb << 20, entries=500_000)
                    yield Build(
                        images.store, cache, runner, context, wide, args=args,
                        tell=lambda line: tell(Progress("step", line)), use_cache=not no_cache, grow=lease.grow,
                    )  # fmt: skip
            except TimeoutError:
                raise errors.Timeout(f"the build took longer than {settings.build_timeout_s:g} s") from None
            finally:
                self._forget_steps(who.owner)
                await asyncio.to_thread(remove_tree, directory)

    def digest_of(self, who: Principal, name: str) -> str | None:
        """Return the digest of a built image of the caller's by its inner name; None when it is no such name."""
        found = self._steps.get(name)
        if found is not None and found[0] == who.owner:
            return found[1]
        for resolve in self.resolvers:
            if (digest := resolve(who, name)) is not None:
                return digest
        if name.startswith(STEP):
            raise errors.NotFound("this image belonged to a build that is over")
        return None

    def name_step(self, who: Principal, digest: str) -> str:
        """Return a name under which the caller can start a sandbox of an image that a build has so far."""
        name = f"{STEP}{new_id()}"
        self._steps[name] = (who.owner, digest)
        return name

    def in_use(self) -> frozenset[str]:
        """Return the digests of built images that must stay."""
        return frozenset(digest for _, digest in self._steps.values()).union(*(keep() for keep in self.keepers))

    # Behind the verbs

    def _images(self) -> StoredImages:
        if not isinstance(self._core.images, StoredImages):
            raise errors.Unsupported("this daemon has no image store")
        return self._core.images

    def _forget_steps(self, whose: str) -> None:
        if self._running.get(whose, 0) <= 1:
            self._steps = {name: found for name, found in self._steps.items() if found[0] != whose}

    def _place(self, whose: str) -> "_Place":
        most = self._core.config.images.builds
        if self._running.get(whose, 0) >= most:
            raise errors.Exhausted(f"{most} builds of yours run already", hint="wait until one is done")
        return _Place(self._running, whose)

    @asynccontextmanager
    async def _cache(self, whose: str) -> "AsyncIterator[Cache]":
        """The owner's cache for one build; afterwards it is charged, made small enough, and written down."""
        from atoll.images.build.cache import Cache

        cache = await asyncio.to_thread(Cache, self._root / "cache", whose)
        try:
            yield cache
        finally:
            async with self._caching.setdefault(whose, asyncio.Lock()):
                await self._core.sandboxes.tasks.whole(self._settle(cache))

    async def _settle(self, cache: "Cache") -> None:
        most = self._core.config.images.build_cache_mb << 20
        cap = self._core.accounts.cap(DISK, owner(cache.owner))
        if cap is not None:
            held = self._core.accounts.held(DISK, owner(cache.owner)) - self._charged.get(cache.owner, 0)
            most = min(most, max(0, cap - held))
        gone = await asyncio.to_thread(cache.merge_and_shrink, most)
        if gone:
            in_use = self.in_use() | frozenset(
                image for row in self._core.store.living() if (image := row["record"].get("image"))
            )
            with suppress(errors.Unavailable):  # a pull is under way: `image prune` gets them
                await asyncio.to_thread(self._images().store.forget, gone, in_use)
        self._core.accounts.release(DISK, self._charged.pop(cache.owner, 0), owner(cache.owner))
        with suppress(errors.Exhausted):
            self._core.accounts.charge(DISK, cache.size, owner(cache.owner))
            self._charged[cache.owner] = cache.size


class _Place:
    """One of the builds that an owner may have at once."""

    def __init__(self, running: dict[str, int], whose: str) -> None:
        self._running = running
        self._whose = whose

    def __enter__(self) -> None:
        self._running[self._whose] = self._running.get(self._whose, 0) + 1

    def __exit__(self, *exc: object) -> None:
        self._running[self._whose] -= 1
        if not self._running[self._whose]:
            del self._running[self._whose]
