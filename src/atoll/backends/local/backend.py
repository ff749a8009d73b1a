"""Sandboxes on this machine: create, adopt, destroy, sweep.

Create is a transaction: the control group is made first, everything else is named after the id, and any failure
buries what is there. Destroy kills by control group, then takes away the engine's state, the group, the run directory
and the disk, looks again, and may be repeated at any time.
"""

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from atoll.backends import registry
from atoll.backends.contract import (
    Box,
    BoxSpec,
    Capabilities,
    Image,
    NetworkEvents,
    NetworkStatus,
    Record,
    RuntimeStatus,
)
from atoll.backends.local import binaries
from atoll.backends.local.box import LocalBox, LocalRecord
from atoll.backends.local.changes import write_changes
from atoll.backends.local.kernel import children, disks
from atoll.backends.local.kernel.cgroups import Groups
from atoll.backends.local.kernel.disks import Disks
from atoll.backends.local.kernel.ids import COUNT, IdRanges, OwnIds
from atoll.backends.local.kernel.rootless import standing
from atoll.backends.local.layers import FindLayers, Layers, Rootfs
from atoll.backends.local.memory.files import Memories
from atoll.backends.local.network import Loopback, Survivor
from atoll.backends.local.paths import ID, Paths, check_id
from atoll.backends.local.pool import Pool, fit, run_first
from atoll.backends.local.pool import Settings as PoolSettings
from atoll.backends.local.runtimes.base import Engine, Runtime
from atoll.backends.local.runtimes.probe import Probes
from atoll.errors import (
    AlreadyExists,
    AtollError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
)
from atoll.model import Policy

log = logging.getLogger("atoll.backend")

ID_LOCKS = Path("/run/atoll/ids")
LOOP_TIMEOUT = 30.0
AGENT_TIMEOUT = 120.0  # on a slow machine; one that ends while it starts is told at once
NEW = 300.0  # seconds in which a crash says something about the engine


class LocalBackend:
    """Implements `contract.Backend` with an OCI engine."""

    def __init__(
        self,
        home: Path | str,
        *,
        runtimes: Sequence[Runtime] | None = None,
        layers: FindLayers | None = None,
        links: Loopback | None = None,
        pool: PoolSettings | None = None,
        on_step: Callable[[str, str], None] | None = None,
        refuse_old: bool = False,
        engines: Sequence[str] = (),
    ) -> None:
        known = registry.load(engines) if runtimes is None else runtimes
        self._runtimes = {runtime.name: runtime for runtime in known}  # strongest first
        self._engines = tuple(dict.fromkeys(name for runtime in known for name in runtime.engines))
        self.standing = standing()
        self.paths = Paths(Path(home), plain_disks=self.standing.rootless)
        self.groups = Groups(self.paths.mark, rootless=self.standing.rootless)
        self.disks = Disks(self.paths.disks)
        self.ids = OwnIds() if self.standing.rootless else IdRanges(ID_LOCKS, self.paths.mark)
        self.memories = Memories(self.paths.memories)
        self.probes = Probes(
            self.paths,
            self._create_spare,
            self.destroy,
            runtimes=self._runtimes,
            refuse_old=refuse_old,
            rootless=self.standing.rootless,
        )
        self.on_step = on_step or (lambda box, step: None)  # the store's journal; raising in it fails the create
        self._layers = layers or Layers(self.paths.home / "images")
        self.links = links or Loopback()
        self.pool = Pool(self._make_spare, self.destroy, self.capabilities, pool or PoolSettings(0, 0))
        self._boxes: dict[str, LocalBox] = {}
        self._making: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}

    async def start(self, events: NetworkEvents | None = None) -> None:
        await self.links.start(events or NetworkEvents())
        if os.geteuid() != 0:
            raise Unsupported("not root here", hint="an ordinary user's daemon enters a user namespace first")
        children.become_subreaper()
        self.paths.make()
        self.groups.prepare()

    @property
    def id_count(self) -> int:
        """How many ids a sandbox has."""
        return self.standing.ids if self.standing.rootless else COUNT

    async def close(self) -> None:
        """Let go of everything; the sandboxes live on for the next daemon."""
        await self.pool.close()
        await self.links.close(keep=bool(self._boxes))
        for box in self._boxes.values():
            box.release()
        self._boxes.clear()
        self.groups.remove_empty()

    # Making and finding

    def reserve(self, spec: BoxSpec) -> str:
        return self.pool.reserve(spec) or spec.id

    async def release(self, box: str) -> None:
        await self.pool.release(box)

    async def create(self, spec: BoxSpec) -> Box:
        spare = self.pool.take(spec.id)
        if spare is not None:
            return await self._claim(spare, spec)
        with self.pool.hold_refill():
            engine = await self._engine(spec.runtime)
            _check(spec, engine.runtime.name, engine.runtime.capabilities)
            return self._doubt_if_it_crashes(await self._create(spec, engine), engine)

    async def _claim(self, spare: LocalBox, spec: BoxSpec) -> LocalBox:
        """Make a spare what was asked for; if that fails, nothing is left of it."""
        try:
            _check(spec, spare.record["runtime"], spare.capabilities)
            async with _answering():
                await fit(spare, spec)
        except BaseException:
            await _to_the_end(self._clean_up(spare.record, keep_disk=False))
            raise
        return spare

    async def _make_spare(self, spec: BoxSpec) -> LocalBox:
        engine = await self._engine(spec.runtime)
        box = self._doubt_if_it_crashes(await self._create_spare(spec, engine), engine)
        if spec.first is not None:
            await run_first(box.client, spec.first)
        return box

    async def _create_spare(self, spec: BoxSpec, engine: Engine) -> LocalBox:
        return await self._create(spec, engine, spare=True)

    async def _create(self, spec: BoxSpec, engine: Engine, *, spare: bool = False) -> LocalBox:
        check_id(spec.id)
        if not spec.hostname:
            spec = replace(spec, hostname=f"sandbox-{spec.id[:12]}")
        with self._exclusive(spec.id):
            try:
                workspace = self._workspace(spec)
                rootfs = await self._rootfs(spec.image)
                assembly = engine.runtime.assembly(self, spec, engine, rootfs, workspace, spare=spare)
                box = await assembly.make()
                box.links, box.policy = self.links, spec.policy
                self._boxes[spec.id] = box
                async with _answering():
                    await box.unless_it_ends(box.client.connection())
                    if spec.memory is not None:
                        await box.unless_it_ends(box.wake(spec.boot))
                        _remove(assembly.run / "memory")
            except BaseException:
                # Also when cancelled: nothing may stay. The disk of a stopped sandbox is not ours to throw away.
                await _to_the_end(self._clean_up({"id": spec.id}, keep_disk=spec.workspace.disk is not None))
                raise
            return box

    def _doubt_if_it_crashes(self, box: LocalBox, engine: Engine) -> LocalBox:
        """An engine whose new sandbox crashes is tried again before it is used for another one."""
        made = time.monotonic()

        def crashed() -> None:
            if time.monotonic() - made < NEW:
                self.probes.doubt(engine)

        box.when_it_crashes(crashed)
        return box

    async def _clean_up(self, record: LocalRecord, *, keep_disk: bool) -> None:
        """After a failed create, whose own error is the one to tell. What stays is swept by the next daemon."""
        try:
            await self._teardown(record, keep_disk=keep_disk)
        except (AtollError, OSError) as error:
            log.error("sandbox %s could not be made and is not wholly gone: %s", record["id"], error)

    @contextmanager
    def _exclusive(self, box: str) -> Iterator[None]:
        if box in self._making or self.paths.run(box).exists():
            raise AlreadyExists(f"sandbox {box} is there already")
        self._making.add(box)
        try:
            yield
        finally:
            self._making.discard(box)

    async def _rootfs(self, image: Image) -> Rootfs:
        """The directories of an image; one without a name is empty."""
        if image.name:
            return await self._layers(image)
        empty = self.paths.home / "images" / "empty"
        empty.mkdir(parents=True, exist_ok=True)
        return Rootfs((str(empty),))

    def _workspace(self, spec: BoxSpec) -> Path | None:
        """The disk of the sandbox whose workspace is shared."""
        shared = spec.workspace.of
        if not shared or shared == spec.id:
            return None
        image = self.paths.disk(shared)
        if not image.exists() and self.standing.rootless and self.paths.box(shared).exists():
            raise Unsupported(
                f"the disk of sandbox {shared} is in memory, and cannot be shared",
                hint="an ordinary user's disk is in memory when its size is asked for: leave --disk out",
            )
        if not image.exists():
            raise NotFound(f"sandbox {shared} has no workspace to share")
        return image

    async def adopt(self, record: Record, policy: Policy | None = None, *, keep_disk: bool = False) -> Box | None:
        ours = _ours(record)
        box, pid = check_id(ours["id"]), ours["pid"]
        if box in self._boxes:
            return self._boxes[box]
        init: children.Watched | None = None
        with suppress(ProcessLookupError):
            init = children.Watched(pid)  # first held, then compared: after that it cannot be swapped
        if init is None or init.is_dead or children.start_time(pid) != ours["started"]:
            if init is not None:
                init.close()
            await self.destroy(record, keep_disk=keep_disk)
            return None
        living = self._boxes[box] = self._living({**ours}, init)
        living.links, living.policy = self.links, policy or Policy()
        try:
            await living.settle()
        except AtollError as error:
            log.error("sandbox %s was being saved, and its agent cannot be reached: %s", box, error)
        return living

    async def reconnect(self) -> set[str]:
        """Give every adopted sandbox its network with its own policy; returns those that have lost theirs for good."""
        known = list(self._boxes.values())
        lost = await self.links.readopt(Survivor(box.id, box.record.get("link"), box.policy, box.pid) for box in known)
        for box in known:
            box.record["link"] = self.links.link(box.id)
        return lost

    def _living(self, record: LocalRecord, init: children.Watched) -> LocalBox:
        return self._runtimes[record["runtime"]].adopt(record, self.paths, self.groups.open(record["id"]), init)

    def disk_used(self, box: str) -> int | None:
        """Return the space its disk takes of the home now: 0 before it is made. An ordinary user's disks are not limited there."""
        if self.standing.rootless:
            return None
        for path in (self.paths.disk(box), self.paths.volume(box)):  # a volume's id is of the same form
            with suppress(FileNotFoundError):
                return os.stat(path).st_blocks * 512
        return 0

    def changes(self, record: Record) -> Callable[[BinaryIO], None]:
        ours = _ours(record)
        disk, base, stage = self.paths.disk(ours["id"]), ours.get("base", 0), self.paths.stage()
        return lambda out: write_changes(disk, base, stage, out)

    # Volumes

    async def create_volume(self, volume: str, size_mb: int) -> None:
        if self.standing.rootless:
            raise Unsupported(
                "an ordinary user's daemon has no volumes",
                hint="it cannot mount a disk of a given size; run it as root",
            )
        path = self.paths.volume(volume)
        path.parent.mkdir(mode=0o700, parents=True)
        await self.disks.create(path, size_mb)

    async def remove_volume(self, volume: str) -> None:
        """The loop device under it clears itself with the last sandbox that had it."""
        path = self.paths.volume(volume)
        deadline = asyncio.get_running_loop().time() + LOOP_TIMEOUT
        while path.exists() and (devices := disks.attached(path)):
            if asyncio.get_running_loop().time() > deadline:
                raise Internal(f"the volume {volume} stays attached", details={"devices": devices})
            await asyncio.sleep(0.01)
        await asyncio.to_thread(_remove, path.parent)

    # Saved memories

    async def forget_memory(self, name: str) -> None:
        await asyncio.to_thread(self.memories.forget, name)

    async def sweep_memories(self, known: set[str]) -> list[str]:
        return await asyncio.to_thread(self.memories.sweep, known)

    def memory_used(self, name: str) -> int:
        return self.memories.used(name)

    # Taking away

    async def destroy(self, record: Record, *, keep_disk: bool = False) -> None:
        box = check_id(str(record["id"]))
        if box in self._making:
            raise FailedPrecondition(f"sandbox {box} is being made")
        self.pool.take(box)  # what was set aside and never used
        async with self._locks.setdefault(box, asyncio.Lock()):
            await self._teardown(_ours(record), keep_disk=keep_disk)
        self._locks.pop(box, None)

    async def _teardown(self, record: LocalRecord, *, keep_disk: bool) -> None:
        """Works on any half-made state: each step takes away what is there and does not ask why."""
        box = check_id(record["id"])
        group = self.groups.open(box)
        if living := self._boxes.pop(box, None):
            await living.client.close()
            await living.kill()
            await asyncio.to_thread(living.unmount)
            living.release()
        await group.kill()
        for pid, started in self._recorded(record):
            await children.kill_recorded(pid, started)
        base = record.get("base") if isinstance(record.get("base"), int) and not self.standing.rootless else None
        inits = {other.pid for other in self._boxes.values()}
        await children.reap_orphans(children.in_group(self.groups.path(box), base), others=inits)
        for state in self._states(box):
            _remove(state)
        if living is None:
            await self.links.detach(box)
        await group.remove()
        _remove(self.paths.run(box))
        await self._detached(record)
        if not keep_disk:
            await asyncio.to_thread(_remove, self.paths.box(box))
            self.ids.release(box, base)
        self._verify(box, keep_disk)

    def _states(self, box: str) -> list[Path]:
        """What engines have written of it; of most there is nothing."""
        return [self.paths.state(engine, box) for engine in self._engines if self.paths.has_state(engine, box)]

    def _recorded(self, record: LocalRecord) -> list[tuple[int, str | None]]:
        """The sandbox's first process, from our record, the engine's or the launcher's. Where there are control groups nothing
        is left of it by now; each is looked at before it counts, because its number may have come to mean another one."""
        box = str(record["id"])
        found: list[tuple[int, str | None]] = (
            [(int(record["pid"]), str(record.get("started")))] if "pid" in record else []
        )
        for state in self._states(box):
            with suppress(OSError, ValueError, KeyError, TypeError):
                pid, since = _engine_state(state)
                started = children.start_time(pid)
                if started and started.endswith(f"/{since}"):
                    found.append((pid, started))
        with suppress(OSError, ValueError):
            file = self.paths.run(box) / "pid"
            pid = int(file.read_text())
            program = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
            if program == os.fsencode(binaries.launcher()) and children.is_older(pid, file.stat().st_mtime):
                found.append((pid, children.start_time(pid)))
        return found

    async def _detached(self, record: LocalRecord) -> None:
        """The loop device clears itself with the last mount. Only a sandbox that shares the workspace may hold it longer."""
        box, device = str(record["id"]), record.get("loop")
        if any(other.record.get("workspace") == box for other in self._boxes.values()):
            return
        image = self.paths.disk(box)
        deadline = asyncio.get_running_loop().time() + LOOP_TIMEOUT
        while image.exists() and (devices := disks.attached(image, device)):
            if asyncio.get_running_loop().time() > deadline:
                raise Internal(f"the disk of sandbox {box} stays attached", details={"devices": devices})
            await asyncio.sleep(0.002)

    def _verify(self, box: str, keep_disk: bool) -> None:
        places = [self.paths.run(box), *self._states(box)]
        if not keep_disk:
            places.append(self.paths.box(box))
        left = [str(place) for place in places if place.exists()]
        if self.groups.open(box).doors():
            left.append(self.groups.path(box))
        if left:
            raise Internal(f"sandbox {box} is not wholly gone", details={"left": left})

    async def sweep(self, known: set[str], *, keep_disk: bool = False) -> list[str]:
        """Everything with our mark that nobody knows; with `keep_disk` only what runs, and its files stay."""
        found = self.groups.names() if keep_disk else self.groups.names() | self.ids.holders()
        kept = [] if keep_disk else [self.paths.boxes]
        for directory in [self.paths.runs, *kept, *(self.paths.engine / name for name in self._engines)]:
            with suppress(FileNotFoundError):
                found.update(os.listdir(directory))
        strays = sorted(box for box in found - known - self._making - set(self._boxes) if ID.fullmatch(box))
        for box in strays:
            try:
                await self.destroy({"id": box}, keep_disk=keep_disk)
            except (Internal, OSError) as error:  # one that resists must not shelter the others
                log.error("sweep: sandbox %s is not wholly gone: %s", box, error)
        return strays

    # Runtimes

    async def runtimes(self) -> list[RuntimeStatus]:
        """All of them, strongest first. One that `auto` never takes is told as far as it is known."""
        elsewhere = [RuntimeStatus(name, False, why) for name, why in registry.ELSEWHERE.items()]
        return [*await asyncio.gather(*(self.probes.told(name) for name in self._runtimes)), *elsewhere]

    async def pick(self, runtime: str) -> str:
        """The strongest that works, for `auto`; a named one is never replaced by another."""
        known = self._runtimes
        if runtime in registry.ELSEWHERE and runtime not in known:
            raise Unsupported(registry.ELSEWHERE[runtime], hint=f"use --runtime {' or '.join(known)}")
        if runtime not in ("auto", "", *known):
            raise InvalidArgument(
                f"no runtime is called {runtime[:64]!r}", hint=", ".join(("auto", *known, *registry.ELSEWHERE))
            )
        reasons, fix = [], ""
        for name in [runtime] if runtime in known else [one for one in known if known[one].automatic]:
            status = await self.probes.status(name)
            if status.works:
                return name
            reasons.append(f"the {name} runtime does not work here: {status.why}")
            fix = status.fix
        if not reasons:
            raise Unsupported("no runtime here is chosen by itself", hint=f"use --runtime {' or '.join(known)}")
        raise Unsupported("; ".join(reasons), hint=fix)

    def capabilities(self, runtime: str) -> Capabilities:
        return self._runtimes[runtime].capabilities

    async def network(self) -> NetworkStatus:
        return await self.links.status()

    # Warm sandboxes

    def prewarm(self, spec: BoxSpec, count: int = 0) -> None:
        self.pool.prewarm(spec, count)

    def warm_for(self, spec: BoxSpec) -> int:
        return self.pool.ready_for(spec)

    def warmth(self) -> Mapping[str, object]:
        return self.pool.status()

    async def drain(self) -> None:
        await self.pool.drain()

    async def _engine(self, runtime: str) -> Engine:
        return await self.probes.engine(await self.pick(runtime))


def _ours(record: Record) -> LocalRecord:
    """Return a record of this backend's, which alone knows what is in it."""
    return cast("LocalRecord", record)


def _check(spec: BoxSpec, runtime: str, can: Capabilities) -> None:
    """Raise Unsupported for what the runtime cannot do, before anything is made."""
    policy = spec.policy
    can.check(
        runtime,
        mounts=bool(spec.mounts),
        ports=bool(policy.host_ports),
        shared=spec.workspace.kind == "shared",
        hosts=policy.network != "none",
        kept=spec.workspace.disk is not None,
        memory=spec.memory is not None,
    )


def _engine_state(directory: Path) -> tuple[int, int]:
    """A sandbox's first process and its start time, as runc (state.json) or crun (status) wrote them down."""
    runc = directory / "state.json"
    state = json.loads((runc if runc.exists() else directory / "status").read_bytes())
    if runc.exists():
        return int(state["init_process_pid"]), int(state["init_process_start"])
    return int(state["pid"]), int(state["process-start-time"])


@asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    """The agent has so long to answer."""
    try:
        async with asyncio.timeout(AGENT_TIMEOUT):
            yield
    except TimeoutError:
        raise Unavailable("the sandbox's agent did not come up in time") from None


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Finish the work even if the caller is cancelled again and again meanwhile."""
    task = asyncio.create_task(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(task)


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
