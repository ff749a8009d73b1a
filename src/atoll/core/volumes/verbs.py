"""The verbs of volumes, and which of them a new sandbox gets.

A volume is a disk of its own size, promised in full and charged to its owner from create to removal. It is removed only
while no sandbox, running or stopped, has it.
"""

import asyncio
import hashlib
import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atoll import errors
from atoll.accounts import DISK, owner
from atoll.backends.contract import HoldsVolumes, Mount
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.credentials import KeyHolder
from atoll.core.access.principals import Principal, new_id
from atoll.model import CreateSandbox, CreateVolume, VolumeInfo

if TYPE_CHECKING:
    from atoll.core import Core

log = logging.getLogger("atoll.volumes")

MOST = 100  # of one owner


class _Kept(msgspec.Struct):
    owner: str
    volumes: dict[str, VolumeInfo] = {}  # by id


class Volumes(Part):
    """Every volume, each seen by its owner alone."""

    def __init__(self, core: "Core", home: Path) -> None:
        self._core = core
        self._directory = home / "volumes"
        self._kept: dict[str, _Kept] = {}
        self._changing = asyncio.Lock()
        core.sandboxes.boxes.volumes = self.mounts
        core.sandboxes.volumes_mb = self._total_mb

    def start(self) -> None:
        """Take over the volumes of earlier daemons, with their promises and charges."""
        for path in sorted(self._directory.glob("*.json")):
            try:
                kept = msgspec.convert(json.loads(path.read_bytes()), _Kept)
            except (ValueError, msgspec.ValidationError) as error:
                log.error("volumes in %s cannot be read: %s", path.name, error)
                continue
            self._kept[kept.owner] = kept
            for volume in kept.volumes.values():
                self._core.sandboxes.space.hold(volume.id, volume.size_mb << 20)
                with suppress(errors.Exhausted):  # of an operator who has lowered the cap
                    self._core.accounts.charge(DISK, volume.size_mb << 20, owner(kept.owner))

    # The verbs

    @verb("volumes.create")
    async def create(self, who: Principal, asked: CreateVolume) -> VolumeInfo:
        """A new, empty volume."""
        backend = self._backend()
        kept = self._kept.setdefault(who.owner, _Kept(who.owner))
        size_mb = asked.size_mb or self._core.config.storage.volume_mb
        size = size_mb << 20
        async with self._changing:
            if any(volume.name == asked.name for volume in kept.volumes.values()):
                raise errors.AlreadyExists(f"there is a volume {asked.name!r} already", hint="choose another name")
            if len(kept.volumes) >= MOST:
                raise errors.Exhausted(f"{MOST} volumes of yours are kept already", hint="remove one first")
            self._check_quota(who, size_mb)
            volume = VolumeInfo(id=new_id(), name=asked.name, size_mb=size_mb, created_at=time.time())
            self._core.sandboxes.space.check(size, f"a volume of {size_mb} MB")
            self._core.accounts.charge(DISK, size, owner(who.owner))
            try:
                await backend.create_volume(volume.id, size_mb)
                kept.volumes[volume.id] = volume
                await self._save(kept)
            except BaseException:
                kept.volumes.pop(volume.id, None)
                self._core.accounts.release(DISK, size, owner(who.owner))
                await self._core.sandboxes.tasks.whole(backend.remove_volume(volume.id))
                raise
            self._core.sandboxes.space.hold(volume.id, size)
        return volume

    @verb("volumes.list")
    async def list(self, who: Principal) -> list[VolumeInfo]:
        kept = self._kept.get(who.owner)
        return [self._shown(who, volume) for volume in kept.volumes.values()] if kept is not None else []

    @verb("volumes.get")
    async def get(self, who: Principal, name: str) -> VolumeInfo:
        """A volume by name or id."""
        return self._shown(who, self._known(who, name))

    @verb("volumes.remove")
    async def remove(self, who: Principal, name: str) -> VolumeInfo:
        """Remove a volume with everything in it."""
        async with self._changing:
            volume = self._known(who, name)
            if users := self._users(who, volume):
                raise errors.FailedPrecondition(
                    f"the volume {volume.name!r} is in use by {', '.join(users[:5])}",
                    hint="destroy these sandboxes first; stopped ones count too",
                )
            await self._core.sandboxes.tasks.whole(self._backend().remove_volume(volume.id))
            kept = self._kept[who.owner]
            del kept.volumes[volume.id]
            await self._save(kept)
            self._core.sandboxes.space.forget(volume.id)
            self._core.accounts.release(DISK, volume.size_mb << 20, owner(who.owner))
        return volume

    def mounts(self, who: Principal, spec: CreateSandbox) -> tuple[Mount, ...]:
        """Return the volumes of a request as mounts; NotFound for one that is not the caller's."""
        return tuple(
            Mount("", one.target, one.read_only, 0, 0, volume=self._known(who, one.name).id) for one in spec.volumes
        )

    # Behind the verbs

    def _backend(self) -> HoldsVolumes:
        backend = self._core.backend
        if not isinstance(backend, HoldsVolumes):
            raise errors.Unsupported("this daemon's sandboxes have no volumes")
        return backend

    def _known(self, who: Principal, name: str) -> VolumeInfo:
        kept = self._kept.get(who.owner)
        for volume in kept.volumes.values() if kept is not None else ():
            if name in (volume.id, volume.name):
                return volume
        raise errors.NotFound(f"no volume {name!r:.80}", hint=f"make it with `atoll volume create {name:.80}`")

    def _users(self, who: Principal, volume: VolumeInfo) -> tuple[str, ...]:
        """Return the sandboxes that have a volume."""
        return tuple(
            row["name"] or row["id"]
            for row in self._core.store.living()
            if row["owner"] == who.owner
            and any(one["name"] in (volume.id, volume.name) for one in row["spec"].get("volumes", ()))
        )

    def _shown(self, who: Principal, volume: VolumeInfo) -> VolumeInfo:
        return msgspec.structs.replace(volume, used_by=[*self._users(who, volume)])

    def _total_mb(self, owner: str) -> int:
        """Return the size of all volumes of an owner."""
        kept = self._kept.get(owner)
        return sum(volume.size_mb for volume in kept.volumes.values()) if kept is not None else 0

    def _check_quota(self, who: Principal, size_mb: int) -> None:
        """Refuse a volume that takes a key's disks over its quota."""
        most = who.quotas.get("disk_mb") if isinstance(who, KeyHolder) else None
        if most is None:
            return
        used = self._total_mb(who.owner)
        for row in self._core.store.living():
            held = row["record"].get("limits", {}).get("disk_mb") if row["owner"] == who.owner else None
            used += int(held["value"]) if held is not None else 0
        if used + size_mb > most:
            raise errors.Exhausted(
                f"this key may have {most:g} MB of disk at once, {used} are in use", hint="ask for less"
            )

    async def _save(self, kept: _Kept) -> None:
        from atoll.images.layers.tree import write_atomically

        self._directory.mkdir(mode=0o711, exist_ok=True)
        path = self._directory / f"{hashlib.sha256(kept.owner.encode()).hexdigest()[:32]}.json"
        await asyncio.to_thread(write_atomically, path, msgspec.json.encode(kept), 0o600)
