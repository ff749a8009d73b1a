"""A way into the functions: its settings, the sandboxes made through it, and what runs in them right now.

The local door belongs to a user and stays. A worker's door lives as long as its worker is connected: when that goes, all
its sandboxes end. The sandboxes themselves are core's, found by a label and by their UUID as an alias, so that a daemon
that restarts still knows them.
"""

import asyncio
import logging
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from atoll import errors
from atoll.core import Core
from atoll.core.access.principals import Principal
from atoll.core.policy.images import StoredImages
from atoll.model import SandboxInfo
from atoll.surfaces.iii import settings as config
from atoll.surfaces.iii.failure import Failure
from atoll.surfaces.iii.settings import Settings

log = logging.getLogger("atoll.functions")

LABEL, ID, IMAGE, TITLE, INSTANCE = "iii", "iii-id", "iii-image", "iii-name", "iii-instance"
REMEMBERED = 1024
LOCAL = "local"
SCAN = 10.0


class Door:
    """One caller's way in. Everything here is of the present moment; what lasts is in core's store."""

    def __init__(self, core: Core, who: Principal, name: str, settings: Settings, instance: str = "") -> None:
        self.core = core
        self.who = who
        self.name = name
        self.settings = settings
        self.instance = instance
        self.last_exec: dict[str, float] = {}
        self.ending: dict[str, asyncio.Task[Any]] = {}
        self._past: dict[str, None] = {}
        self._past_read = False
        self._traffic: dict[str, int] = {}
        self._watcher: asyncio.Task[None] | None = None

    # Sandboxes

    def find(self, sandbox: str) -> str:
        """An id that was asked for, as core knows it: S002 when it was never ours, S004 when it is no more."""
        try:
            row = self.core.sandboxes.known(self.who, sandbox)
        except errors.NotFound:
            code, told = ("S004", "has ended") if self._was_ours(sandbox) else ("S002", "is not known")
            raise Failure(code, f"sandbox {sandbox} {told}") from None
        if row["spec"].get("labels", {}).get(LABEL) != self.name:
            raise Failure("S002", f"sandbox {sandbox} is not known")
        if sandbox in self.ending or row["state"] in ("ended", "ending", "stopping", "stopped"):
            raise Failure("S004", f"sandbox {sandbox} has ended" + (f" ({row['end_kind']})" if row["end_kind"] else ""))
        return str(row["id"])

    def remember(self, sandbox: str) -> None:
        """The newest ids stay known after their sandboxes have ended."""
        self._past[sandbox] = None
        while len(self._past) > REMEMBERED:
            del self._past[next(iter(self._past))]

    def _was_ours(self, sandbox: str) -> bool:
        if not self._past_read:  # by a daemon before this one
            self._past_read = True
            newer = list(self._past)
            for labels in self.core.sandboxes.labels(self.who, "ended")[-10 * REMEMBERED :]:
                if labels.get(LABEL) == self.name:
                    self.remember(labels.get(ID, ""))
            for one in newer:
                self._past.pop(one, None)
                self.remember(one)
        return sandbox in self._past

    async def alive(self) -> list[tuple[str, SandboxInfo]]:
        """Those of this door that live, by creation, each with its UUID."""
        found = await self.core.sandboxes.list(self.who, state="active")
        ours = [(info.labels.get(ID, ""), info) for info in found if info.labels.get(LABEL) == self.name]
        return [(uuid, info) for uuid, info in ours if uuid not in self.ending and info.state in ("running", "paused")]

    @contextmanager
    def place(self, sandbox: str) -> Iterator[None]:
        """Hold one of the door's places for a new sandbox; S400 at once when none is free."""
        most = self.settings.max_concurrent_sandboxes
        with ExitStack() as held:
            try:
                held.enter_context(self.core.places.sandbox(self.who, LABEL, self.name, sandbox, most))
            except errors.Exhausted as full:
                note = f"max_concurrent_sandboxes is {most}: stop one"
                raise Failure("S400", full.message, note=note) from None
            yield

    @contextmanager
    def slot(self, sandbox: str) -> Iterator[None]:
        """Hold a place for one command; S003 at once when none is free."""
        with ExitStack() as held:
            try:
                held.enter_context(self.core.places.command(self.who, sandbox, self.settings.exec_slots))
            except errors.Exhausted as full:
                raise Failure("S003", full.message) from None
            self.last_exec[sandbox] = time.time()
            yield

    async def end(self, sandbox: str) -> None:
        """Destroy it to the end, even when the caller goes away."""
        task = self.ending.get(sandbox)
        if task is None:
            self.last_exec.pop(sandbox, None)
            task = self.ending[sandbox] = asyncio.ensure_future(self.core.sandboxes.destroy(self.who, sandbox))

            def done(ended: "asyncio.Task[Any]") -> None:
                del self.ending[sandbox]
                error = None if ended.cancelled() else ended.exception()
                if error is not None and not isinstance(error, errors.NotFound):
                    log.error("sandbox %s is not gone yet: %s", sandbox, error)

            task.add_done_callback(done)
        with suppress(errors.AtollError):
            await asyncio.shield(task)

    async def close(self) -> None:
        """The worker has gone: so have its sandboxes."""
        if self._watcher is not None:
            self._watcher.cancel()
        living = self.core.sandboxes.live  # empty when it is the daemon that goes: then all go on
        ours = [uuid for uuid, info in await self.alive() if (self.who.owner, info.id) in living]
        await asyncio.gather(*(self.end(uuid) for uuid in ours))

    # Idleness: core counts commands and files, the contract counts network traffic as use too

    def watch(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch_traffic())

    async def _watch_traffic(self) -> None:
        while True:
            await asyncio.sleep(SCAN)
            connected = [info for _, info in await self.alive() if info.policy.get("network") == "hosts"]
            if not connected:
                return
            for info in connected:
                await self._note_traffic(info.id)

    async def _note_traffic(self, sandbox: str) -> None:
        with suppress(errors.AtollError):
            used = (await self.core.hosts.get(self.who, sandbox)).used
            total = sum(value for host in used.values() for value in host.values() if isinstance(value, int))
            if total != self._traffic.get(sandbox, 0):
                self.core.sandboxes.touch(self.who, sandbox)
            self._traffic[sandbox] = total


class Functions:
    """The doors of one daemon."""

    _of: "weakref.WeakKeyDictionary[Core, Functions]" = weakref.WeakKeyDictionary()

    def __init__(self, core: Core) -> None:
        self._home, self._core = core.home, weakref.ref(core)
        self._doors: dict[tuple[str, str], Door] = {}

    @classmethod
    def of(cls, core: Core) -> "Functions":
        found = cls._of.get(core)
        if found is None:
            found = cls._of[core] = cls(core)
        return found

    def door(self, who: Principal, name: str = LOCAL) -> Door:
        """The door of that name; the local one is there for everybody, with `$ATOLL_HOME/iii.yaml` as its settings."""
        found = self._doors.get((who.owner, name))
        if found is not None:
            return found
        core = self._core()
        if name != LOCAL or core is None:
            raise errors.NotFound(f"no door {name!r:.80}: its worker has gone")
        found = self._doors[who.owner, LOCAL] = Door(core, who, LOCAL, _local_settings(self._home))
        self.allow_plain(config.insecure_registries())  # of whoever started the daemon
        return found

    async def open(self, who: Principal, name: str, instance: str, settings: Settings) -> Door:
        """A worker's door. What a worker of this name left behind when it was killed is removed first."""
        core = self._core()
        assert core is not None
        if name == LOCAL or (who.owner, name) in self._doors:
            raise errors.AlreadyExists(f"there is a worker {name!r:.80} already")
        door = self._doors[who.owner, name] = Door(core, who, name, settings, instance)
        for uuid, info in await door.alive():
            if info.labels.get(INSTANCE) != instance:
                await door.end(uuid)
        return door

    def allow_plain(self, registries: Iterable[str]) -> frozenset[str]:
        """Images may come from these without encryption; those for which that is new."""
        core = self._core()
        if core is None or not isinstance(core.images, StoredImages) or not registries:
            return frozenset()
        return core.images.allow_plain(registries)

    def forbid_plain(self, registries: frozenset[str]) -> None:
        core = self._core()
        if core is not None and isinstance(core.images, StoredImages):
            core.images.forbid_plain(registries)

    async def shut(self, door: Door) -> None:
        self._doors.pop((door.who.owner, door.name), None)
        await door.close()


def _local_settings(home: Path) -> Settings:
    path = home / "iii.yaml"
    if not path.exists():
        return Settings()
    found, warnings = config.read(path)
    for warning in warnings:
        log.warning("%s", warning)
    return found
