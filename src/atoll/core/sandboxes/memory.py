"""Checkpoints and forks: memory, processes and disk of a sandbox at one moment, and new sandboxes that go on from there.

A new one is an ordinary create under today's rules: what it may reach is at most what the first one may now, and nothing but
its insides is carried over: no name, alias, approval, port, key or lifetime. Connections to the outside are reset in it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll import errors
from atoll.accounts import DISK, Lease
from atoll.accounts import owner as owner_account
from atoll.backends.contract import Memory, Record
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal, new_id
from atoll.core.sandboxes.state import Live
from atoll.core.sandboxes.verbs import Sandboxes, StartFrom
from atoll.core.workspaces.checkpoint_shelf import Body, CheckpointShelf, Kept
from atoll.core.workspaces.index import check_name
from atoll.model import (
    CheckpointInfo,
    CreateSandbox,
    Fork,
    RestoreCheckpoint,
    SandboxInfo,
    SaveCheckpoint,
    convert,
)

log = logging.getLogger("atoll.memory")

AT_ONCE = 4  # forks that are started side by side
Infos = list[CheckpointInfo]
Sandbox = list[SandboxInfo]


@dataclass(frozen=True, slots=True)
class Taken:
    """A memory that was just saved, and how a sandbox is made from it."""

    memory: str
    body: Body


class Checkpoints(Part):
    """Every checkpoint, each seen by its owner alone."""

    def __init__(self, sandboxes: Sandboxes, home: Path, recover: Callable[[Live], Awaitable[None]]) -> None:
        self._sandboxes = sandboxes
        self._recover = recover  # finds the commands that go on in a new sandbox
        self._shelf = CheckpointShelf(home)
        self._leases: dict[str, Lease] = {}
        self._busy: set[tuple[str, str]] = set()
        self._under_way: set[str] = set()  # memories that no checkpoint names yet

    # The verbs

    @verb("checkpoints.save")
    async def save(self, who: Principal, ref: str, request: SaveCheckpoint) -> CheckpointInfo:
        """Keep memory, processes and disk of a running sandbox under a name. It goes on."""
        live = self._sandboxes.reach(who, ref)
        name = check_name(request.name or f"{live.id[:8]}-{int(time.time())}")
        if (who.owner, name) in self._busy:
            raise errors.AlreadyExists(f"checkpoint {name!r} is being written right now")
        old = self._find(who.owner, name)
        if old is not None and not request.force:
            raise errors.AlreadyExists(f"there is a checkpoint {name!r} already", hint="--force replaces it")
        self._busy.add((who.owner, name))
        try:
            taken = await self._take(live, self._shelf.key_of(who.owner))
            try:
                kept = self._describe(who.owner, name, live, taken)
                await asyncio.to_thread(self._shelf.put, kept, taken.body)
            except BaseException:
                await self._drop(taken.memory)
                raise
            finally:
                self._under_way.discard(taken.memory)
            if old is not None:
                await self._drop(old["memory"])
        finally:
            self._busy.discard((who.owner, name))
        self._sandboxes.history.record(
            live.id, who.owner, "checkpoint", name=name, bytes=kept["size_bytes"], by=who.owner
        )
        return _info(kept)

    @verb("checkpoints.list")
    async def list(self, who: Principal) -> Infos:
        """The caller's checkpoints, oldest first."""
        found = await asyncio.to_thread(lambda: [kept for kept in self._shelf.all() if kept["owner"] == who.owner])
        return [_info(kept) for kept in sorted(found, key=lambda kept: kept["created_at"])]

    @verb("checkpoints.restore")
    async def restore(self, who: Principal, name: str, request: RestoreCheckpoint | None = None) -> SandboxInfo:
        """A new sandbox that goes on from a checkpoint."""
        kept, body = await asyncio.to_thread(self._shelf.open, who.owner, check_name(name))
        spec = self._narrowed(body, request or RestoreCheckpoint())
        start = StartFrom(Memory(body["record"], self._shelf.key_of(who.owner)), body["image"])
        size = kept["size_bytes"]  # written once more, in clear, while the sandbox starts
        self._sandboxes.space.check(size, "the memory of this checkpoint")
        with self._sandboxes.accounts.lease(DISK, size, owner_account(who.owner)):
            return await self._start(who, spec, start, "restored", {"checkpoint": name, "of": kept["sandbox_id"]})

    @verb("checkpoints.remove")
    async def remove(self, who: Principal, name: str) -> int:
        """Gone at once, with its bytes. Sandboxes made from it go on. The bytes that freed."""
        if (who.owner, check_name(name)) in self._busy:
            raise errors.FailedPrecondition(f"checkpoint {name!r} is being written")
        kept = await asyncio.to_thread(self._shelf.get, who.owner, name)
        self._shelf.remove(who.owner, name)
        await self._drop(kept["memory"])
        return kept["size_bytes"]

    @verb("fork")
    async def fork(self, who: Principal, ref: str, request: Fork | None = None) -> Sandbox:
        """New sandboxes that go on from this moment of a running one, all or none."""
        live = self._sandboxes.reach(who, ref)
        taken = await self._take(live, b"")
        made: Sandbox = []
        try:
            spec = self._narrowed(taken.body, RestoreCheckpoint())
            start = StartFrom(Memory(taken.body["record"]), taken.body["image"])
            turn = asyncio.Semaphore(AT_ONCE)

            async def one() -> None:
                async with turn:
                    made.append(await self._start(who, spec, start, "forked", {"of": live.id}))

            tasks = [asyncio.ensure_future(one()) for _ in range((request or Fork()).count)]
            try:
                await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                for info in made:
                    await self._sandboxes.end(info.id, "failed", "not every fork could be made", who.owner)
                raise
        finally:
            await asyncio.shield(self._drop(taken.memory))
            self._under_way.discard(taken.memory)
        return made

    # The daemon

    async def recover(self) -> None:
        """After a start: count what is kept, and remove what no checkpoint names."""
        kept = await asyncio.to_thread(lambda: [*self._shelf.all()])
        for one in kept:
            try:
                self._charge(one["owner"], one["memory"], one["size_bytes"])
            except errors.Exhausted as over:
                log.warning("checkpoint %s is beyond a cap: %s", one["name"], over)
        removed = await self._sandboxes.backend.sweep_memories({one["memory"] for one in kept})
        if removed:
            log.warning("removed saved memories that no checkpoint names: %s", ", ".join(removed))

    # Inside

    async def _take(self, live: Live, key: bytes) -> Taken:
        """Save the memory of a sandbox. Nobody stops, pauses or ends it meanwhile."""
        can, runtime = live.box.capabilities, live.box.facts.runtime
        can.check(runtime, memory=True)
        async with live.changing:  # a sub-agent is made under the same lock
            if live.spec.mounts or live.spec.volumes or live.parent_id is not None or live.children:
                raise errors.FailedPrecondition(
                    "a sandbox with mounts or a shared workspace cannot be saved: its files are not its own",
                    hint="save its files with a snapshot",
                )
            if live.state != "running":
                raise live.not_running()
            with live.use():
                usage = await live.box.usage()
                size = (usage.memory_bytes or 0) + (usage.disk_bytes or 0)
                self._sandboxes.space.check(2 * size, "the memory of this sandbox")
                memory = new_id()
                self._under_way.add(memory)
                try:
                    self._charge(live.owner, memory, size)
                    record = await live.box.save_memory(memory, key)
                    self._recount(memory)
                except BaseException:
                    self._under_way.discard(memory)
                    await self._drop(memory)
                    raise
        return Taken(memory, self._body(live, record))

    def _body(self, live: Live, record: Record) -> Body:
        """What a sandbox that goes on is asked for: the request, with what the first one may reach now."""
        row = self._sandboxes.store.sandbox(live.id)
        assert row is not None
        policy = row["record"].get("policy", {})
        spec = msgspec.structs.replace(
            live.spec, runtime=row["runtime"], name=None, alias=None, request_id=None, start=True, lifetime_s=None
        )
        if policy.get("network") != "hosts":
            spec = msgspec.structs.replace(spec, network=False)
        elif not policy.get("default"):
            spec = msgspec.structs.replace(spec, hosts=[*(policy.get("hosts") or ())], more_hosts=[])
        return {"spec": msgspec.to_builtins(spec), "image": row["record"].get("image"), "record": dict(record)}

    def _narrowed(self, body: Body, request: RestoreCheckpoint) -> CreateSandbox:
        spec = convert(CreateSandbox, dict(body["spec"]))
        return msgspec.structs.replace(
            spec,
            name=request.name,
            lifetime_s=request.lifetime_s or spec.lifetime_s,
            idle_timeout_s=request.idle_timeout_s or spec.idle_timeout_s,
            network=spec.network and request.network,
        )

    async def _start(
        self, who: Principal, spec: CreateSandbox, start: StartFrom, kind: str, data: dict[str, object]
    ) -> SandboxInfo:
        info = await self._sandboxes.create(who, spec, start_from=start)
        live = self._sandboxes.live.get((who.owner, info.id))
        if live is not None:
            try:
                await self._recover(live)
            except BaseException:
                await self._sandboxes.end(info.id, "failed", "its commands could not be found", who.owner)
                raise
        self._sandboxes.history.record(info.id, who.owner, kind, **data, connections="reset", by=who.owner)
        return await self._sandboxes.get(who, info.id)

    def _describe(self, owner: str, name: str, live: Live, taken: Taken) -> Kept:
        return {
            "owner": owner,
            "name": name,
            "memory": taken.memory,
            "created_at": time.time(),
            "sandbox_id": live.id,
            "runtime": live.box.facts.runtime,
            "image": live.spec.image,
            "size_bytes": self._sandboxes.backend.memory_used(taken.memory),
        }

    def _find(self, owner: str, name: str) -> Kept | None:
        try:
            return self._shelf.get(owner, name)
        except errors.NotFound:
            return None

    def _charge(self, owner: str, memory: str, size: int) -> None:
        self._leases[memory] = self._sandboxes.accounts.lease(DISK, size, owner_account(owner))

    def _recount(self, memory: str) -> None:
        """Charge what it really takes."""
        lease, used = self._leases[memory], self._sandboxes.backend.memory_used(memory)
        if used > lease.amount:
            lease.grow(used - lease.amount)
        else:
            lease.shrink(lease.amount - used)

    async def _drop(self, memory: str) -> None:
        await self._sandboxes.backend.forget_memory(memory)
        if (lease := self._leases.pop(memory, None)) is not None:
            lease.end()


def _info(kept: Kept) -> CheckpointInfo:
    return CheckpointInfo(
        name=kept["name"],
        created_at=kept["created_at"],
        sandbox_id=kept["sandbox_id"],
        runtime=kept["runtime"],
        image=kept["image"],
        size_bytes=kept["size_bytes"],
    )
