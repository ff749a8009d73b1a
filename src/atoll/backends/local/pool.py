"""Warm sandboxes: started, unused, without a network, waiting for a caller.

A claim takes one out and gives it what the caller asked for: processes, environment, end, network policy. What cannot be given to a
started sandbox (a host name, mounts, another size of memory or disk, other processors, a shared workspace, another seccomp profile) is
part of the key or rules the pool out, so that a claimed sandbox is the one a cold start would have made. A used sandbox never comes
back.

Spares have no record in the store: whatever a killed daemon leaves of them, the next one's sweep removes.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from atoll import errors
from atoll.backends.contract import BoxSpec, Capabilities, First, Record, Workspace
from atoll.backends.local.box import LocalBox
from atoll.backends.local.paths import new_id
from atoll.guest import GuestClient, Process
from atoll.guest.process import ProcessRequest
from atoll.model import Policy

log = logging.getLogger("atoll.pool")

MAX_AGE = 1800.0  # a spare that waited this long is replaced
RATE_WINDOW = 60.0  # claims of this long ago say how many spares are wanted
COOL_DOWN = 600.0  # a key nobody has claimed for this long keeps no spares
CALM = 0.05  # after a claim its caller comes first, for this long, while other spares are ready
REST_AFTER = 10.0  # by then its interpreters have started, and it sleeps (`idle_freeze.py`)
FIRST_MS = 180_000
LOW_MEMORY = 0.10  # with less than this share of the machine's memory free, spares are given up


Make = Callable[[BoxSpec], Awaitable[LocalBox]]
Destroy = Callable[[Record], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's `[pool]`: how many spares each kind of sandbox keeps, at least and at most."""

    floor: int = 2
    ceiling: int = 8

    @staticmethod
    def of(table: Mapping[str, Any]) -> "Settings":
        for key, value in table.items():
            if key not in ("floor", "ceiling"):
                raise errors.InvalidArgument(
                    f"config.toml: unknown key `pool.{key}`", hint="known are pool.floor and pool.ceiling"
                )
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 256:
                raise errors.InvalidArgument(f"config.toml: pool.{key} is a number from 0 to 256")
        made = Settings(**table)
        return made if made.ceiling >= made.floor else Settings(made.floor, made.floor)


@dataclass(frozen=True, slots=True)
class Key:
    """The properties that a started sandbox cannot change."""

    runtime: str
    image: str  # its digest, else its name
    disk_mb: int
    disk_asked: bool  # an ordinary user's disk is of another kind when its size has to be held
    files: int
    seen: tuple[float, ...]  # memory, processors and the size of /dev/shm, as programs inside see them
    pids: int  # 0 where the number of processes can be changed
    read_only_root: bool
    seccomp: str
    no_capabilities: bool
    env: frozenset[tuple[str, str]]  # the image's and the operator's: its waiting interpreters have it

    @staticmethod
    def of(spec: BoxSpec, can: Capabilities) -> "Key | None":
        """The key of a sandbox that may come from the pool; None if it may not."""
        if not can.spares or spec.mounts or spec.workspace.kind != "own" or spec.hostname or spec.memory is not None:
            return None
        limits = spec.limits
        seen = (limits.memory_mb, limits.cpus, limits.shm_mb)
        return Key(
            spec.runtime, spec.image.digest or spec.image.name, limits.disk_mb, "disk_mb" in spec.required, limits.files, seen,
            0 if "pids" in can.resizes else limits.pids, spec.read_only_root, spec.seccomp, spec.no_capabilities,
            frozenset(spec.base_env.items()),
        )  # fmt: skip


@dataclass(slots=True)
class Shelf:
    """The spares of one key, the pattern they are made from, and when they were asked for."""

    pattern: BoxSpec
    spares: deque[tuple[float, LocalBox]] = field(default_factory=deque)
    claims: deque[float] = field(default_factory=deque)
    least: int = 0  # how many a person asked for


class Pool:
    """Fills itself in the background, one at a time, never while a caller waits for a cold start."""

    def __init__(self, make: Make, destroy: Destroy, can: Callable[[str], Capabilities], settings: Settings) -> None:
        self._make = make
        self._destroy = destroy
        self._can = can
        self._settings = settings
        self._shelves: dict[Key, Shelf] = {}
        self._wake = asyncio.Event()
        self._filler: asyncio.Task[None] | None = None
        self.enabled = False
        self._asleep: set[str] = set()
        self._reserved: dict[str, LocalBox] = {}
        self._cold = 0  # callers' cold starts under way
        self.counts: dict[str, int] = defaultdict(int)  # hits, misses, made, discarded, failed

    def enable(self) -> None:
        """From now on there are spares; without this every create is a cold one."""
        if self._settings.ceiling > 0 and not self.enabled:
            self.enabled = True
            self._filler = asyncio.create_task(self._fill())

    def _key(self, spec: BoxSpec) -> Key | None:
        return Key.of(spec, self._can(spec.runtime))

    def reserve(self, spec: BoxSpec) -> str | None:
        """Set a spare for this aside; its id, or None. Either way the pool learns that such a sandbox is wanted."""
        key = self._key(spec) if self.enabled else None
        if key is None:
            return None
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = Shelf(spec)
        shelf.claims.append(time.monotonic())
        box = shelf.spares.popleft()[1] if shelf.spares else None
        if box is not None:
            self._asleep.discard(box.id)
            self._reserved[box.id] = box
        self.counts["misses" if box is None else "hits"] += 1
        self._wake.set()
        return None if box is None else box.id

    def take(self, box: str) -> LocalBox | None:
        """The spare that was set aside under this id, once."""
        return self._reserved.pop(box, None)

    async def release(self, box: str) -> None:
        """Give up a spare that was set aside in vain. It is never used for another caller."""
        if (spare := self.take(box)) is not None:
            await self.discard(spare)

    @contextmanager
    def hold_refill(self) -> Iterator[None]:
        """Begin no spare while a caller waits for a cold start."""
        self._cold += 1
        try:
            yield
        finally:
            self._cold -= 1
            self._wake.set()

    def status(self) -> Mapping[str, object]:
        ready = sum(len(shelf.spares) for shelf in self._shelves.values())
        kinds = [
            {"runtime": key.runtime, "disk_mb": key.disk_mb, "ready": len(shelf.spares), "wanted": self._wanted(shelf)}
            for key, shelf in self._shelves.items()
        ]
        counts = {name: self.counts[name] for name in ("hits", "misses", "made", "discarded", "failed")}
        bounds = {"floor": self._settings.floor, "ceiling": self._settings.ceiling}
        return {"enabled": self.enabled, "ready": ready, **counts, "kinds": kinds, **bounds}

    def ready_for(self, spec: BoxSpec) -> int:
        """Return how many spares would serve this sandbox."""
        shelf = self._shelves.get(key) if (key := self._key(spec)) is not None else None
        return len(shelf.spares) if shelf is not None else 0

    def prewarm(self, spec: BoxSpec, count: int = 0) -> None:
        """Keep spares of this kind from now on, at least so many."""
        if count > self._settings.ceiling:
            raise errors.InvalidArgument(
                f"{count} warm sandboxes of a kind are more than the {self._settings.ceiling} allowed here",
                hint="`ceiling` in [pool] of config.toml is the bound",
            )
        key = self._key(spec)
        if key is not None and key not in self._shelves:
            self._shelves[key] = Shelf(spec)
            self._shelves[key].claims.append(time.monotonic())
        if key is not None and count:
            self._shelves[key].least = count
        self.enable()
        self._wake.set()

    async def drain(self) -> None:
        """Give all spares up."""
        boxes = [box for shelf in self._shelves.values() for _, box in shelf.spares]
        boxes += self._reserved.values() if not self.enabled else ()
        for shelf in self._shelves.values():
            shelf.spares.clear()
        await asyncio.gather(*(self.discard(box) for box in boxes))

    async def close(self) -> None:
        self.enabled = False
        if self._filler is not None:
            self._filler.cancel()
            await asyncio.gather(self._filler, return_exceptions=True)
        await self.drain()
        self._shelves.clear()

    # Filling

    async def _fill(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._tidy()
                if self._cold == 0:
                    if (pause := self._pause()) > 0:
                        await asyncio.sleep(pause)
                        continue
                    if await self._make_one():
                        continue
            except (errors.AtollError, OSError) as error:
                self.counts["failed"] += 1
                log.warning("a spare could not be made: %s", error)
            try:
                async with asyncio.timeout(5.0):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _pause(self) -> float:
        """How long to wait before the next spare: a caller's first commands want the processors too. None is lacking yet."""
        if not all(shelf.spares for shelf in self._shelves.values()):
            return 0.0
        last = max((shelf.claims[-1] for shelf in self._shelves.values() if shelf.claims), default=0.0)
        return last + CALM - time.monotonic()

    async def _make_one(self) -> bool:
        """One more spare for the shelf that lacks most; False when nothing is wanted."""
        lacking = [(self._wanted(s) - len(s.spares), s) for s in self._shelves.values()]
        missing, shelf = max(lacking, key=lambda pair: pair[0], default=(0, None))
        if shelf is None or missing <= 0:
            return False
        box = await self._make(blank(shelf.pattern))
        self.counts["made"] += 1
        shelf.spares.append((time.monotonic(), box))
        return True

    async def _tidy(self) -> None:
        """Old and surplus spares go, and all of them when the machine runs low on memory."""
        now = time.monotonic()
        if _free_memory() < LOW_MEMORY:
            await self.drain()
            for shelf in self._shelves.values():
                shelf.claims.clear()
            return
        for key, shelf in list(self._shelves.items()):
            wanted = self._wanted(shelf)
            while shelf.spares and (len(shelf.spares) > wanted or now - shelf.spares[0][0] > MAX_AGE):
                await self.discard(shelf.spares.popleft()[1])
            if not shelf.spares and wanted == 0:
                del self._shelves[key]
            elif self._can(key.runtime).freezes_idle:
                await self._freeze_old(shelf)

    async def _freeze_old(self, shelf: Shelf) -> None:
        """Freeze spares that have been ready for a while. A spare is off the shelf while it is being frozen."""
        for made, box in list(shelf.spares):
            if box.id in self._asleep or time.monotonic() - made < REST_AFTER or (made, box) not in shelf.spares:
                continue
            shelf.spares.remove((made, box))
            try:
                await box.freeze()
            except errors.Unsupported:
                pass  # not on this host
            except BaseException:
                await asyncio.shield(self.discard(box))
                raise
            self._asleep.add(box.id)
            shelf.spares = deque(sorted([*shelf.spares, (made, box)], key=lambda spare: spare[0]))

    def _wanted(self, shelf: Shelf) -> int:
        """As many as the last minute's busiest six seconds may need, between floor and ceiling; none for a kind long unused."""
        now = time.monotonic()
        while len(shelf.claims) > 1 and now - shelf.claims[0] > RATE_WINDOW:
            shelf.claims.popleft()
        if not shelf.claims or now - shelf.claims[-1] > COOL_DOWN:
            return 0
        recent = len(shelf.claims)
        return max(self._settings.floor, shelf.least, min(self._settings.ceiling, 1 + recent // 10))

    async def discard(self, box: LocalBox) -> None:
        """Give up one that nobody has used."""
        self.counts["discarded"] += 1
        self._asleep.discard(box.id)
        try:
            await self._destroy(box.record)
        except (errors.AtollError, OSError):
            log.exception("an unused sandbox could not be removed; the next sweep will")


def blank(pattern: BoxSpec) -> BoxSpec:
    """The same kind of sandbox with nothing of the caller it was first made for."""
    warm = pattern.boot.get("warm", {})
    early = {"early": warm.get("pool", False), "node_early": warm.get("node_pool", False)}
    boot = {"env": dict(pattern.base_env), "deadline_ms": None, "warm": {**warm, **early}}
    return replace(
        pattern, id=new_id(), boot=boot, hostname="", required=pattern.required & {"disk_mb"}, policy=Policy(), mounts=(),
        workspace=Workspace(),
    )  # fmt: skip


async def run_first(client: GuestClient, first: First) -> None:
    """Run what a spare has ready. One that could not is as good as any other: what it lacks is started on use."""
    request: ProcessRequest = {"argv": [*first.argv], "cwd": "/", "user": first.user or None, "timeout_ms": FIRST_MS}
    try:
        process = await Process.start(client, new_id(), request)
        async for _ in process:
            pass
        if process.exit is None or process.exit.code:
            log.warning("a spare is without what it should have ready: %s ended with %s", first.argv, process.exit)
    except errors.AtollError as error:
        log.warning("a spare is without what it should have ready: %s", error)


async def fit(spare: LocalBox, wanted: BoxSpec) -> None:
    """Give a spare all that a cold start would have given it, before any of the caller's code runs."""
    if spare.capabilities.freezes_idle:  # it may be asleep
        with suppress(errors.Unsupported):
            await spare.thaw()
    await _both(_equip(spare, wanted), spare.client.request("configure", **wanted.boot))


async def _equip(spare: LocalBox, wanted: BoxSpec) -> None:
    if spare.facts.limits != wanted.limits:
        await spare.update_limits(wanted.limits)
    held = spare.facts.enforced
    if missing := sorted(name for name in wanted.required if not held.get(name, False)):
        raise errors.Unsupported(
            f"this host cannot hold the limit {missing[0]}", hint="leave it out, or see `atoll doctor`"
        )
    await spare.join(wanted.policy)


async def _both(*work: Coroutine[Any, Any, Any]) -> None:
    """Side by side, to the end of both or the first failure; nothing of it goes on afterwards."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _free_memory() -> float:
    """The share of the machine's memory that is available; 1 where that cannot be told."""
    facts: dict[str, int] = {}
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    facts[name] = int(rest.split()[0])
    except OSError:
        return 1.0
    return facts.get("MemAvailable", 1) / max(1, facts.get("MemTotal", 1))
