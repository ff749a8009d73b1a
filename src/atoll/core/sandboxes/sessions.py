"""The session that code runs in when its caller names none: a tenant's own, found again by every surface.

A tenant has one such session. It is found by its label, started again when it rests, and made when there is none. Callers
that come at once get the same one. A caller without a tenant has one of its own, which it names in `before`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

from atoll import errors, labels
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.policy.images import WATCHER, Step
from atoll.core.sandboxes.verbs import Sandboxes, watch_image
from atoll.model import CreateFromManifest, CreateSandbox, ObtainSession, Replaced, SandboxInfo, SessionInfo

if TYPE_CHECKING:
    from atoll.core.workspaces.manifest import Manifests

LOST = "the files"


class Sessions(Part):
    """The default sessions of every owner."""

    def __init__(self, sandboxes: Sandboxes, manifests: "Manifests") -> None:
        self._sandboxes = sandboxes
        self._manifests = manifests
        self._locks: WeakValueDictionary[tuple[str, str, str], asyncio.Lock] = WeakValueDictionary()

    @verb("sessions.find")
    async def find(self, who: Principal, tenant: str, holder: str = "") -> SandboxInfo | None:
        """Return the tenant's session as it is: the newest that runs, else the newest that rests; None: there is none."""
        if not tenant:
            return None
        mine = [
            info
            for info in await self._sandboxes.list(who)
            if labels.tenant_of(info.labels) == tenant
            and info.labels.get(labels.HOLDER, "") == holder
            and info.parent_id is None
        ]
        mine.sort(key=lambda info: info.created_at, reverse=True)
        return next((info for state in ("running", "stopped") for info in mine if info.state == state), None)

    @verb("sessions.obtain")
    async def obtain(self, who: Principal, asked: ObtainSession) -> SessionInfo:
        """Return a running session: the one before, the tenant's own, or a new one; and what became of the one before."""
        lock = asyncio.Lock()
        if asked.tenant:
            lock = self._locks.setdefault((who.owner, asked.tenant, asked.holder), lock)
        async with lock:
            replaced = None
            if asked.before is not None:
                kept = await self._running(who, asked.before)
                if isinstance(kept, SandboxInfo):
                    return SessionInfo(sandbox=kept, created=False)
                replaced = Replaced(id=asked.before, reason=kept, lost=LOST)
            there = await self.find(who, asked.tenant, asked.holder)
            if there is not None:
                found = await self._running(who, there.id)
                if isinstance(found, SandboxInfo):
                    return SessionInfo(sandbox=found, created=False, replaced=replaced)
            made = await self._make(who, asked)
            return SessionInfo(sandbox=made, created=True, replaced=replaced)

    def obtain_watched(self, who: Principal, asked: ObtainSession) -> AsyncIterator[Step | SessionInfo]:
        """The same, with how far its image and its filling are; the session last."""
        return watch_image(lambda: self.obtain(who, asked))

    async def _make(self, who: Principal, asked: ObtainSession) -> SandboxInfo:
        """Return a new session. One with a manifest is filled here, under the lock, so that nobody meets it half filled."""
        spec = _spec(asked)
        if not asked.manifest and not asked.entries:
            return await self._sandboxes.create(who, spec)
        wanted = CreateFromManifest(sandbox=spec, manifest=asked.manifest, entries=asked.entries)
        tell = WATCHER.get()
        items = self._manifests.create(who, wanted)
        async with aclosing(items):  # type: ignore[type-var]  # it is a generator
            async for item in items:
                if isinstance(item, SandboxInfo):
                    return item
                if tell is not None:
                    tell(item)
        raise AssertionError("a manifest ends with its sandbox or an error")

    async def _running(self, who: Principal, ref: str) -> SandboxInfo | str:
        """Return a sandbox that runs, started again if it rests; else why it cannot."""
        sandboxes = self._sandboxes
        try:
            info = await sandboxes.get(who, ref)
            if info.state in ("stopping", "stopped"):
                await self._start(who, ref)
                info = await sandboxes.get(who, ref)
            elif info.state == "paused":
                info = await sandboxes.resume(who, ref)
        except errors.NotFound:
            return "not_found"
        except errors.SandboxGone as gone:
            return str(gone.details.get("reason") or "lost")
        if info.state == "running":
            return info
        return info.end.kind if info.end is not None else info.state

    async def _start(self, who: Principal, ref: str) -> None:
        try:
            await self._sandboxes.wake(who, ref)  # it waits for one that is being stopped or started
        except errors.FailedPrecondition:
            await self._sandboxes.start(who, ref)


def _spec(asked: ObtainSession) -> CreateSandbox:
    """Return the request of a new session. A tenant's keeps its files while nobody uses it."""
    spec = asked.sandbox
    changes: dict[str, object] = {"labels": {**spec.labels, **labels.session_labels(asked.tenant, asked.holder)}}
    if spec.idle_timeout_s is None:
        changes["idle_timeout_s"] = float(labels.IDLE_S)
    if not spec.persistent:
        changes["keep"] = spec.keep or bool(asked.tenant)
        if spec.lifetime_s is None:
            changes["lifetime_s"] = float(labels.LIFETIME_S)
    return msgspec.structs.replace(spec, **changes)
