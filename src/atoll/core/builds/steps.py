"""The steps of a build in real sandboxes: one for each RUN, with a list of hosts and limits, gone when its layer is stored."""

import asyncio
import codecs
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from atoll import errors
from atoll.backends.contract import KeepsChanges
from atoll.core.access.credentials import may
from atoll.core.access.principals import Principal
from atoll.core.builds.label import LABEL
from atoll.core.policy.images import StoredImages
from atoll.egress import presets
from atoll.images.build.engine import Produce, Run
from atoll.images.progress import Progress
from atoll.model import Chunk, CreateSandbox, ExecResult, ExecSpec, LimitsSpec

if TYPE_CHECKING:
    from atoll.core import Core

MAX_LINE = 2000
TAIL = 20  # lines of a failed step that its error repeats
T = TypeVar("T")


class Log:
    """The output of a step, line by line: bounded, without bytes that steer a terminal."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""
        self.last: list[str] = []

    def add(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + self._decode(data)).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in lines:
            self._line(line)
        if len(self._rest) > MAX_LINE:
            self._line(self._rest)
            self._rest = ""

    def end(self) -> None:
        if self._rest:
            self._line(self._rest)
            self._rest = ""

    def _line(self, line: str) -> None:
        line = line[:MAX_LINE]
        self.last = [*self.last[1 - TAIL :], line]
        self._tell(line)


class SandboxRunner:
    """Runs the steps of one build for one caller. `tell` and `log` get steps' and programs' lines."""

    def __init__(
        self, core: "Core", images: StoredImages, who: Principal, build: str, runtime: str, *,
        log: Callable[[str], None], fetch: Callable[[Progress], None],
    ) -> None:  # fmt: skip
        self._core = core
        self._images = images
        self._who = who
        self._build = build
        self._runtime = runtime
        self._log = log
        self._fetch = fetch
        self._box = ""

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await self._core.workers.run(self._who.owner, work)

    async def base(self, name: str) -> str:
        """Return the digest of the image that a FROM names. The operator's list of images holds."""
        built = self._core.builds.digest_of(self._who, name)
        if built is not None:
            return built
        guest = None if may(self._who, "admin") else self._who.owner
        choice = await asyncio.to_thread(lambda: self._images.obtain(name, None, self._fetch, guest=guest))
        return choice.image.digest

    async def run(self, step: Run) -> Produce:
        """Run the step to its end; what it has changed is read from the disk of its stopped sandbox."""
        backend = self._core.backend
        if not isinstance(backend, KeepsChanges):
            raise errors.Unsupported("images are built on this machine's own sandboxes, and this daemon has none")
        sandboxes = self._core.sandboxes
        info = await sandboxes.create(self._who, self._spec(step))
        self._box = info.id
        log = Log(self._log)
        result: ExecResult | None = None
        command = ExecSpec(
            argv=list(step.argv), env=dict(step.env), user=step.user or None, cwd=step.workdir, timeout_ms=0,
            merge_stderr=True, output_limit=0,
        )  # fmt: skip
        stream = self._core.commands.stream(self._who, info.id, command)
        try:
            async for item in stream:
                if isinstance(item, Chunk):
                    log.add(item.data)
                elif isinstance(item, ExecResult):
                    result = item
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
            log.end()
        assert result is not None
        if result.exit_code != 0 or result.status != "completed":
            raise _failed(step, result, log)
        await sandboxes.stop(self._who, info.id)
        row = sandboxes.known(self._who, info.id)
        record = row["record"].get("box")
        assert record is not None
        return backend.changes(record)

    async def finish(self) -> None:
        """End the step's sandbox, whatever became of it."""
        box, self._box = self._box, ""
        if box:
            await self._core.sandboxes.tasks.whole(self._core.sandboxes.end(box, "destroyed", "", self._who.owner))

    def _spec(self, step: Run) -> CreateSandbox:
        settings = self._core.config.images
        hosts = list(presets.run_hosts()) if settings.build_hosts is msgspec.UNSET else list(settings.build_hosts)
        return CreateSandbox(
            name=f"build-{secrets.token_hex(6)}",
            image=self._core.builds.name_step(self._who, step.image),
            runtime=self._runtime,
            hosts=hosts,
            limits=LimitsSpec(memory_mb=settings.build_memory_mb, disk_mb=settings.build_disk_mb),
            lifetime_s=settings.build_timeout_s + 300,
            idle_timeout_s=settings.build_timeout_s + 300,
            labels={LABEL: self._build},
        )


def _failed(step: Run, result: ExecResult, log: Log) -> errors.BuildFailed:
    how = f"was killed by signal {result.signal}" if result.signal else f"ended with {result.exit_code}"
    if result.oom:
        how = "ran out of memory"
    shown = "\n".join(log.last)
    return errors.BuildFailed(
        f"line {step.line}: the step {how}" + (f"\n{shown}" if shown else ""),
        details={"line": step.line, "exit_code": result.exit_code},
    )
