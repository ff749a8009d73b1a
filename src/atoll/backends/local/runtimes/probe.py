"""Does a runtime work here? A program on PATH proves nothing: a sandbox is started, and programs run and wait in it.

The answer is remembered in probes.json until the engine, our own programs or the kernel change, or a new sandbox crashes. That an engine
does not work is found out again by the next daemon, but where a probe is slow it is kept until this machine starts again. What
sandboxes do cannot change the answer: a crash makes the probe run again, and the probe runs nothing but our own agent.
"""

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.backends.contract import BoxSpec, Limits, Record, RuntimeStatus
from atoll.backends.local import binaries
from atoll.backends.local.box import LocalBox
from atoll.backends.local.paths import Paths, new_id
from atoll.backends.local.runtimes import version_floor as floor
from atoll.backends.local.runtimes.base import Engine, Runtime
from atoll.errors import AtollError, SandboxGone
from atoll.guest import ConnectionLost
from atoll.guest.process import Process

log = logging.getLogger("atoll.backend")

SLOWEST = 300.0  # on a slow machine a probe has as long as PATIENCE calls of `engine --version` take, up to this
PATIENCE = 200
LATE_AGAIN = (
    60.0  # seconds after which an engine that gave no answer in time is tried again: the machine may have been busy
)
FAILURES = Path("/run/atoll/slow-probes.json")
ROUNDS, AT_ONCE = 3, 4  # of programs that wait: some builds of gVisor crash at one wait in four
MOST_DOUBTS = 5  # a daemon's; what crashes on purpose must not keep it probing

Create = Callable[[BoxSpec, Engine], Awaitable[LocalBox]]
Destroy = Callable[[Record], Coroutine[Any, Any, None]]


class Probes:
    """A probe's result, kept on disk."""

    def __init__(
        self,
        paths: Paths,
        create: Create,
        destroy: Destroy,
        *,
        runtimes: Mapping[str, Runtime],
        refuse_old: bool = False,
        rootless: bool = False,
    ) -> None:
        self._runtimes = runtimes
        self._order = {name: runtime.order(rootless=rootless) for name, runtime in runtimes.items()}
        self._refuse_old = refuse_old
        self._warned: set[str] = set()
        self._paths = paths
        self._create = create
        self._destroy = destroy
        self._locks = {runtime: asyncio.Lock() for runtime in runtimes}
        self._found: dict[str, RuntimeStatus] = {}
        self._late: dict[str, float] = {}  # probes that got no answer in time, and when
        self._doubts = 0

    async def status(self, runtime: str) -> RuntimeStatus:
        """The first engine that works, or why none does."""
        kind = self._runtimes[runtime]
        async with self._locks[runtime]:
            tried: list[RuntimeStatus] = []
            for name in self._order[runtime]:
                status = replace(self._judged(kind, await self._status(kind, name)), optional=kind.optional)
                if status.works:
                    return _with_reason(status, [one for one in tried if kind.told_when_refused(one.engine)])
                tried.append(status)
            why = "; ".join(f"{status.engine}: {status.why}" for status in tried)
            return replace(tried[0], why=why)  # the preferred one is what there is to mend

    async def told(self, runtime: str) -> RuntimeStatus:
        """The status for a list of runtimes: one that `auto` never takes is not started for that."""
        kind = self._runtimes[runtime]
        if kind.automatic:
            return await self.status(runtime)
        if self._locks[runtime].locked():
            return _not_tried(kind, "it is being tried out")
        for name in self._order[runtime]:
            program = kind.find(name)
            if program is not None and not self._is_known(kind, name, program):
                return _not_tried(kind, "not tried yet: the first sandbox that asks for it by name does that")
        return await self.status(runtime)

    def _is_known(self, runtime: Runtime, name: str, program: str) -> bool:
        """Whether an engine was tried out already, by this or an earlier daemon."""
        probe, key = self._name(runtime, name), _key(program)
        return (
            probe in self._found
            or self._remembered(runtime, name, probe, key) is not None
            or _failed_before(runtime, name, key) is not None
        )

    def _judged(self, runtime: Runtime, status: RuntimeStatus) -> RuntimeStatus:
        """Return what is known against this version; the operator may have it refused."""
        found = floor.judge(runtime.program(status.engine), status.version)
        if found is None:
            return status
        if status.engine not in self._warned:
            self._warned.add(status.engine)
            log.warning("%s", found.warning)
        if self._refuse_old and status.works:
            return replace(status, works=False, why=found.warning, fix=found.fix, warning=found.warning)
        return replace(status, warning=found.warning)

    async def engine(self, runtime: str) -> Engine:
        status = await self.status(runtime)
        program = self._runtimes[runtime].find(status.engine)
        if not status.works or program is None:
            raise AtollError(f"no engine works: {status.why}", hint=status.fix)
        return Engine(self._runtimes[runtime], status.engine, program)

    async def _status(self, runtime: Runtime, name: str) -> RuntimeStatus:
        program = runtime.find(name)
        if program is None:
            return RuntimeStatus(runtime.name, False, runtime.lacking(name), runtime.fix, engine=name)
        probe = self._name(runtime, name)
        if time.monotonic() - self._late.get(probe, math.inf) > LATE_AGAIN:
            del self._found[probe], self._late[probe]
        if probe not in self._found:
            key = _key(program)
            kept = self._remembered(runtime, name, probe, key) or _failed_before(runtime, name, key)
            self._found[probe] = kept or await self._try(Engine(runtime, name, program), probe, key)
        return self._found[probe]

    def doubt(self, engine: Engine) -> None:
        """Forget that an engine works: a sandbox it has just started has crashed."""
        self._doubts += 1
        if self._doubts > MOST_DOUBTS:
            return
        log.warning("a new sandbox of %s has crashed: what is known of it is found out again", engine.name)
        probe = self._name(engine.runtime, engine.name)
        self._found.pop(probe, None)
        self._write({name: entry for name, entry in self._read().items() if name != probe})

    def _name(self, runtime: Runtime, engine: str) -> str:
        """The key of an answer: that of the first runtime with this engine is kept under the engine's name alone."""
        owner = next(one for one in self._runtimes.values() if engine in one.engines)
        return engine if owner is runtime else f"{runtime.name}/{engine}"

    async def _try(self, engine: Engine, probe: str, key: str) -> RuntimeStatus:
        began, runtime = time.monotonic(), engine.runtime.name
        version = await engine.runtime.version(engine)
        limit = min(SLOWEST, max(engine.runtime.probe_limit(engine.name), PATIENCE * (time.monotonic() - began)))
        try:
            async with asyncio.timeout(limit):
                await self._run(engine)
            status = RuntimeStatus(runtime, True, version=version, engine=engine.name)
        except TimeoutError:
            self._late[probe] = time.monotonic()
            why, fix = f"no answer within {limit:.0f} s", "use it again in a minute: then it is tried again"
            if engine.runtime.keeps_failure(engine.name):
                why, fix = (
                    f"{why}; this is kept until the machine starts again",
                    f"to have it tried again, remove {FAILURES}",
                )
            status = RuntimeStatus(runtime, False, why, fix, version, engine.name)
        except (AtollError, OSError, ConnectionLost) as error:
            fix = getattr(error, "hint", "") or engine.runtime.fix_of(engine.name)
            status = RuntimeStatus(runtime, False, str(error), fix, version, engine.name)
        self._remember(probe, key, status)
        if engine.runtime.keeps_failure(engine.name) and not status.works:
            _keep_failure(status, key)
        return status

    async def _run(self, engine: Engine) -> None:
        """An empty image is enough: the agent needs nothing, and runs itself as the program that waits."""
        box = await self._create(BoxSpec(new_id(), limits=Limits(memory_mb=64, pids=32, disk_mb=16)), engine)
        try:
            for turn in range(ROUNDS):
                await box.unless_it_ends(asyncio.gather(*(_nap(box, f"{turn}-{one}") for one in range(AT_ONCE))))
        except SandboxGone as gone:
            raise AtollError(f"a sandbox crashed while programs waited in it: {gone.details.get('detail')}") from None
        finally:
            await asyncio.shield(self._destroy(box.record))

    def _remembered(self, runtime: Runtime, name: str, probe: str, key: str) -> RuntimeStatus | None:
        entry = self._read().get(probe)
        if not isinstance(entry, dict) or entry.get("key") != key or not entry.get("works"):
            return None  # a failure is tried again by the next daemon: the cause may be gone
        return RuntimeStatus(runtime.name, True, version=str(entry.get("version", "")), engine=name)

    def _remember(self, name: str, key: str, status: RuntimeStatus) -> None:
        entry = {"key": key, "works": status.works, "why": status.why, "version": status.version}
        self._write({**self._read(), name: entry})

    def _write(self, entries: Mapping[str, object]) -> None:
        half = self._paths.probes.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(entries, indent=1))
        half.rename(self._paths.probes)

    def _read(self) -> Mapping[str, object]:
        with suppress(OSError, ValueError):
            value = json.loads(self._paths.probes.read_text())
            if isinstance(value, dict):
                return value
        return {}


def _not_tried(runtime: Runtime, why: str) -> RuntimeStatus:
    return RuntimeStatus(runtime.name, False, why, f"use --runtime {runtime.name}")


def _failed_before(runtime: Runtime, name: str, key: str) -> RuntimeStatus | None:
    """What a slow probe of this or another home has found since the machine started."""
    entry = _failures().get(name)
    if not runtime.keeps_failure(name) or not isinstance(entry, dict) or entry.get("key") != key:
        return None
    return RuntimeStatus(
        runtime.name, False, str(entry.get("why")), str(entry.get("fix")), str(entry.get("version")), name
    )


def _keep_failure(status: RuntimeStatus, key: str) -> None:
    entry = {"key": key, "why": status.why, "fix": status.fix, "version": status.version}
    half = FAILURES.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # no root, no /run: then each daemon tries
        FAILURES.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        half.write_text(json.dumps({**_failures(), status.engine: entry}, indent=1))
        half.rename(FAILURES)


def _failures() -> Mapping[str, object]:
    with suppress(OSError, ValueError), open(FAILURES, encoding="utf-8") as file:
        value = json.load(file)
        if os.fstat(file.fileno()).st_uid == os.geteuid() and isinstance(value, dict):
            return value
    return {}


async def _nap(box: LocalBox, name: str) -> None:
    process = await Process.start(box.client, f"probe-{name}", {"argv": ["/.atoll/guest", "nap"], "cwd": "/"})
    async for _ in process:
        pass


def _with_reason(status: RuntimeStatus, refused: list[RuntimeStatus]) -> RuntimeStatus:
    """Say why an engine that people may expect is not the one."""
    return replace(status, why="; ".join(f"{status.engine}, because {other.engine}: {other.why}" for other in refused))


def _key(program: str) -> str:
    """Return the inputs of a probe: when they change, its result is void."""
    parts = [os.uname().release]
    for path in (Path(program), binaries.launcher(), binaries.guest()):
        stat = path.stat()
        parts.append(f"{path}:{stat.st_mtime_ns}:{stat.st_size}")
    return " ".join(parts)
