"""The order of a build: stages, steps, layers from the cache or made anew, and the image at the end.

RUN is somebody else's: `Runner` starts a sandbox of the image so far and hands back what changed in it. Everything else
happens here, in layers that nobody can reach. A step that fails leaves the layers before it in the cache, and nothing else.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, BinaryIO, Protocol, TypeVar

from atoll.errors import AtollError, BuildFailed, InvalidArgument
from atoll.images.build import stages as staging
from atoll.images.build.cache import Cache, Step
from atoll.images.build.context import Context, Node
from atoll.images.build.copying import Copier, Copy, Source, directory_layer, find_owner
from atoll.images.build.dockerfile import Instruction, heredoc_marks, is_only_heredoc, without_heredocs
from atoll.images.build.tree import Tree
from atoll.images.build.variables import expand, expand_plain, words
from atoll.images.image import DEFAULT_PATH, Settings, check_user, check_workdir
from atoll.images.layers.limits import Limits
from atoll.images.records import ImageRecord
from atoll.images.registry.platforms import Platform
from atoll.images.store import ImageStore

SHELL = ("/bin/sh", "-c")
MAX_ENV = 128 << 10  # bytes of all variables
Produce = Callable[[BinaryIO], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """One RUN: the image so far, and what to run in a sandbox of it."""

    image: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    user: str
    workdir: str
    line: int


class Runner(Protocol):
    """What a build needs from those who know sandboxes and registries."""

    async def base(self, name: str) -> str: ...  # the digest of the image of this name, fetched if it may be

    async def run(self, step: Run) -> Produce: ...  # writes the layer of what changed

    async def finish(self) -> None: ...  # what `run` has left for its layer goes

    async def in_thread(self, work: Callable[[], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class State:
    """An image under construction."""

    layers: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)
    host: str = ""  # the `host` image below the layers, if it is made on that
    author: Mapping[str, Any] = field(default_factory=dict)  # labels, ports, volumes and the like
    size: int = 0
    built: int = 0  # bytes of the layers that this build has put on top
    shell: tuple[str, ...] = SHELL

    @property
    def digest(self) -> str:
        """Return the digest of layers and settings: the image's name everywhere."""
        value = [
            "atoll build 1", list(self.layers), self.host, dict(sorted(self.settings.env.items())), self.settings.user,
            self.settings.workdir, list(self.settings.entrypoint), list(self.settings.cmd), self.author, list(self.shell),
        ]  # fmt: skip
        return f"sha256:{hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()}"

    def record(self) -> ImageRecord:
        return ImageRecord(
            digest=self.digest, source="built", layers=self.layers, settings=self.settings, size=self.size,
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), platform=str(Platform.here()),
            host=self.host, author=dict(self.author),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Built:
    """A finished build."""

    record: ImageRecord
    new_bytes: int
    steps: int
    cached: int


class Build:
    """One build. `tell` gets a line per step."""

    def __init__(
        self, store: ImageStore, cache: Cache, runner: Runner, context: Context, limits: Limits, *,
        args: Mapping[str, str], tell: Callable[[str], None], use_cache: bool = True, grow: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._store = store
        self._cache = cache
        self._runner = runner
        self.context = context
        self._limits = limits
        self._given = {**_platform(), **args}
        self._tell = tell
        self._use_cache = use_cache
        self._grow = grow
        self._results: dict[int, State] = {}
        self.steps = self.cached = 0
        self._total = 0

    async def make(self, instructions: Sequence[Instruction], target: str = "") -> Built:
        """Build the target, or the last stage."""
        stages, outer = staging.split(instructions, self._given)
        wanted = staging.needed(stages, target)
        self._total = sum(1 + len(stage.steps) for stage in wanted)
        for stage in wanted:
            self._results[stage.number] = await self._stage(stage, stages, outer)
        state = self._results[wanted[-1].number]
        record = state.record()
        await self._runner.in_thread(lambda: self._store.keep(record))
        return Built(record, state.built, self.steps, self.cached)

    async def _stage(self, stage: staging.Stage, stages: Sequence[staging.Stage], outer: Mapping[str, str]) -> State:
        self._step(stage.begin)
        state = await _at(stage.begin, self._begin(stage, outer))
        scope = _Scope(self._given, outer)
        for one in stage.steps:
            self._step(one)
            state = await _at(one, self._apply(one, state, scope, stages[: stage.number]))
            if sum(len(key) + len(value) for key, value in state.settings.env.items()) > MAX_ENV:
                raise one.wrong(f"makes an environment of more than {MAX_ENV} bytes")
        return state

    def _step(self, one: Instruction) -> None:
        self.steps += 1
        self._tell(f"[{self.steps}/{self._total}] {one.shown}")

    async def _begin(self, stage: staging.Stage, outer: Mapping[str, str]) -> State:
        if isinstance(stage.base, int):
            return replace(self._results[stage.base], shell=SHELL)
        if (wanted := stage.begin.flags.get("platform")) and wanted != str(Platform.here()):
            raise stage.begin.wrong(f"asks for the platform {wanted!r:.60}; builds are for {Platform.here()}")
        return await self._image(stage.base)

    async def _image(self, name: str) -> State:
        """Return an image that a FROM or --from names, as a state."""
        if name == "scratch":
            return State(settings=Settings(env={"PATH": DEFAULT_PATH}))
        digest = await self._runner.base(name)
        found = await self._runner.in_thread(lambda: self._store.record(digest))
        if found is None:  # the machine's own image has no record
            host = await self._runner.in_thread(lambda: self._store.find_host_image(digest))
            assert host is not None
            return State(settings=Settings(env=host.env, workdir=host.workdir), host=digest)
        return State(found.layers, found.settings, found.host, dict(found.author), found.size)

    async def _apply(self, one: Instruction, state: State, scope: "_Scope", before: Sequence[staging.Stage]) -> State:
        env = scope.env(state)
        if one.name == "RUN":
            return await self._run(one, state, scope)
        if one.name in ("COPY", "ADD"):
            return await self._copy(one, state, env, before)
        if one.name == "ARG":
            staging.declare(one, env, scope.args, scope.given, scope.outer)
            return state
        if one.name == "WORKDIR":
            return await self._workdir(one, state, env)
        return _configure(one, state, env, self._tell)

    # Steps that make layers

    async def _run(self, one: Instruction, state: State, scope: "_Scope") -> State:
        if not state.layers and not state.host:
            raise one.wrong("has no program to run: the stage is made from scratch", "COPY what it needs first")
        argv = _argv(one, state.shell)
        env = {**scope.args, **state.settings.env}
        run = Run(state.digest, argv, env, state.settings.user, state.settings.workdir, one.line)
        key = _key(state, "RUN", list(argv), dict(sorted(scope.args.items())))

        async def make() -> Produce:
            await self._runner.in_thread(lambda: self._store.keep(state.record()))
            return await self._runner.run(run)

        return await self._layer(one, state, key, make)

    async def _copy(
        self, one: Instruction, state: State, env: Mapping[str, str], before: Sequence[staging.Stage]
    ) -> State:
        source, origin = await self._source(one, env, before)
        image = await self._tree(state)
        copy = await self._runner.in_thread(lambda: _copy(one, state, env, image))
        digest = "" if origin else await self._runner.in_thread(
            lambda: Copier(copy, source, image, self._limits).digest()
        )  # fmt: skip
        parts: list[object] = [list(copy.sources), copy.target, copy.owner, copy.mode, copy.unpacks, digest, origin]
        parts.append([(node.path, str(node.content)) for node in copy.inline])

        async def make() -> Produce:
            return Copier(copy, source, image, self._limits).write

        return await self._layer(one, state, _key(state, one.name, *parts), make)

    async def _source(
        self, one: Instruction, env: Mapping[str, str], before: Sequence[staging.Stage]
    ) -> tuple[Source, str]:
        """Return where a COPY takes from, and the digest of it when that is an image."""
        if "from" not in one.flags:
            return self.context, ""
        name = expand(one.flags["from"], env)
        stage = staging.find(before, name)
        if stage is None and name.isdigit():
            raise one.wrong(f"takes from stage {name:.10}, which does not come before it")
        state = self._results[stage.number] if stage is not None else await self._image(name)
        return await self._tree(state), state.digest

    async def _workdir(self, one: Instruction, state: State, env: Mapping[str, str]) -> State:
        text = expand(one.text, env)
        path = check_workdir(text if text.startswith("/") else f"{state.settings.workdir}/{text}")
        image = await self._tree(state)
        if await self._runner.in_thread(lambda: image.resolve(path)) is None:

            async def make() -> Produce:
                return lambda out: directory_layer(path, image, out)

            state = await self._layer(one, state, _key(state, "WORKDIR", path), make)
        return replace(state, settings=replace(state.settings, workdir=path))

    async def _layer(self, one: Instruction, state: State, key: str, make: Callable[[], Awaitable[Produce]]) -> State:
        """Put a layer on top: the cached one, or one made now."""
        if len(state.layers) >= self._limits.layers:
            raise one.wrong(f"is one layer too many: an image has at most {self._limits.layers}")
        found = self._cache.get(key) if self._use_cache else None
        if found is not None and await self._runner.in_thread(lambda: self._store.has_layer(found.layer)):
            self.cached += 1
            return self._on_top(state, found.layer, found.size)
        try:
            produce = await make()
            layer = await self._runner.in_thread(lambda: self._store.add_layer(produce, self._limits))
        finally:
            await self._runner.finish()
        made = self._on_top(state, layer.digest, layer.size)
        await self._runner.in_thread(lambda: self._store.keep(made.record()))
        self._cache.put(key, Step(layer.digest, layer.size, made.digest))
        self._grow(layer.size)
        return made

    def _on_top(self, state: State, layer: str, size: int) -> State:
        return replace(state, layers=(*state.layers, layer), size=state.size + size, built=state.built + size)

    async def _tree(self, state: State) -> Tree:
        stack, usr = await self._runner.in_thread(lambda: self._store.stack(state.layers, state.host))
        return Tree(stack, usr)


class _Scope:
    """The arguments of one stage."""

    def __init__(self, given: Mapping[str, str], outer: Mapping[str, str]) -> None:
        self.args: dict[str, str] = {}
        self.given = given
        self.outer = outer

    def env(self, state: State) -> dict[str, str]:
        return {**self.args, **state.settings.env}


def _platform() -> dict[str, str]:
    """Return the arguments that every build has once it declares them."""
    name = str(Platform.here())
    system, _, arch = name.partition("/")
    values = {"PLATFORM": name, "OS": system, "ARCH": arch}
    return {f"{side}{key}": value for side in ("TARGET", "BUILD") for key, value in values.items()}


def _key(state: State, *parts: object) -> str:
    value = json.dumps([state.digest, *parts], sort_keys=True, default=str)
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()


async def _at(one: Instruction, work: Awaitable[T]) -> T:
    """Do a step's work; an error about the request gets the step's line."""
    try:
        return await work
    except BuildFailed:
        raise
    except InvalidArgument as error:
        if "line" in error.details:
            raise
        raise one.wrong(f"cannot be done: {error.message}", error.hint) from error
    except AtollError as error:
        error.message = f"line {one.line}: {error.message}"
        error.args = (error.message,)
        error.details = {**error.details, "line": one.line}
        raise


def _argv(one: Instruction, shell: tuple[str, ...]) -> tuple[str, ...]:
    words_ = one.argv()
    if words_ is not None:
        if not words_ or not words_[0]:
            raise one.wrong("names no program")
        return words_
    if one.heredocs and is_only_heredoc(one.text):
        script = one.heredocs[0].text
        return _script(script) if script.startswith("#!") else (*shell, script)
    text = one.text
    for heredoc in one.heredocs:
        text += f"\n{heredoc.text}{heredoc.word}"
    return (*shell, text + ("\n" if one.heredocs else ""))


def _script(script: str) -> tuple[str, ...]:
    """Return how a here-document with a `#!` line is run: written to a file of its own, which goes afterwards."""
    keeper = 'f=/tmp/.step-$$; printf %s "$1" > "$f" && chmod 700 "$f" && "$f"; s=$?; rm -f "$f"; exit $s'
    return ("/bin/sh", "-c", keeper, "sh", script)


def _copy(one: Instruction, state: State, env: Mapping[str, str], image: Tree) -> Copy:
    argv = one.argv()
    parts = [expand(word, env) for word in argv] if argv is not None else words(without_heredocs(one.text), env)
    marks = heredoc_marks(one.text) if argv is None else []
    if len(parts) + len(marks) < 2 or not parts:
        raise one.wrong("needs at least one source and a destination")
    *sources, target = parts
    for source in sources:
        if source.startswith(("http://", "https://", "git@")) or "://" in source:
            raise one.wrong(f"takes {source!r:.120} from the network", "fetch it in a RUN, where the host list holds")
        if one.name == "ADD" and ".." in source.split("/"):
            raise one.wrong(f"takes {source!r:.120} from outside the context")
    texts = [(doc.word, (expand_plain(doc.text, env) if doc.expands else doc.text).encode()) for doc in one.heredocs]
    inline = tuple(Node(word, "f", 0o644, size=len(data), content=data) for word, data in texts)
    mode = None
    if text := one.flags.get("chmod"):
        value = expand(text, env)
        if not 3 <= len(value) <= 4 or any(char not in "01234567" for char in value):
            raise one.wrong(f"has a mode that is no octal number: {value!r:.20}")
        mode = int(value, 8)
    owner = find_owner(expand(text, env), image) if (text := one.flags.get("chown")) else None
    return Copy(tuple(sources), target, state.settings.workdir, owner, mode, one.name == "ADD", inline)


def _configure(one: Instruction, state: State, env: Mapping[str, str], tell: Callable[[str], None]) -> State:
    """Return the state after an instruction that only changes settings."""
    settings, author = state.settings, dict(state.author)
    name = one.name
    if name == "ENV":
        settings = replace(settings, env={**settings.env, **_pairs(one, env)})
    elif name == "LABEL":
        author["Labels"] = {**author.get("Labels", {}), **_pairs(one, env)}
    elif name == "MAINTAINER":
        author["Labels"] = {**author.get("Labels", {}), "maintainer": one.text}
    elif name == "USER":
        settings = replace(settings, user=check_user(expand(one.text, env)))
    elif name in ("CMD", "ENTRYPOINT"):
        argv = one.argv()
        value = argv if argv is not None else (*state.shell, one.text)
        if name == "CMD":
            settings = replace(settings, cmd=value)
        else:
            settings = replace(settings, entrypoint=value, cmd=())
    elif name == "EXPOSE":
        ports: dict[str, dict[str, str]] = {word if "/" in word else f"{word}/tcp": {} for word in words(one.text, env)}
        if any(not port.partition("/")[0].replace("-", "").isdigit() for port in ports):
            raise one.wrong("needs ports such as 80 or 53/udp")
        author["ExposedPorts"] = {**author.get("ExposedPorts", {}), **ports}
    elif name == "VOLUME":
        author["Volumes"] = {**author.get("Volumes", {}), **{path: {} for path in one.argv() or words(one.text, env)}}
    elif name == "STOPSIGNAL":
        author["StopSignal"] = expand(one.text, env)
    elif name == "SHELL":
        shell = one.argv()
        if not shell:
            raise one.wrong('needs the JSON form: SHELL ["/bin/bash", "-c"]')
        return replace(state, shell=shell)
    else:
        tell(f"line {one.line}: {name} has no effect here and is left out")
    return replace(state, settings=settings, author=author)


def _pairs(one: Instruction, env: Mapping[str, str]) -> dict[str, str]:
    found = words(one.text, env)
    if found and "=" not in found[0]:  # the old form: one name, and the rest of the line is its value
        name, _, value = one.text.partition(" ")
        if not value.strip():
            raise one.wrong("needs NAME=VALUE")
        return {name: expand(value.strip(), env)}
    pairs = {}
    for word in found:
        name, equals, value = word.partition("=")
        if not equals or not name or "\0" in word:
            raise one.wrong(f"needs NAME=VALUE, not {word!r:.80}")
        pairs[name] = value
    return pairs
