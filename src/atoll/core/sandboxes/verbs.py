"""The life of sandboxes: create, get, list, stop, start, pause, resume, extend, destroy.

A create that fails, or whose caller went away, leaves nothing.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from atoll import errors
from atoll.accounts import DISK
from atoll.accounts import owner as owner_account
from atoll.accounts import sandbox as sandbox_account
from atoll.backends.contract import Backend, Memory
from atoll.config import Config
from atoll.core.access import quotas
from atoll.core.access.approval_rules import check as check_rules
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.access.secrets import Vault
from atoll.core.builds.label import LABEL
from atoll.core.commands.history import History
from atoll.core.policy import profiles
from atoll.core.policy.images import WATCHER, Images, Step
from atoll.core.policy.network import Network
from atoll.core.sandboxes.lifecycle import NEVER_MS, Lifecycle
from atoll.core.sandboxes.provisioning import Boxes, agent_deadline
from atoll.core.sandboxes.state import Live
from atoll.core.store import rows
from atoll.core.store.database import StoreFailed
from atoll.core.store.records import LIVE, Store
from atoll.core.store.space import Space
from atoll.core.store.typed import SandboxChange, SandboxRecord, SandboxRow
from atoll.guest import GuestClient
from atoll.guest.wire import Message
from atoll.model import ALIAS, NAME, CreateSandbox, Extend, SandboxInfo, StoredPolicy

STATES = {"active": LIVE, "all": (*LIVE, "ended"), "running": ("running",), "stopped": ("stopped",),
          "paused": ("paused",), "ended": ("ended",)}  # fmt: skip


Made = TypeVar("Made")


async def watch_image(make: Callable[[], Coroutine[Any, Any, Made]]) -> AsyncIterator[Step | Made]:
    """Do work that may need an image: yield how far that is while it is fetched or built, and the work's result last."""
    steps: asyncio.Queue[Step | None] = asyncio.Queue()
    token = WATCHER.set(steps.put_nowait)
    try:
        task = asyncio.ensure_future(make())
    finally:
        WATCHER.reset(token)
    task.add_done_callback(lambda _: steps.put_nowait(None))
    try:
        while (step := await steps.get()) is not None:
            yield step
        yield task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


class Making:
    """A create under way, and how many callers wait for it."""

    def __init__(self, task: "asyncio.Task[SandboxInfo]", asked: str = "") -> None:
        self.task = task
        self.asked = asked
        self.waiting = 0
        self.given = False  # a caller has the answer


@dataclass(frozen=True, slots=True)
class StartFrom:
    """A saved memory, and the digest of the image it was made from."""

    memory: Memory
    image: str | None


class Sandboxes(Part, Lifecycle):
    """Every sandbox of this daemon."""

    def __init__(
        self,
        store: Store,
        backend: Backend,
        images: Images,
        network: Network,
        history: History,
        config: Config,
        home: Path,
        vault: Vault,
    ) -> None:
        super().__init__(store, backend, history)
        self.network = network
        self.config = config
        self.boxes = Boxes(backend, images, config, home)
        self._vault = vault
        self.keep_s = config.sandboxes.keep_s
        self.keep_bytes = config.sandboxes.keep_disk_mb << 20
        self._making: dict[tuple[str, str], Making] = {}  # by owner and request id
        self._waking: dict[str, asyncio.Task[SandboxInfo]] = {}
        self.volumes_mb: Callable[[str], int] = lambda owner: 0  # of an owner's volumes; set by those
        self.space = Space(home, config.storage.overcommit, backend.disk_used)

    # The verbs

    @verb("create")
    async def create(
        self,
        who: Principal,
        spec: CreateSandbox,
        *,
        parent: str | None = None,
        start_from: "StartFrom | None" = None,
    ) -> SandboxInfo:
        """A new sandbox, running and reachable. A caller that goes away meanwhile gets nothing left behind.

        `parent` shares its workspace; `subagents.py` decides what such a one may have. `start_from` is a saved memory it goes on from.
        """
        if spec.request_id is None:
            making = Making(self.tasks.spawn(self._create(who, spec, parent, start_from=start_from)))
        elif (found := self._repeated(who, spec)) is None:
            making = self._begin_create(who, spec, parent)
        elif isinstance(found, Making):
            making = found
        else:
            return found
        making.waiting += 1
        try:
            made = await asyncio.shield(making.task)
            making.given = True
            return made
        except asyncio.CancelledError:
            making.task.add_done_callback(lambda _: self._unwanted(who, making))
            raise
        finally:
            making.waiting -= 1

    def create_watched(self, who: Principal, spec: CreateSandbox) -> AsyncIterator[Step | SandboxInfo]:
        """The same, with how far its image is while that is fetched or built (`{"progress": ...}`); the sandbox last."""
        return watch_image(lambda: self.create(who, spec))

    @verb("get")
    async def get(self, who: Principal, ref: str) -> SandboxInfo:
        return self._info(self.known(who, ref))

    @verb("list")
    async def list(self, who: Principal, *, state: str = "active", name: str | None = None) -> list[SandboxInfo]:
        states = STATES.get(state)
        if states is None:
            raise errors.InvalidArgument(f"unknown state {state!r:.40}", hint="one of " + ", ".join(STATES))
        if name is not None and not NAME.match(name):
            raise errors.InvalidArgument(f"{name!r:.80} is no name of a sandbox")
        return [self._info(row) for row in self.store.list_sandboxes(who.owner, states, name)]

    @verb("destroy")
    async def destroy(self, who: Principal, ref: str, reason: str = "destroyed") -> SandboxInfo:
        """End it for good; again for one that has ended is no error."""
        row = self.known(who, ref)
        if row["state"] != "ended":
            await self.tasks.whole(self.end(row["id"], reason, "", who.owner))
        return self._info(self._row_after(row))

    @verb("stop")
    async def stop(self, who: Principal, ref: str) -> SandboxInfo:
        """End its processes and keep its disk."""
        row = self.known(who, ref)
        if row["state"] not in ("stopped", "stopping"):
            await self.tasks.whole(self.rest(self._living(row), "stopped", "", who.owner))
        return self._info(self._row_after(row))

    @verb("start")
    async def start(self, who: Principal, ref: str) -> SandboxInfo:
        """Start a stopped one again, on its old disk."""
        row = self.known(who, ref)
        if row["state"] == "running":
            return self._info(row)
        if row["state"] != "stopped":
            raise rows.unsuited(row)
        _refuse_build_step(row)
        return await self.tasks.whole(self._start(who, row))

    @verb("pause")
    async def pause(self, who: Principal, ref: str) -> SandboxInfo:
        """Freeze everything in it; memory stays."""
        live = self._living(self.known(who, ref))
        await self.freeze(live, who.owner)
        return await self.get(who, live.id)

    @verb("resume")
    async def resume(self, who: Principal, ref: str) -> SandboxInfo:
        live = self._living(self.known(who, ref))
        async with live.changing:
            if live.state != "running":
                _needs(live, "paused")
                await self.tasks.whole(live.box.thaw())
                live.touch()
                self.set_state(live, "running")
                self.history.record(live.id, live.owner, "resumed", by=who.owner)
        return await self.get(who, live.id)

    @verb("extend")
    async def extend(self, who: Principal, ref: str, change: Extend) -> SandboxInfo:
        """A new end, counted from now, or none; a new idle limit, or none."""
        row = self.known(who, ref)
        if row["state"] in ("ended", "ending"):
            raise rows.unsuited(row)
        values: SandboxChange = {}
        if change.lifetime_s is not msgspec.UNSET:
            values["expires_at"] = None if change.lifetime_s is None else time.time() + change.lifetime_s
        if change.idle_timeout_s is not msgspec.UNSET:
            values["idle_timeout"] = change.idle_timeout_s
        if values:
            self.store.update_sandbox(row["id"], **values)
        live = self.live.get((who.owner, row["id"]))
        if live is not None:
            live.expires_at = values.get("expires_at", live.expires_at)
            live.idle_timeout = values.get("idle_timeout", live.idle_timeout)
            live.touch()
            if live.state == "running" and "expires_at" in values:
                await live.client.request("configure", deadline_ms=agent_deadline(live.expires_at) or NEVER_MS)
        self.changed.set()
        return await self.get(who, row["id"])

    # For the other verbs

    def known(self, who: Principal, ref: str) -> SandboxRow:
        """The record of a sandbox in any state."""
        row = self.find(who, ref) if ALIAS.match(ref) else None
        if row is None or row["state"] == "creating":
            raise errors.NotFound(f"no sandbox {ref!r:.120}")
        return row

    def labels(self, who: Principal, *states: str) -> Sequence[dict[str, str]]:
        """The labels of every sandbox of the caller in these states, oldest first. It waits for nothing."""
        return [row["spec"].get("labels", {}) for row in self.store.list_sandboxes(who.owner, states, None)]

    def touch(self, who: Principal, ref: str) -> None:
        """Count a sandbox as used now, if it runs."""
        live = self.live.get((who.owner, ref))
        if live is not None:
            live.touch()

    def find(self, who: Principal, ref: str) -> SandboxRow | None:
        """By id, name or alias. Where the store cannot be read, only the living are known, by id and name."""
        try:
            row = self.store.find_sandbox(who.owner, ref)
        except StoreFailed:
            mine = [live for live in self.live.values() if live.owner == who.owner and ref in (live.id, live.name)]
            if not mine:
                raise
            row = mine[0].row()
        return row if row is None else {**row, **self.unwritten.of(row["id"])}

    def reach(self, who: Principal, ref: str) -> Live:
        """The living sandbox for an operation inside it; if there is none, the reason."""
        live = self.live.get((who.owner, ref))
        if live is None:
            live = self._living(self.known(who, ref))
        if live.state != "running":
            raise live.not_running()
        return live

    async def wake(self, who: Principal, ref: str) -> Live:
        """Return the living sandbox for an operation inside it. One that was stopped for being idle is started first."""
        live = self.live.get((who.owner, ref))
        if live is not None and live.state == "running":
            return live
        row = self.known(who, ref)
        stopping = self.live.get((who.owner, row["id"]))
        if stopping is not None and stopping.state == "stopping":
            async with stopping.changing:
                pass  # until it is at rest
            row = self.known(who, ref)
        starting = self._waking.get(row["id"])
        if starting is None and rows.starts_when_used(row):
            starting = self._waking[row["id"]] = self.tasks.spawn(self._start(who, row))
            starting.add_done_callback(lambda _: self._waking.pop(row["id"], None))
        if starting is not None:
            await asyncio.shield(starting)
        return self.reach(who, row["id"])

    @verb("usage")
    async def usage(self, who: Principal, ref: str) -> Message:
        """Return its processes and their use, and how often a warm interpreter served: as its agent counts."""
        with self.reach(who, ref).use() as client:
            return await client.request("usage")

    @asynccontextmanager
    async def visit(self, who: Principal, ref: str) -> AsyncIterator[GuestClient]:
        """The agent of a sandbox, also of a stopped one: that is started for as long, with no network and closed to others."""
        row = self.known(who, ref)
        if row["state"] != "stopped":
            with self.reach(who, ref).use() as client:
                yield client
            return
        _refuse_build_step(row)
        shut: SandboxRecord = {**row["record"], "policy": {"network": "none", "hosts": []}}
        closed: SandboxRow = {**row, "record": shut, "expires_at": None}
        self.store.update_sandbox(row["id"], state="stopping")  # if we die now, it is put to rest again
        kept = row["record"].get("box")
        try:
            live = await self._boot_again(closed)
            live.state = "stopping"  # nobody else gets in
            kept = live.box.record
            yield live.client
        finally:
            await self.tasks.whole(self.leave(row, kept))

    # The daemon

    def keep_warm(self) -> None:
        """Keep spares of the default sandbox from now on; they are made in the background."""
        self.tasks.spawn(self.boxes.prewarm())

    async def close(self) -> None:
        """The daemon leaves; sandboxes stay. Channels are cut first, so that nothing is cancelled inside."""
        for live in self.live.values():
            await live.client.close(errors.Unavailable("the daemon is stopping"))
            if live.watcher is not None:
                live.watcher.cancel()
            with suppress(StoreFailed):
                self.flush(live)
        await self.tasks.settle(20)
        self.live.clear()

    # Behind the verbs

    def _repeated(self, who: Principal, spec: CreateSandbox) -> Making | SandboxInfo | None:
        """The create under way with this request id, or the sandbox it made. AlreadyExists when it asked for another."""
        assert spec.request_id is not None
        making = self._making.get((who.owner, spec.request_id))
        row = None if making else self.store.requested_sandbox(who.owner, spec.request_id)
        before = making.asked if making else row["request_hash"] if row else None
        if before is not None and before != rows.hash_request(spec):
            raise errors.AlreadyExists("this request id made another sandbox", hint="choose a new one for each create")
        return making or (None if row is None else self._info(row))

    def _begin_create(self, who: Principal, spec: CreateSandbox, parent: str | None) -> Making:
        assert spec.request_id is not None
        key, asked = (who.owner, spec.request_id), rows.hash_request(spec)
        request = rows.Repeatable(spec.request_id, asked)
        plain = msgspec.structs.replace(spec, request_id=None)
        making = self._making[key] = Making(self.tasks.spawn(self._create(who, plain, parent, request)), asked)
        making.task.add_done_callback(lambda _: self._making.pop(key, None))
        return making

    async def _create(
        self,
        who: Principal,
        spec: CreateSandbox,
        parent: str | None,
        request: rows.Repeatable | None = None,
        start_from: "StartFrom | None" = None,
    ) -> SandboxInfo:
        quotas.check_request(who, spec)
        profiles.ceiling_of(who).check(spec)
        if spec.keep:
            spec = msgspec.structs.replace(spec, persistent=True)
        spec, isolation = profiles.resolve(spec)
        check_rules(spec.require_approval)
        self._vault.check(who.owner, spec.secrets)
        runtime = await self.boxes.runtime(spec.runtime)
        policy: StoredPolicy = {"isolation": isolation, **await self.network.policy(spec, runtime)}
        can = self.backend.capabilities(runtime)
        # A session's files are kept where that can be; who asks for it by name is refused where it cannot.
        kept = (spec.persistent and not spec.keep) or spec.at_expiry != "destroy"
        can.check(runtime, mounts=bool(spec.mounts or spec.volumes), shared=parent is not None, kept=kept)
        plan = await self.boxes.plan(spec, who, start_from.image if start_from else None)
        row = rows.new_row(who, plan, runtime, policy, self.config.sandboxes, parent, request)
        box = plan.box(row["id"], runtime, expires_at=row["expires_at"], parent=parent)
        if start_from is not None:
            can.check(runtime, memory=True)
            box = replace(box, memory=start_from.memory)
        # From here to its record nothing waits: two at once cannot both take the last place, and who is over costs no spare.
        quotas.reserve(
            who,
            plan.limits.to_json(),
            lambda: self.store.list_sandboxes(who.owner, LIVE, None),
            self.volumes_mb(who.owner),
        )
        if spec.start:  # a warm one has an id already
            row["id"] = self.backend.reserve(box)
            box = replace(box, id=row["id"])
        used = False
        try:
            self.accounts.charge(DISK, self.space.promise(row), sandbox_account(row["id"]), owner_account(who.owner))
            self.store.add_sandbox(row, [spec.alias] if spec.alias else [], self.config.sandboxes.max_count)
            if not spec.start:
                self.store.finish_create(row["id"], state="stopped")
                return self._created(who, row)
            try:
                used = True
                live = await self.boxes.boot(row, box)
                self.enter(live)
            except BaseException as error:
                await self.undo(row["id"], error)
                raise
        except BaseException:
            self.space.forget(row["id"])
            self.accounts.end(sandbox_account(row["id"]))
            raise
        finally:
            if not used:  # refused before
                self.tasks.spawn(self.backend.release(row["id"]))
        self.store.finish_create(live.id, state="running", record=self._record(live, row))
        return self._created(who, row)

    def _created(self, who: Principal, row: SandboxRow) -> SandboxInfo:
        sandbox = row["id"]
        self.history.record(sandbox, who.owner, "created", runtime=row["runtime"], image=row["image"], by=who.owner)
        return self._info(self.store.sandbox(sandbox) or row)

    def _unwanted(self, who: Principal, making: Making) -> None:
        """End what was made for callers that all went away. A repeated request makes another."""
        done = making.task
        if not making.waiting and not making.given and not done.cancelled() and done.exception() is None:
            with suppress(StoreFailed):
                self.store.update_sandbox(done.result().id, request_id=None)
            self.tasks.spawn(self.end(done.result().id, "destroyed", "its creator went away", who.owner))

    async def _start(self, who: Principal, row: SandboxRow) -> SandboxInfo:
        self.store.update_sandbox(row["id"], state="stopping")  # if we die now, it is put to rest again
        if row["spec"].get("keep"):  # its lifetime counts while it runs
            left = row["record"].get("left_s")
            row = {**row, "expires_at": None if left is None else time.time() + left}
        try:
            live = await self._boot_again(row, who)
        except BaseException:
            kept = row["record"].get("box")
            await self.backend.destroy(kept or {"id": row["id"]}, keep_disk=kept is not None)
            self.store.update_sandbox(row["id"], state="stopped")
            raise
        live.touch()
        self.store.update_sandbox(
            live.id, state="running", record=self._record(live, row), last_active=live.last_active,
            expires_at=row["expires_at"], end_kind=None, end_detail=None, end_by=None,
        )  # fmt: skip
        self.history.record(live.id, live.owner, "started", by=who.owner)
        return await self.get(who, live.id)

    async def _boot_again(self, row: SandboxRow, who: Principal | None = None) -> Live:
        """A stopped sandbox on its old disk; without `who`, none of its mounts."""
        plan = await self.boxes.plan(msgspec.convert(row["spec"], CreateSandbox), who, row["record"].get("image"))
        box = plan.box(
            row["id"],
            row["runtime"],
            expires_at=row["expires_at"],
            parent=row["parent_id"],
            disk=row["record"].get("box"),
        )
        live = await self.boxes.boot(row, box)
        self.enter(live)
        return live

    # Small things

    def _living(self, row: SandboxRow) -> Live:
        live = self.live.get((row["owner"], row["id"]))
        if live is None:
            raise rows.unsuited(row)
        return live

    def _record(self, live: Live, row: SandboxRow) -> SandboxRecord:
        return rows.with_box(row["record"], live)

    def _row_after(self, before: SandboxRow) -> SandboxRow:
        """The record of a sandbox that was just ended or stopped, whatever became of the store."""
        try:
            return self.row(before["id"]) or before
        except StoreFailed:
            return {**before, **self.unwritten.of(before["id"])}

    def _info(self, row: SandboxRow) -> SandboxInfo:
        late = self.unwritten.of(row["id"])
        info = rows.info({**row, **late} if late else row, self.live.get((row["owner"], row["id"])))
        if late:
            info.unrecorded = ["store"]
        return info


def _needs(live: Live, state: str) -> None:
    if live.state != state:
        raise errors.FailedPrecondition(f"the sandbox is {live.state}, not {state}")


def _refuse_build_step(row: SandboxRow) -> None:
    """A stopped step of an image build is not started: the host has its disk mounted and reads the layer from it."""
    if LABEL in (row["spec"].get("labels") or {}):
        raise errors.FailedPrecondition("this sandbox is a step of an image build, which ends by itself")
