"""Templates: an owner's named images with tags, builds of them in the background, and the program that each starts.

A template is known by its id, its name, or either with `:tag`. A tag is a finished build. Builds that no tag names are
forgotten with their images when the next build ends.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from atoll import errors
from atoll.accounts import DISK, MEMORY, Lease, owner
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal, new_id
from atoll.core.builds.verbs import Uploaded
from atoll.model import TAG, BuildTemplate, CreateSandbox, ExecSpec, LimitsSpec, NewTemplate, SandboxInfo

if TYPE_CHECKING:
    from atoll.core import Core
    from atoll.images.build.engine import Built
    from atoll.images.progress import Progress

log = logging.getLogger("atoll.templates")

IMAGE = "template:"  # begins the name of a template's image, inside core
DEFAULT = "default"
MOST, MOST_TAGS, MOST_BUILDS = 200, 50, 20  # templates of an owner, tags and unfinished or failed builds of a template
MAX_LINES, MAX_LOG = 5000, 512 << 10  # of one build's log
READY_S = 300.0  # for a start command to become ready
LOOK_AGAIN = 0.5


class Line(msgspec.Struct):
    """A line of a build's log."""

    at: float
    message: str
    level: str = "info"


class TemplateBuild(msgspec.Struct):
    """One build of a template. `steps` of an error say which step it was."""

    id: str
    created_at: float
    status: str = "waiting"  # then building, ready or error
    digest: str = ""
    size: int = 0
    start: str = ""
    ready: str = ""
    user: str = "user"
    workdir: str = "/home/user"
    cpus: float | None = None
    memory_mb: int | None = None
    error: str = ""
    step: str = ""


class Template(msgspec.Struct):
    """A template as it is stored."""

    id: str
    name: str
    created_at: float
    builds: dict[str, TemplateBuild] = {}
    tags: dict[str, str] = {}  # to builds


class _Shelf(msgspec.Struct):
    owner: str
    templates: dict[str, Template] = {}


class _Log:
    """What a build has said, charged to its owner until it is forgotten."""

    def __init__(self, lease: Lease) -> None:
        self.lines: list[Line] = []
        self.lease = lease
        self._size = 0

    def add(self, message: str, level: str = "info") -> None:
        self._size += len(message) + 100
        if len(self.lines) < MAX_LINES and self._size < MAX_LOG:
            self.lines.append(Line(time.time(), message, level))


class Templates(Part):
    """Every template, each seen by its owner alone."""

    def __init__(self, core: "Core", home: Path) -> None:
        self._core = core
        self._directory = home / "builds" / "templates"
        self._shelves: dict[str, _Shelf] = {}
        self._logs: dict[str, _Log] = {}  # by build
        self._tasks: dict[str, asyncio.Task[None]] = {}
        core.builds.resolvers.append(self._resolve)
        core.builds.keepers.append(self._in_use)

    def start(self) -> None:
        """Read what an earlier daemon has stored; builds that it had not finished have failed."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._directory.glob("*.json"):
            try:
                shelf = msgspec.convert(json.loads(path.read_bytes()), _Shelf)
            except (ValueError, msgspec.ValidationError) as error:
                log.error("templates in %s cannot be read: %s", path.name, error)
                continue
            self._shelves[shelf.owner] = shelf
            for template in shelf.templates.values():
                for build in template.builds.values():
                    if build.status in ("waiting", "building"):
                        build.status, build.error = "error", "the build ended with the daemon"
                    with contextlib.suppress(errors.Exhausted):
                        self._core.accounts.charge(DISK, build.size, owner(shelf.owner))

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=30)

    # The verbs

    @verb("templates.begin")
    async def begin(self, who: Principal, asked: NewTemplate) -> tuple[Template, TemplateBuild]:
        """A place for a build of a template, which is new or known by this name."""
        shelf = self._shelf(who)
        template = next((one for one in shelf.templates.values() if one.name == asked.name), None)
        if template is None:
            if len(shelf.templates) >= MOST:
                raise errors.Exhausted(f"{MOST} templates of yours are kept already", hint="delete one first")
            template = Template(new_id(), asked.name, time.time())
            shelf.templates[template.id] = template
        self._forget_builds(who.owner, template, MOST_BUILDS - 1)
        build = TemplateBuild(str(uuid.uuid4()), time.time(), cpus=asked.cpus, memory_mb=asked.memory_mb)
        template.builds[build.id] = build
        await self._save(shelf)
        return template, build

    @verb("templates.upload")
    async def upload(self, who: Principal, pieces: AsyncIterator[bytes], name: str) -> Uploaded:
        """Keep files of a step under the digest that the builder gave them."""
        return {"context": await self._core.builds.uploads.take(who, pieces, name)}

    @verb("templates.build")
    async def build(self, who: Principal, ref: str, build_id: str, asked: BuildTemplate) -> None:
        """Begin the build; `status` tells what becomes of it."""
        template, build = self.get(who, ref, build_id)
        if build.status != "waiting" or build.id in self._tasks:
            raise errors.FailedPrecondition("this build has begun already", hint="begin another one")
        from atoll.core.builds.template_steps import instructions

        steps, uploads = instructions(asked, lambda name: self._base(who, name))
        found = []
        for name in uploads:
            path = self._core.builds.uploads.find(who, name)
            if path is None:
                raise errors.NotFound(f"the files {name:.70} are not here", hint="upload them again")
            found.append((name, path))
        while len(self._logs) and sum(1 for one in self._logs if one in self._builds_of(who)) >= MOST_BUILDS:
            self._drop_log(next(one for one in self._logs if one in self._builds_of(who)))
        lease = self._core.accounts.lease(MEMORY, MAX_LOG, owner(who.owner))
        self._logs[build.id] = _Log(lease)
        build.status, build.start, build.ready = "building", asked.start, asked.ready
        tags = asked.tags or [DEFAULT]
        task = self._core.sandboxes.tasks.spawn(self._work(who, template, build, steps, found, tags, asked.force))
        self._tasks[build.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(build.id, None))

    @verb("templates.list")
    async def list(self, who: Principal) -> list[Template]:
        return sorted(self._shelf(who).templates.values(), key=lambda one: one.created_at)

    @verb("templates.get")
    async def find(self, who: Principal, ref: str) -> tuple[Template, TemplateBuild | None]:
        """A template by id or name, and the build that its tag names; None for the build when the tag is none of it."""
        name, _, tag = ref.partition(":")
        name = name.rpartition("/")[2]
        template = next((one for one in self._shelf(who).templates.values() if name in (one.id, one.name)), None)
        if template is None:
            raise errors.NotFound(f"template {ref!r:.80} was not found")
        return template, template.builds.get(template.tags.get(tag or DEFAULT, ""))

    @verb("templates.tag")
    async def tag(self, who: Principal, ref: str, tags: Sequence[str]) -> TemplateBuild:
        """Name a finished build with more tags."""
        template, build = await self.find(who, ref)
        if build is None or build.status != "ready":
            raise errors.NotFound(f"template {ref!r:.80} has no such build")
        self._tag(template, build, tags)
        await self._save(self._shelf(who))
        return build

    @verb("templates.untag")
    async def untag(self, who: Principal, ref: str, tags: Sequence[str]) -> None:
        """Take tags away. A build without one is forgotten."""
        template, _ = await self.find(who, ref)
        for tag in tags:
            template.tags.pop(tag, None)
        self._forget_builds(who.owner, template, 0)
        await self._save(self._shelf(who))

    @verb("templates.remove")
    async def remove(self, who: Principal, ref: str) -> None:
        """Remove a template with all its builds. Sandboxes made of it go on."""
        template, _ = await self.find(who, ref)
        for build in template.builds:
            if (task := self._tasks.get(build)) is not None:
                task.cancel()
        template.tags.clear()
        self._forget_builds(who.owner, template, 0)
        shelf = self._shelf(who)
        del shelf.templates[template.id]
        await self._save(shelf)

    def get(self, who: Principal, ref: str, build_id: str) -> tuple[Template, TemplateBuild]:
        """Return a build of a template, finished or not."""
        template = self._shelf(who).templates.get(ref)
        build = template.builds.get(build_id) if template is not None else None
        if template is None or build is None:
            raise errors.NotFound(f"template {ref!r:.80} has no build {build_id!r:.80}")
        return template, build

    def lines(self, build: str, offset: int, most: int) -> Sequence[Line]:
        """Return lines of a build's log."""
        found = self._logs.get(build)
        return found.lines[offset : offset + most] if found is not None else []

    @verb("templates.create")
    async def create(self, who: Principal, ref: str, spec: CreateSandbox) -> SandboxInfo:
        """Make a sandbox of a template; its start command runs and is ready when this returns."""
        template, build = await self.find(who, ref)
        if build is None or build.status != "ready":
            raise errors.NotFound(f"template {ref!r:.80} has no finished build of this tag")
        limits = msgspec.structs.replace(
            spec.limits, cpus=spec.limits.cpus or build.cpus, memory_mb=spec.limits.memory_mb or build.memory_mb
        )
        spec = msgspec.structs.replace(spec, image=f"{IMAGE}{template.id}/{build.id}", limits=limits)
        info = await self._core.sandboxes.create(who, spec)
        try:
            await self._begin_program(who, info.id, build)
        except BaseException:
            end = self._core.sandboxes.end(info.id, "destroyed", "its start command did not become ready", who.owner)
            await self._core.sandboxes.tasks.whole(end)
            raise
        return info

    # Behind the verbs

    async def _work(
        self, who: Principal, template: Template, build: TemplateBuild, steps: Any, uploads: Sequence[tuple[str, Path]],
        tags: Sequence[str], force: bool,
    ) -> None:  # fmt: skip
        said = self._logs[build.id]

        def tell(progress: "Progress") -> None:
            if progress.stage in ("step", "log"):
                said.add(progress.text)

        async def work() -> "Built":
            async with self._core.builds.prepared(who, uploads, tell, {}, "auto", force) as one:
                return await one.make(steps)

        try:
            made = await work()
            build.digest, build.size = made.record.digest, made.new_bytes
            build.user, build.workdir = made.record.settings.user, made.record.settings.workdir
            if build.start:
                said.add("starting the start command")
                await self._try_program(who, template, build)
            _check_tags(template, tags)  # before anything is charged
            self._core.accounts.charge(DISK, build.size, owner(who.owner))
            build.status = "ready"
            self._tag(template, build, tags)
            said.add("the template is ready")
        except errors.AtollError as error:
            line = error.details.get("line")
            build.step = "" if line is None else str(line) if 0 < int(line) <= MAX_LINES else "base"
            build.error = error.message.replace(f"line {line}: ", "", 1) if line is not None else error.message
            build.digest, build.size = "", 0
            said.add(build.error, "error")
            build.status = "error"
        except asyncio.CancelledError:
            build.status, build.error, build.digest, build.size = "error", "the build was given up", "", 0
            raise
        except Exception:
            log.exception("build %s of a template failed", build.id)
            build.status, build.error, build.digest, build.size = "error", "the build failed inside the daemon", "", 0
        finally:
            self._tasks.pop(build.id, None)  # over: its records can go
            there = template.id in self._shelf(who).templates
            self._forget_builds(who.owner, template, MOST_BUILDS if there else 0)
            await self._core.sandboxes.tasks.whole(self._save(self._shelf(who)))

    async def _try_program(self, who: Principal, template: Template, build: TemplateBuild) -> None:
        spec = CreateSandbox(
            image=f"{IMAGE}{template.id}/{build.id}", lifetime_s=READY_S + 300,
            limits=LimitsSpec(cpus=build.cpus, memory_mb=build.memory_mb),
        )  # fmt: skip
        info = await self._core.sandboxes.create(who, spec)
        try:
            await self._begin_program(who, info.id, build)
        finally:
            end = self._core.sandboxes.end(info.id, "destroyed", "", who.owner)
            await self._core.sandboxes.tasks.whole(end)

    async def _begin_program(self, who: Principal, sandbox: str, build: TemplateBuild) -> None:
        """Run the start command, and wait until the ready command ends with 0."""
        if not build.start:
            return

        def spec(command: str) -> ExecSpec:
            argv = ["/bin/bash", "-l", "-c", command]
            return ExecSpec(argv=argv, user=build.user or None, cwd=build.workdir, timeout_ms=0)

        await self._core.commands.spawn(who, sandbox, spec(build.start))
        try:
            async with asyncio.timeout(READY_S):
                while build.ready:
                    done = await self._core.commands.exec(who, sandbox, spec(build.ready))
                    if done.exit_code == 0:
                        return
                    await asyncio.sleep(LOOK_AGAIN)
        except TimeoutError:
            raise errors.BuildFailed(
                f"the template never became ready: its ready command did not end with 0 within {READY_S:.0f} s"
            ) from None

    def _base(self, who: Principal, name: str) -> str | None:
        """Return the image of one of the caller's templates; None when it has none of this name."""
        plain, _, tag = name.partition(":")
        for template in self._shelf(who).templates.values():
            if plain in (template.id, template.name):
                build = template.builds.get(template.tags.get(tag or DEFAULT, ""))
                return f"{IMAGE}{template.id}/{build.id}" if build is not None else None
        return None

    def _resolve(self, who: Principal, name: str) -> str | None:
        """Return the digest of a template's image by its inner name."""
        if not name.startswith(IMAGE):
            return None
        template, _, build = name.removeprefix(IMAGE).partition("/")
        found = self._shelf(who).templates.get(template)
        known = found.builds.get(build) if found is not None else None
        if known is None or not known.digest:
            raise errors.NotFound("the template of this sandbox is gone")
        return known.digest

    def _tag(self, template: Template, build: TemplateBuild, tags: Sequence[str]) -> None:
        _check_tags(template, tags)
        for tag in tags:
            template.tags[tag] = build.id

    def _forget_builds(self, whose: str, template: Template, most: int) -> None:
        """Forget the oldest builds that no tag names and that do not run, until so many are left."""
        spare = [
            one
            for one in sorted(template.builds.values(), key=lambda one: one.created_at)
            if one.id not in template.tags.values() and one.id not in self._tasks
        ]
        for build in spare[: max(0, len(spare) - most)]:
            del template.builds[build.id]
            self._core.accounts.release(DISK, build.size, owner(whose))
            self._drop_log(build.id)

    def _drop_log(self, build: str) -> None:
        found = self._logs.pop(build, None)
        if found is not None:
            found.lease.end()

    def _builds_of(self, who: Principal) -> set[str]:
        return {build for one in self._shelf(who).templates.values() for build in one.builds}

    def _in_use(self) -> frozenset[str]:
        return frozenset(
            build.digest
            for shelf in self._shelves.values()
            for template in shelf.templates.values()
            for build in template.builds.values()
            if build.digest
        )

    def _shelf(self, who: Principal) -> _Shelf:
        return self._shelves.setdefault(who.owner, _Shelf(who.owner))

    async def _save(self, shelf: _Shelf) -> None:
        from atoll.images.layers.tree import write_atomically

        path = self._directory / f"{hashlib.sha256(shelf.owner.encode()).hexdigest()[:32]}.json"
        data = msgspec.json.encode(shelf)
        await asyncio.to_thread(write_atomically, path, data, 0o600)


Resolve = Callable[[str], str | None]


def _check_tags(template: Template, tags: Sequence[str]) -> None:
    """Refuse tags that are none, or too many."""
    for tag in tags:
        if not TAG.match(tag):
            raise errors.InvalidArgument(f"{tag!r:.80} is no tag: 1 to 63 letters, digits, `_`, `.` or `-`")
    if len({*template.tags, *tags}) > MOST_TAGS:
        raise errors.Exhausted(f"a template has at most {MOST_TAGS} tags", hint="take some away")
