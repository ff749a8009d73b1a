"""The life of sandboxes: create, get, list, stop, start, pause, resume, extend, destroy.

A state is written before the effect it names, so that whatever moment the daemon dies in, the next one knows what to
finish (`recovery.py`). A create that fails, or whose caller went away, leaves nothing.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from atoll import errors
from atoll.backends.contract import Backend, Box, BoxSpec, Ended, Limits, Mount
from atoll.config import Config
from atoll.core import profiles, quotas
from atoll.core.access import Principal, new_id
from atoll.core.history import History
from atoll.core.images import Chosen, Images
from atoll.core.live import Live, gone
from atoll.core.mounts import host_mounts
from atoll.core.network import Network
from atoll.core.pool import Pool
from atoll.core.pool import Settings as PoolSettings
from atoll.core.rules import check as check_rules
from atoll.core.secrets import Vault
from atoll.core.store import LIVE, Row, Store
from atoll.guest import GuestClient
from atoll.model import ALIAS, NAME, CreateSandbox, End, Extend, SandboxInfo

log = logging.getLogger("atoll.sandboxes")

T = TypeVar("T")

STATES = {"active": LIVE, "all": (*LIVE, "ended"), "running": ("running",), "stopped": ("stopped",),
          "paused": ("paused",), "ended": ("ended",)}  # fmt: skip
AGENT_GRACE_MS = 60_000  # the agent's own deadline comes this much after ours
NEVER_MS = 10 * 365 * 86400 * 1000
AGENT_TIMEOUT = 30.0
SHORT_NAME = 12


class Sandboxes:
    """Every sandbox of this daemon. `live` holds those with a box, by owner and id."""

    def __init__(
        self,
        store: Store,
        backend: Backend,
        images: Images,
        network: Network,
        history: History,
        config: Config,
        home: Path,
    ) -> None:
        self.store = store
        self.backend = backend
        self.images = images
        self.network = network
        self.history = history
        self.config = config
        self.home = home
        self.pool = Pool(backend, PoolSettings.of(config.pool))
        self.live: dict[tuple[str, str], Live] = {}
        self.changed = asyncio.Event()  # for the reaper: some deadline may have moved
        self.vault: Vault | None = None  # where secrets of a request are looked up
        self.forget_outputs: Callable[[str], None] = lambda sandbox: None
        self._tasks: set[asyncio.Task[Any]] = set()

    # The verbs

    async def create(self, who: Principal, spec: CreateSandbox, *, parent: str | None = None) -> SandboxInfo:
        """A new sandbox, running and reachable. A caller that goes away meanwhile gets nothing left behind.

        `parent` shares its workspace; `subagents.py` decides what such a one may have.
        """
        task = self._spawn(self._create(who, spec, parent))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: self._unwanted(who, done))
            raise

    async def get(self, who: Principal, ref: str) -> SandboxInfo:
        return self._info(self._find(who, ref))

    async def list(self, who: Principal, *, state: str = "active", name: str | None = None) -> list[SandboxInfo]:
        states = STATES.get(state)
        if states is None:
            raise errors.InvalidArgument(f"unknown state {state!r:.40}", hint="one of " + ", ".join(STATES))
        if name is not None and not NAME.match(name):
            raise errors.InvalidArgument(f"{name!r:.80} is no name of a sandbox")
        return [self._info(row) for row in self.store.list_sandboxes(who.owner, states, name)]

    async def destroy(self, who: Principal, ref: str, reason: str = "destroyed") -> SandboxInfo:
        """End it for good; again for one that has ended is no error."""
        row = self._find(who, ref)
        if row["state"] != "ended":
            await self._whole(self.end(row["id"], reason, "", who.owner))
        return self._info(self.store.sandbox(row["id"]) or row)

    async def stop(self, who: Principal, ref: str) -> SandboxInfo:
        """End its processes and keep its disk."""
        row = self._find(who, ref)
        if row["state"] not in ("stopped", "stopping"):
            await self._whole(self._stop(self._living(row), "stopped", "", who.owner))
        return self._info(self.store.sandbox(row["id"]) or row)

    async def start(self, who: Principal, ref: str) -> SandboxInfo:
        """Start a stopped one again, on its old disk."""
        row = self._find(who, ref)
        if row["state"] == "running":
            return self._info(row)
        if row["state"] != "stopped":
            raise self._unsuited(row)
        return await self._whole(self._start(who, row))

    async def pause(self, who: Principal, ref: str) -> SandboxInfo:
        """Freeze everything in it; memory stays."""
        live = self._living(self._find(who, ref))
        async with live.changing:
            if live.state != "paused":
                self._needs(live, "running")
                self._set_state(live, "paused")
                await self._whole(live.box.freeze())
                self.history.record(live.id, live.owner, "paused", by=who.owner)
        return await self.get(who, live.id)

    async def resume(self, who: Principal, ref: str) -> SandboxInfo:
        live = self._living(self._find(who, ref))
        async with live.changing:
            if live.state != "running":
                self._needs(live, "paused")
                await self._whole(live.box.thaw())
                live.touch()
                self._set_state(live, "running")
                self.history.record(live.id, live.owner, "resumed", by=who.owner)
        return await self.get(who, live.id)

    async def extend(self, who: Principal, ref: str, change: Extend) -> SandboxInfo:
        """A new end, counted from now, or none; a new idle limit, or none."""
        row = self._find(who, ref)
        if row["state"] in ("ended", "ending"):
            raise self._unsuited(row)
        values: dict[str, Any] = {}
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
                await live.client.request("configure", deadline_ms=_agent_deadline(live.expires_at) or NEVER_MS)
        self.changed.set()
        return await self.get(who, row["id"])

    # For the other verbs

    def reach(self, who: Principal, ref: str) -> Live:
        """The living sandbox for an operation inside it; if there is none, the reason."""
        live = self.live.get((who.owner, ref))
        if live is None:
            live = self._living(self._find(who, ref))
        if live.state != "running":
            raise live.not_running()
        return live

    def known(self, who: Principal, ref: str) -> Row:
        """The record of a sandbox in any state."""
        return self._find(who, ref)

    @asynccontextmanager
    async def visit(self, who: Principal, ref: str) -> AsyncIterator[GuestClient]:
        """The agent of a sandbox, also of a stopped one: that is started for as long, with no network and closed to others."""
        row = self._find(who, ref)
        if row["state"] != "stopped":
            with self.reach(who, ref).use() as client:
                yield client
            return
        spec = msgspec.convert(row["spec"], CreateSandbox)
        closed = {**row, "record": {**row["record"], "policy": {"network": "none", "hosts": []}}, "expires_at": None}
        self.store.update_sandbox(row["id"], state="stopping")  # if we die now, it is put to rest again
        kept = row["record"].get("box")
        try:
            limits, required = self._limits(spec)
            image = await self.images.choose(spec.image, spec.program, row["record"].get("image"))
            live = await self._boot(who, closed, spec, image, limits, required, (), disk=kept)
            live.state = "stopping"  # nobody else gets in
            kept = live.box.record
            yield live.client
        finally:
            await self._whole(self._leave(row, kept))

    async def _leave(self, row: Row, box: dict[str, Any] | None) -> None:
        live = self.live.pop((row["owner"], row["id"]), None)
        if live is not None:
            live.ending = ("stopped", "", "atoll")
            await live.client.close()
            if live.watcher is not None:
                live.watcher.cancel()
        await self.backend.destroy(box or {"id": row["id"]}, keep_disk=box is not None)
        await self.network.detach(row["id"])
        record = {**row["record"], "box": box} if box is not None else row["record"]
        self.store.update_sandbox(row["id"], state="stopped", record=record)

    async def end(self, sandbox: str, kind: str, detail: str, by: str) -> None:
        """Destroy a sandbox in any state and record why. Idempotent; what fails stays `ending` and is tried again."""
        row = self.store.sandbox(sandbox)
        if row is None or row["state"] == "ended":
            return
        live = self.live.get((row["owner"], sandbox))
        if live is None:
            await self.end_children(sandbox, by)
            await self._bury(row, kind, detail, by)
            return
        async with live.changing:
            if live.state == "ended":
                return
            live.ending = live.ending or (kind, detail, by)
            self._set_state(live, "ending", end_kind=live.ending[0], end_detail=live.ending[1], end_by=live.ending[2])
            await live.client.close(gone(sandbox, *live.ending))
            await self.end_children(sandbox, by)
            await self._bury({**row, "record": {**row["record"], "box": live.box.record}}, *live.ending)
            live.state = "ended"
            self._forget(live)
            if live.watcher is not None and live.watcher is not asyncio.current_task():
                live.watcher.cancel()

    async def end_children(self, sandbox: str, by: str) -> None:
        """Sub-agents do not outlive the sandbox whose workspace they share."""
        for child in self.store.children(sandbox):
            await self.end(child["id"], "destroyed", "its parent ended", by)

    async def retire(self, sandbox: str, kind: str, detail: str) -> None:
        """The end that time or a fault brings: a persistent sandbox keeps its disk, any other is destroyed."""
        row = self.store.sandbox(sandbox)
        if row is None or row["state"] in ("ended", "stopped"):
            return
        live = self.live.get((row["owner"], sandbox))
        if live is not None and live.spec.persistent and kind != "expired":
            await self._stop(live, kind, detail, "atoll")
        else:
            await self.end(sandbox, kind, detail, "atoll")

    def adopt(self, row: Row, box: Box) -> Live:
        """Take over a box that lives, made by us or by a daemon before us."""
        live = Live(row, box)
        live.network = self.network
        self._enter(live)
        return live

    def keep_warm(self) -> None:
        """Keep spares of the default sandbox from now on; they are made in the background."""
        self._spawn(self._prewarm())

    async def _prewarm(self) -> None:
        spec, _ = profiles.resolve(CreateSandbox())
        limits, required = self._limits(spec)
        runtime = await self.backend.pick(self.config.sandboxes.runtime)
        image = await self.images.choose(spec.image, spec.program)
        row = {"id": "", "runtime": runtime, "expires_at": None}
        self.pool.prewarm(self._box_spec(row, spec, image, limits, required, ()), self._base_env(image))

    async def close(self) -> None:
        """The daemon leaves; sandboxes stay. Channels are cut first, so that nothing is cancelled inside."""
        await self.pool.close()
        for live in self.live.values():
            await live.client.close(errors.Unavailable("the daemon is stopping"))
            if live.watcher is not None:
                live.watcher.cancel()
            self.flush(live)
        pending = [task for task in self._tasks if not task.done()]
        if pending:
            await asyncio.wait(pending, timeout=20)
        self.live.clear()

    def flush(self, live: Live) -> None:
        if live.last_active > live.stored_active:
            live.stored_active = live.last_active
            self.store.update_sandbox(live.id, last_active=live.last_active)

    # Creating

    async def _create(self, who: Principal, spec: CreateSandbox, parent: str | None = None) -> SandboxInfo:
        quotas.check_request(who, spec)
        profiles.ceiling_of(who).check(spec)
        spec, isolation = profiles.resolve(spec)
        limits, required = self._limits(spec)
        check_rules(spec.require_approval)
        if spec.secrets:
            if self.vault is None:
                raise errors.Unsupported("this daemon has no secrets")
            self.vault.check(who.owner, spec.secrets)
        mounts = self._mounts(who, spec)
        policy = {"isolation": isolation, **await self.network.policy(spec)}
        runtime = await self.backend.pick(spec.runtime if spec.runtime != "auto" else self.config.sandboxes.runtime)
        image = await self.images.choose(spec.image, spec.program)
        row = {**self._new_row(who, spec, runtime, image, limits, policy), "parent_id": parent}
        # From here to its record nothing waits: two at once cannot both take the last place, and who is over costs no spare.
        quotas.reserve(who, limits.to_json(), lambda: self.store.list_sandboxes(who.owner, LIVE, None))
        spare = self._claim(row, spec, image, limits, required, mounts)
        try:
            self.store.add_sandbox(row, [spec.alias] if spec.alias else [], self.config.sandboxes.max_count)
            if not spec.start:
                self.store.finish_create(row["id"], state="stopped")
                self.history.record(row["id"], who.owner, "created", runtime=runtime, image=image.name, by=who.owner)
                return self._info(self.store.sandbox(row["id"]) or row)
            try:
                claimed, spare = spare, None
                with self.pool.stand_back(cold=claimed is None):
                    live = await self._boot(who, row, spec, image, limits, required, mounts, spare=claimed)
            except BaseException as error:
                await self._undo(row["id"], error)
                raise
        finally:
            if spare is not None:  # refused before it was used
                self._spawn(self.backend.destroy(spare.record))
        self.store.finish_create(live.id, state="running", record=self._record(live, row["record"]))
        self.history.record(live.id, live.owner, "created", runtime=runtime, image=image.name, by=who.owner)
        return self._info(self.store.sandbox(live.id) or row)

    def _claim(
        self,
        row: Row,
        spec: CreateSandbox,
        image: Chosen,
        limits: Limits,
        required: frozenset[str],
        mounts: tuple[Mount, ...],
    ) -> Box | None:
        """A warm sandbox, which then gives the record its id; None is a cold start."""
        if not spec.start or spec.name is not None:  # a started sandbox cannot take the name for its host name
            return None
        spare = self.pool.claim(self._box_spec(row, spec, image, limits, required, mounts), self._base_env(image))
        if spare is not None:
            row["id"] = spare.id
        return spare

    def _base_env(self, image: Chosen) -> dict[str, str]:
        return {**image.env, **self.config.sandboxes.env}

    def _box_spec(
        self,
        row: Row,
        spec: CreateSandbox,
        image: Chosen,
        limits: Limits,
        required: frozenset[str],
        mounts: tuple[Mount, ...],
        disk: dict[str, Any] | None = None,
    ) -> BoxSpec:
        return BoxSpec(
            id=row["id"],
            rootfs=image.rootfs,
            runtime=row["runtime"],
            limits=limits,
            required=required,
            hostname=spec.name or f"sandbox-{row['id'][:SHORT_NAME]}",
            boot={
                "env": {**self._base_env(image), **spec.env},
                "deadline_ms": _agent_deadline(row["expires_at"]),
            },
            mounts=mounts,
            workspace=row.get("parent_id"),
            disk=disk,
            read_only_root=spec.read_only_root,
            seccomp=profiles.of(spec).seccomp,
            no_capabilities=profiles.of(spec).capabilities == "none",
        )

    async def _warm(self, spare: Box, spec: BoxSpec) -> Box:
        """Give a claimed sandbox all that a cold start would have given it, before any of the caller's code runs."""
        await spare.update_limits(spec.limits)
        held = spare.enforced()
        if missing := sorted(name for name in spec.required if not held.get(name, False)):
            raise errors.Unsupported(
                f"this host cannot hold the limit {missing[0]}", hint="leave it out, or see `atoll doctor`"
            )
        if spec.network is not None:
            netns = os.open(f"/proc/{spare.record['pid']}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                await spec.network(netns)
            finally:
                os.close(netns)
        return spare

    async def _boot(
        self,
        who: Principal,
        row: Row,
        spec: CreateSandbox,
        image: Chosen,
        limits: Limits,
        required: frozenset[str],
        mounts: tuple[Mount, ...],
        disk: dict[str, Any] | None = None,
        spare: Box | None = None,
    ) -> Live:
        sandbox: str = row["id"]
        box_spec = replace(
            self._box_spec(row, spec, image, limits, required, mounts, disk),
            network=await self.network.attach(sandbox, row["record"]["policy"]),
        )
        box = await (self.backend.create(box_spec) if spare is None else self._warm(spare, box_spec))
        live = Live({**row, "state": "running"}, box)
        live.network = self.network
        try:
            async with asyncio.timeout(AGENT_TIMEOUT):
                await live.client.connection()
                if spare is not None:
                    await live.client.request("configure", **box_spec.boot)
                if spec.workdir != "/workspace":
                    await self._check_workdir(live)
        except TimeoutError:
            raise errors.Unavailable("the sandbox's agent did not come up in time") from None
        except BaseException:
            await live.client.close()
            raise
        self._enter(live)
        return live

    def _enter(self, live: Live) -> None:
        """It is alive: known by its id, watched, and beside its parent or sub-agents."""
        self.live[live.owner, live.id] = live
        for other in self.live.values():
            if other.id == live.parent_id:
                live.parent = other
                other.children.add(live)
            elif other.parent_id == live.id:
                other.parent = live
                live.children.add(other)
        live.watcher = self._spawn(self._watch(live))
        self.changed.set()

    def _forget(self, live: Live) -> None:
        self.live.pop((live.owner, live.id), None)
        if live.parent is not None:
            live.parent.children.discard(live)

    async def _check_workdir(self, live: Live) -> None:
        answer = await live.client.request("stat", path=live.spec.workdir)
        stat = answer.get("stat")
        if not isinstance(stat, dict) or stat.get("type") != "directory":
            raise errors.NotADirectory(f"workdir {live.spec.workdir!r:.200} is not a directory")

    async def _undo(self, sandbox: str, error: BaseException) -> None:
        """A create that failed: nothing may be left, not even when this too is interrupted."""
        live = next((live for (_, name), live in self.live.items() if name == sandbox), None)
        if live is not None:
            live.state = "ended"
            self.live.pop((live.owner, sandbox), None)
            await live.client.close()
            if live.watcher is not None:
                live.watcher.cancel()
        log.warning("creating %s failed: %s: %s", sandbox, type(error).__name__, error)
        try:
            await self.backend.destroy({"id": sandbox})
            await self.network.detach(sandbox)
        except Exception:
            log.exception("what creating %s left could not be removed; it is tried again later", sandbox)
            self.store.update_sandbox(sandbox, state="ending", end_kind="failed", end_detail="", end_by="atoll")
            return
        self.store.forget_sandbox(sandbox)
        self.history.forget(sandbox)

    def _unwanted(self, who: Principal, done: "asyncio.Task[SandboxInfo]") -> None:
        if not done.cancelled() and done.exception() is None:
            self._spawn(self.end(done.result().id, "destroyed", "its creator went away", who.owner))

    def _limits(self, spec: CreateSandbox) -> tuple[Limits, frozenset[str]]:
        """What it may use, and which of that was asked for: that must be held, a default need not."""
        asked = {key: value for key, value in msgspec.structs.asdict(spec.limits).items() if value is not None}
        defaults = profiles.default_limits(spec, msgspec.structs.asdict(self.config.limits))
        return Limits.from_json({**defaults, **asked}), frozenset(asked)

    def _mounts(self, who: Principal, spec: CreateSandbox) -> tuple[Mount, ...]:
        return host_mounts(self.home, who, spec)

    def _new_row(
        self, who: Principal, spec: CreateSandbox, runtime: str, image: Chosen, limits: Limits, policy: dict[str, Any]
    ) -> Row:
        now, defaults = time.time(), self.config.sandboxes
        named = spec.name is not None
        lifetime = spec.lifetime_s or (None if named else defaults.lifetime_s or None)
        idle = spec.idle_timeout_s or (None if named else defaults.idle_timeout_s or None)
        return {
            "id": new_id(),
            "owner": who.owner,
            "name": spec.name,
            "state": "creating",
            "runtime": runtime,
            "image": image.name,
            "spec": msgspec.to_builtins(spec),
            "record": {"limits": {k: {"value": v, "enforced": None} for k, v in limits.to_json().items()},
                       "policy": policy, "uid": who.uid, "gid": who.gid, "image": image.digest},
            "created_at": now,
            "expires_at": None if lifetime is None else now + lifetime,
            "idle_timeout": idle,
            "last_active": now,
        }  # fmt: skip

    def _record(self, live: Live, record: dict[str, Any]) -> dict[str, Any]:
        """What the store keeps of a box, with which limits this host really holds."""
        held = live.box.enforced()
        limits = {k: {"value": v["value"], "enforced": held.get(k, False)} for k, v in record["limits"].items()}
        return {**record, "box": live.box.record, "limits": limits, "link": self.network.link(live.id)}

    # Stopping, starting, ending

    async def _stop(self, live: Live, kind: str, detail: str, by: str) -> None:
        async with live.changing:
            if live.state in ("ended", "ending", "stopped"):
                return
            live.ending = live.ending or (kind, detail, by)
            row = self.store.sandbox(live.id)
            assert row is not None
            self._set_state(live, "stopping", end_kind=kind, end_detail=detail, end_by=by)
            await live.client.close(gone(live.id, kind, detail, by))
            await self.end_children(live.id, by)
            await self.backend.destroy(live.box.record, keep_disk=True)
            await self.network.detach(live.id)
            live.state = "stopped"
            self._forget(live)
            self.store.update_sandbox(
                live.id, state="stopped", record={**row["record"], "box": live.box.record}, last_active=time.time()
            )
            self.history.record(live.id, live.owner, "stopped", reason=kind, detail=detail, by=by)
            if live.watcher is not None and live.watcher is not asyncio.current_task():
                live.watcher.cancel()

    async def _start(self, who: Principal, row: Row) -> SandboxInfo:
        spec = msgspec.convert(row["spec"], CreateSandbox)
        self.store.update_sandbox(row["id"], state="stopping")  # if we die now, it is put to rest again
        try:
            limits, required = self._limits(spec)
            image = await self.images.choose(spec.image, spec.program, row["record"].get("image"))
            mounts = self._mounts(who, spec)
            live = await self._boot(who, row, spec, image, limits, required, mounts, disk=row["record"].get("box"))
        except BaseException:
            kept = row["record"].get("box")
            await self.backend.destroy(kept or {"id": row["id"]}, keep_disk=kept is not None)
            self.store.update_sandbox(row["id"], state="stopped")
            raise
        live.touch()
        self.store.update_sandbox(
            live.id, state="running", record=self._record(live, row["record"]), last_active=live.last_active,
            end_kind=None, end_detail=None, end_by=None,
        )  # fmt: skip
        self.history.record(live.id, live.owner, "started", by=who.owner)
        return await self.get(who, live.id)

    async def _bury(self, row: Row, kind: str, detail: str, by: str) -> None:
        """No process, no link, no file; only then is it said to have ended."""
        sandbox = row["id"]
        if row["state"] != "ending":
            self.store.update_sandbox(sandbox, state="ending", end_kind=kind, end_detail=detail, end_by=by)
        await self.backend.destroy(row["record"].get("box") or {"id": sandbox})
        await self.network.detach(sandbox)
        self.store.end_sandbox(sandbox, kind, detail, by)
        self.history.record(sandbox, row["owner"], "ended", reason=kind, detail=detail, by=by)
        self.forget_outputs(sandbox)
        self.changed.set()

    async def _watch(self, live: Live) -> None:
        """Wait for a box to end by itself, and record why."""
        ended = await live.box.wait()
        if live.state in ("ended", "ending", "stopping", "stopped") or live.ending is not None:
            return
        kind, detail = self._reason(live, ended)
        log.info("sandbox %s ended by itself: %s %s", live.id, kind, detail)
        await live.client.close(gone(live.id, kind, detail, "atoll"))
        await self.retire(live.id, kind, detail)

    def _reason(self, live: Live, ended: Ended) -> tuple[str, str]:
        if ended.kind == "oom":
            return "oom", ended.detail
        if live.expires_at is not None and time.time() >= live.expires_at:
            return "expired", ended.detail
        if ended.kind in ("lost", "unknown"):
            return "lost", ended.detail
        return "crashed", ended.detail

    # Small things

    def _find(self, who: Principal, ref: str) -> Row:
        row = self.store.find_sandbox(who.owner, ref) if ALIAS.match(ref) else None
        if row is None or row["state"] == "creating":
            raise errors.NotFound(f"no sandbox {ref!r:.120}")
        return row

    def _living(self, row: Row) -> Live:
        live = self.live.get((row["owner"], row["id"]))
        if live is None:
            raise self._unsuited(row)
        return live

    def _unsuited(self, row: Row) -> errors.AtollError:
        if row["state"] in ("ended", "ending"):
            return gone(row["id"], row["end_kind"] or "lost", row["end_detail"] or "", row["end_by"] or "")
        hint = "start it first" if row["state"] == "stopped" else ""
        return errors.FailedPrecondition(f"the sandbox is {row['state']}", hint=hint)

    def _needs(self, live: Live, state: str) -> None:
        if live.state != state:
            raise errors.FailedPrecondition(f"the sandbox is {live.state}, not {state}")

    def _set_state(self, live: Live, state: str, **values: Any) -> None:
        self.store.update_sandbox(live.id, state=state, **values)
        live.state = state
        self.changed.set()

    def _info(self, row: Row) -> SandboxInfo:
        live = self.live.get((row["owner"], row["id"]))
        end = None
        if row["state"] == "ended" or (row["end_kind"] and row["state"] in ("stopped", "ending")):
            at = row["ended_at"] or row["last_active"]
            end = End(kind=row["end_kind"] or "lost", detail=row["end_detail"] or "", by=row["end_by"] or "", at=at)
        spec = row["spec"]
        return SandboxInfo(
            id=row["id"],
            name=row["name"],
            owner=row["owner"],
            state=row["state"],
            runtime=row["runtime"],
            image=row["image"],
            created_at=row["created_at"],
            expires_at=row["expires_at"],
            idle_timeout_s=row["idle_timeout"],
            last_active=live.last_active if live else row["last_active"],
            limits=row["record"].get("limits", {}),
            policy=row["record"].get("policy", {}),
            hosts=row["record"].get("policy", {}).get("hosts", spec.get("hosts")),
            env_keys=sorted(spec.get("env", {})),
            background_runs=live.background_runs if live else 0,
            labels=spec.get("labels", {}),
            workdir=spec.get("workdir", "/workspace"),
            pid=live.box.record.get("pid") if live else None,
            end=end,
            parent_id=row["parent_id"],
            secret_env_vars=sorted(secret["env"] for secret in spec.get("secrets", [])),
            require_approval=spec.get("require_approval", []),
        )

    def _spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, errors.AtollError):
            log.error("%s failed", task.get_coro(), exc_info=error)

    async def _whole(self, work: Awaitable[T]) -> T:
        """Do it to the end even if the caller goes away."""

        async def run() -> T:
            return await work

        return await asyncio.shield(self._spawn(run()))


def _agent_deadline(expires_at: float | None) -> int | None:
    if expires_at is None:
        return None
    return max(1, int((expires_at - time.time()) * 1000)) + AGENT_GRACE_MS
