"""One command in a sandbox of its own: made for it, gone after it. `run` of every surface is this verb.

The sandbox belongs to the call: a caller that goes away, an error or the daemon's end take it along. Only `keep` leaves it.
A local caller has the result as soon as the command is over, and the sandbox goes behind his back; not so when it has files
of his mounted, which nothing may touch afterwards, or with a key, against whose quota it counts.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, TypedDict, final

import msgspec

from atoll import errors
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.credentials import KeyHolder
from atoll.core.access.principals import Principal
from atoll.core.policy.images import Step
from atoll.core.policy.profiles import OPEN, Ceiling
from atoll.core.sandboxes.provisioning import TEMPORARY
from atoll.egress import presets
from atoll.model import Chunk, CreateSandbox, ExecResult, Gap, RunOnce, SandboxInfo, Started, unbase64

if TYPE_CHECKING:
    from atoll.core import Core

log = logging.getLogger("atoll.once")

KEPT_S = 3600.0
IDLE_S = 300.0  # for one whose daemon was killed: nothing else would end it
UNKEPT_S = 24 * 3600.0 + 600.0  # the longest timeout of a command and some; a backstop, nothing waits for it
BEHIND = 4  # so many sandboxes may still be going when a caller is told that his run is over


class Summary(TypedDict):
    """The sandbox of a run, as its caller sees it."""

    id: str
    name: str | None
    image: str
    runtime: str
    unheld: list[str]  # limits that this host does not hold
    expires_in_s: int | None


@final
class Made(TypedDict):
    sandbox: Summary


Item = Started | Chunk | Gap | ExecResult | Step | Made


class Once(Part):
    """Runs that bring their own sandbox."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self._ends: set[asyncio.Task[SandboxInfo]] = set()

    @verb("run")
    async def stream(self, who: Principal, request: RunOnce, ceiling: Ceiling = OPEN) -> AsyncIterator[Item]:
        """Yield events as they happen: how far its image is (`{"progress": ...}`), the sandbox (`{"sandbox": ...}`), the
        command's start, its output, its result."""
        spec = self._complete(request)
        ceiling.check(spec)
        if request.command.background:
            raise errors.InvalidArgument("a run of its own cannot go to the background", hint="keep it, and use exec")
        info: SandboxInfo | None = None
        async with aclosing(self._core.sandboxes.create_watched(who, spec)) as making:  # type: ignore[type-var]
            async for step in making:
                if isinstance(step, SandboxInfo):
                    info = step
                else:
                    yield step
        assert info is not None
        keep, began = False, time.monotonic()
        result: ExecResult | None = None
        try:
            yield {"sandbox": summary(info)}
            await self._place(who, info, request)
            output = self._core.commands.stream(who, info.id, request.command)
            try:
                async for item in output:
                    if isinstance(item, ExecResult):
                        result = item
                    else:
                        yield item
            finally:
                await output.aclose()  # type: ignore[attr-defined]  # it is a generator
            keep = request.keep
        except errors.SandboxGone as gone:
            if gone.details.get("reason") != "oom":
                raise
            result = _out_of_memory(info, request, began)
        finally:
            if not keep:
                ending = self._end(who, info.id)
                if result is None or spec.mounts or isinstance(who, KeyHolder) or len(self._ends) > BEHIND:
                    await self._over(ending)
        assert result is not None
        yield result

    @verb("run")
    async def run(self, who: Principal, request: RunOnce, ceiling: Ceiling = OPEN) -> ExecResult:
        """The same for callers that want only the end of it."""
        found: ExecResult | None = None
        stream = self.stream(who, request, ceiling)
        try:
            async for item in stream:
                if isinstance(item, ExecResult):
                    found = item
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        assert found is not None
        return found

    def _complete(self, request: RunOnce) -> CreateSandbox:
        """Return the defaults of a run that differ from those of a sandbox made by hand."""
        spec = request.sandbox
        changes: dict[str, object] = {}
        if spec.name is None:
            changes["name"] = ("run-" if request.keep else TEMPORARY) + secrets.token_hex(4)
        if spec.lifetime_s is None:
            changes["lifetime_s"] = KEPT_S if request.keep else UNKEPT_S
        if spec.idle_timeout_s is None and not request.keep:
            changes["idle_timeout_s"] = IDLE_S
        if spec.hosts is None and spec.mode is None:
            changes["hosts"] = ["*"] if request.any_host else list(presets.run_hosts())
        return msgspec.structs.replace(spec, **changes)

    async def _place(self, who: Principal, info: SandboxInfo, request: RunOnce) -> None:
        for file in request.files:
            content = unbase64("content_b64", file.content_b64)
            await self._core.files.write(who, info.id, file.path, content, mode=file.mode, parents=True)

    def _end(self, who: Principal, sandbox: str) -> "asyncio.Task[SandboxInfo]":
        """Begin its end, which goes to the end however often the caller gives up meanwhile."""
        task = asyncio.ensure_future(self._core.sandboxes.destroy(who, sandbox))
        self._ends.add(task)
        task.add_done_callback(self._ended)
        return task

    async def _over(self, ending: "asyncio.Task[SandboxInfo]") -> None:
        try:
            await asyncio.shield(ending)
        except errors.AtollError:
            pass  # told in the log by then; what fails to end is tried again

    def _ended(self, task: "asyncio.Task[SandboxInfo]") -> None:
        self._ends.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a run's sandbox is not gone yet: %s", error)


def _out_of_memory(info: SandboxInfo, request: RunOnce, began: float) -> ExecResult:
    """Where memory ran out for the sandbox as a whole (gVisor), the command was what used it up."""
    return ExecResult(
        command_id=request.command.id or "",
        sandbox_id=info.id,
        status="completed",
        exit_code=137,
        signal=9,
        stdout="",
        stderr="atoll: out of memory: the sandbox was killed\n",
        stdout_bytes=0,
        stderr_bytes=0,
        truncated=True,
        stdout_truncated=True,
        stderr_truncated=True,
        timed_out=False,
        oom=True,
        duration_ms=int((time.monotonic() - began) * 1000),
        cpu_ms=0,
        max_rss_kb=0,
    )


def summary(info: SandboxInfo) -> Summary:
    return {
        "id": info.id,
        "name": info.name,
        "image": info.image,
        "runtime": info.runtime,
        "unheld": [name for name, limit in info.limits.items() if not limit["enforced"]],
        "expires_in_s": None if info.expires_at is None else round(info.expires_at - time.time()),
    }
