"""Sandboxes in a cluster: create, adopt, destroy, sweep.

The cluster's objects are the truth. A create is a claim named after the sandbox's id; everything
else of a sandbox is found below it, and a failed create deletes it.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

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
from atoll.backends.kubernetes import names
from atoll.backends.kubernetes.agents import Agents
from atoll.backends.kubernetes.api import CLAIMS, POOLS, TEMPLATES, Cluster, Object
from atoll.backends.kubernetes.box import KubernetesBox, KubernetesRecord
from atoll.backends.kubernetes.claims import Claims, Identity
from atoll.backends.kubernetes.cluster_checks import find_cluster_problems
from atoll.backends.kubernetes.enforcement import Candidate, Enforcement
from atoll.backends.kubernetes.fingerprints import Fingerprints
from atoll.backends.kubernetes.identity import find_end
from atoll.backends.kubernetes.leases import Leases
from atoll.backends.kubernetes.pools import ADD_POOL, Pool, Pools
from atoll.backends.kubernetes.request import digest_request, make_boot
from atoll.backends.kubernetes.runtimes import Runtimes
from atoll.backends.kubernetes.settings import Settings
from atoll.backends.kubernetes.watching import Watch
from atoll.backends.kubernetes.way_out import Place
from atoll.backends.local.network import Loopback
from atoll.errors import (
    AlreadyExists,
    AtollError,
    FailedPrecondition,
    SandboxGone,
    Unsupported,
)
from atoll.model import Policy

log = logging.getLogger("atoll.kubernetes")

T = TypeVar("T")


class KubernetesBackend:
    """Implements `contract.Backend` with the custom resources of agent-sandbox."""

    def __init__(self, settings: Settings, links: Loopback | None = None) -> None:
        """`links` are the networks of its sandboxes; without them there are none."""
        self._settings = settings
        self._agents = Agents.load(settings.key_file)
        self._ways_out = self._agents.ways_out(links or Loopback())
        self._unconnected: dict[str, Policy] = {}  # adopted, until `reconnect`
        self._boxes: dict[str, KubernetesBox] = {}
        self._making: set[str] = set()
        self._counts = {"warm": 0, "cold": 0, "canary_failures": 0}
        self._latency: dict[str, float] = {}

    async def start(self, events: NetworkEvents) -> None:
        """Connect, check what the cluster must have, and begin to watch the namespace."""
        settings, agents = self._settings, self._agents
        self._cluster = await Cluster.connect(settings.kubeconfig, settings.context, settings.namespace)
        if problems := await find_cluster_problems(self._cluster):
            raise FailedPrecondition("; ".join(map(str, problems)), hint=problems[0].fix)
        await self._ways_out.links.start(events)
        self._templates = Watch(self._cluster, TEMPLATES)
        self._pool_objects = Watch(self._cluster, POOLS)
        self._claims = Claims(self._cluster, agents.mark, settings.lease_s, settings.stopped_s)
        self._fingerprints = Fingerprints(self._cluster, self._claims.pods)
        self._pools = Pools(self._templates, self._pool_objects, agents.public_key, settings.runtimes)
        self._runtimes = Runtimes(self._cluster, self._pools, settings.runtimes, self._probe)
        self._enforcement = Enforcement(agents, lambda: self._cluster.server, self._candidates, settings.canary_s)
        self._leases = Leases(self._claims, settings.lease_s, lambda: list(self._boxes.values()))
        await asyncio.gather(self._templates.start(), self._pool_objects.start(), self._claims.start())
        self._fingerprints.start()
        self._leases.start()
        self._enforcement.start()
        for pool in self._pools.all():
            for problem in pool.problems:
                log.error("the pool %s is not used: %s", pool.name, problem)

    async def close(self) -> None:
        """Let go of everything; the sandboxes live on for the next gateway, as long as their lease lasts."""
        for box in self._boxes.values():
            box.release()
            await box.client.close()
        self._boxes.clear()
        await self._ways_out.let_go()
        await self._enforcement.close()
        await self._leases.close()
        await self._fingerprints.close()
        watches = (self._templates, self._pool_objects, self._claims)
        await asyncio.gather(*(watch.close() for watch in watches))
        await self._cluster.close()

    # Making and finding

    def reserve(self, spec: BoxSpec) -> str:
        """Return the spec's own id: warm pods are the cluster's, and get their name with the claim."""
        return spec.id

    async def release(self, box: str) -> None:
        return None

    async def create(self, spec: BoxSpec) -> Box:
        runtime = await self.pick(spec.runtime)
        _check(spec, runtime, self.capabilities(runtime))
        await self._ways_out.check(spec.policy)
        if spec.workspace.kind == "kept":
            return await self._start_again(spec, cast(KubernetesRecord, spec.workspace.disk))
        box = await self._create(spec, self._pools.choose(spec, runtime))
        self._runtimes.worked(runtime)
        return box

    async def _start_again(self, spec: BoxSpec, stopped: KubernetesRecord) -> KubernetesBox:
        """Give a stopped sandbox a new pod on its volume. If that fails it is stopped as before."""
        pool = self._pools.get(stopped["pool"])
        if pool is None:
            raise FailedPrecondition(f"the pool {stopped['pool']} of this sandbox is gone", hint=ADD_POOL)
        known = Identity.from_json(stopped["identity"])
        await self._enforcement.check()
        with self._exclusive(spec.id):
            try:
                await _finished(self._claims.resume(known, self._digest(spec, pool)))
                claim = await self._cluster.get(CLAIMS, known.claim)
                return await self._bring_up(spec, pool, claim, again=True)
            except BaseException:
                await _to_the_end(self._stop_again(known))
                raise

    async def _stop_again(self, known: Identity) -> None:
        try:
            await self._claims.suspend(known)
        except AtollError as error:
            log.error("sandbox %s could not be started and is not wholly stopped: %s", known.claim, error.message)

    async def _create(self, spec: BoxSpec, pool: Pool) -> KubernetesBox:
        await self._enforcement.check()
        with self._exclusive(spec.id):
            began = time.monotonic()
            try:
                claim = await _finished(self._make_claim(spec, pool))
                box = await self._bring_up(spec, pool, claim)
            except AlreadyExists:
                raise
            except BaseException:
                await _to_the_end(self._clean_up(spec, pool))
                raise
            self._count(box.identity, time.monotonic() - began)
            return box

    async def _make_claim(self, spec: BoxSpec, pool: Pool) -> Object:
        labels = {names.RUNTIME: pool.runtime}
        return await self._claims.make(spec.id, pool.name, labels, self._digest(spec, pool))

    async def _bring_up(self, spec: BoxSpec, pool: Pool, claim: Object, *, again: bool = False) -> KubernetesBox:
        name, uid = claim["metadata"]["name"], claim["metadata"]["uid"]
        identity = await self._claims.ready(name, uid, self._settings.start_s, again=again)
        notes = claim["metadata"].get("annotations", {})
        if notes.get(names.POD) == identity.pod_uid:  # an earlier attempt came as far as activating it
            fingerprint = notes[names.FINGERPRINT]
        else:
            fingerprint = await self._fingerprints.read(identity.sandbox, identity.pod_uid)
            told = {names.POD: identity.pod_uid, names.FINGERPRINT: fingerprint}
            await self._claims.annotate(name, uid, told)
        secrets = self._agents.secrets(uid, identity.pod_uid)
        await self._activate(spec, pool, identity, fingerprint, make_boot(spec, secrets))
        record: KubernetesRecord = {
            "id": spec.id,
            "identity": identity.to_json(),
            "fingerprint": fingerprint,
            "pool": pool.name,
            "runtime": pool.runtime,
            "engine": pool.runtime_class or "runc",
            "limits": spec.limits.to_json(),
            "enforced": pool.holds(spec.limits),
            "volume": pool.volume,
        }
        box = self._living(record)
        box.watch()
        try:
            await _unless_it_ends(box, box.client.connection())
            await self._ways_out.open(spec.id, spec.policy, *self._way(box))
        except BaseException:
            box.release()
            await box.client.close()
            await self._ways_out.close(spec.id)
            raise
        self._boxes[spec.id] = box
        return box

    async def _activate(
        self, spec: BoxSpec, pool: Pool, identity: Identity, fingerprint: str, boot: dict[str, Any]
    ) -> None:
        try:
            await self._agents.activate(identity, fingerprint, boot, self._cluster.server)
        except Unsupported:  # the canary got out
            self._counts["canary_failures"] += 1
            self._runtimes.doubt(pool.runtime)
            raise

    def _living(self, record: KubernetesRecord) -> KubernetesBox:
        identity = Identity.from_json(record["identity"])
        box = KubernetesBox(
            record,
            self._claims,
            replace(self.capabilities(record["runtime"]), keeps_disk=record.get("volume", False)),
            self._agents.dialler(identity.address, record["fingerprint"]),
            self._agents.secrets(identity.claim_uid, identity.pod_uid),
            self._ways_out,
            self._settings.unreachable_s,
        )
        self._leases.begin(box)
        return box

    def _way(self, box: KubernetesBox) -> tuple[Place, tuple[str, str]]:
        """Return what the egress channel of a sandbox needs: where its agent is, and the secrets of its hello."""
        identity, fingerprint = box.identity, box.record["fingerprint"]
        place = (identity.address, names.AGENT_PORT, fingerprint)
        return place, self._agents.secrets(identity.claim_uid, identity.pod_uid)

    async def _clean_up(self, spec: BoxSpec, pool: Pool) -> None:
        """Delete what a failed create has made; its own error is the one to tell."""
        try:
            await self._claims.delete_request(spec.id, pool.name, self._digest(spec, pool))
        except AtollError as error:
            log.error("sandbox %s could not be made and is not wholly gone: %s", spec.id, error.message)

    def _candidates(self) -> Iterator[Candidate]:
        """Yield the pods that can be asked whether they get out: those of living sandboxes, and those of pools."""
        for box in list(self._boxes.values()):
            one = box.identity
            yield Candidate(one.sandbox, one.node, one.address, box.record["fingerprint"], in_use=True, made="")
        for pod, fingerprint in self._fingerprints.unused():
            metadata, status = pod["metadata"], pod.get("status", {})
            if address := status.get("podIP"):
                made, node = metadata.get("creationTimestamp", ""), pod["spec"].get("nodeName", "")
                yield Candidate(metadata["name"], node, address, fingerprint, in_use=False, made=made)

    def _digest(self, spec: BoxSpec, pool: Pool) -> str:
        return digest_request(self._agents.digest_key, spec, pool.name)

    @contextmanager
    def _exclusive(self, sandbox: str) -> Iterator[None]:
        if sandbox in self._making or sandbox in self._boxes:
            raise AlreadyExists(f"sandbox {sandbox} is there already")
        self._making.add(sandbox)
        try:
            yield
        finally:
            self._making.discard(sandbox)

    async def adopt(self, record: Record, policy: Policy, *, keep_disk: bool = False) -> Box | None:
        ours = cast(KubernetesRecord, record)
        sandbox, known = ours["id"], Identity.from_json(ours["identity"])
        if sandbox in self._boxes:
            return self._boxes[sandbox]
        claims = self._claims
        ended = find_end(
            known,
            claims.claims.get(known.claim),
            claims.sandboxes.get(known.sandbox),
            claims.pods.get(known.sandbox),
        )
        if ended is not None:
            await self.destroy(record, keep_disk=keep_disk)
            return None
        box = self._living(ours)
        with suppress(AtollError):  # an agent out of reach is given its time
            await self._claims.renew(known.claim, known.claim_uid)
        self._boxes[sandbox] = box
        self._unconnected[sandbox] = policy
        box.watch()
        return box

    async def reconnect(self) -> set[str]:
        waiting, self._unconnected = self._unconnected, {}
        living = {sandbox: policy for sandbox, policy in waiting.items() if sandbox in self._boxes}
        lost = await self._ways_out.join_again(living)
        for sandbox, policy in living.items():
            if sandbox not in lost:
                self._ways_out.begin_again(sandbox, policy, *self._way(self._boxes[sandbox]))
        return lost

    # Taking away

    async def destroy(self, record: Record, *, keep_disk: bool = False) -> None:
        sandbox = str(record["id"])
        name = names.claim_name(sandbox)
        if sandbox in self._making:
            raise FailedPrecondition(f"sandbox {sandbox} is being made")
        identity = cast(dict[str, str], record.get("identity", {}))
        keep_disk = keep_disk and bool(record.get("volume"))
        if living := self._boxes.get(sandbox):
            await (living.stop() if keep_disk else living.kill())
            await living.client.close()
            living.release()
            self._boxes.pop(sandbox, None)
        elif keep_disk:
            await self._claims.suspend(Identity.from_json(identity))
        else:
            await self._claims.delete(name, identity.get("claim_uid", ""))
        await self._ways_out.close(sandbox)

    async def sweep(self, known: set[str], *, keep_disk: bool = False) -> list[str]:
        found = await self._cluster.list(CLAIMS, labels=f"{names.GATEWAY}={self._agents.mark}")
        there = {names.sandbox_of(claim["metadata"]["name"]) for claim in found["items"]}
        strays = sorted(there - known - self._making - set(self._boxes) - {""})
        for sandbox in strays:
            try:
                await self.destroy({"id": sandbox})
            except AtollError as error:  # one that resists must not shelter the others
                log.error("sweep: sandbox %s is not wholly gone: %s", sandbox, error.message)
        return strays

    async def forget_memory(self, name: str) -> None:
        """There are none."""

    async def sweep_memories(self, known: set[str]) -> list[str]:
        return []

    def memory_used(self, name: str) -> int:
        return 0

    def disk_used(self, box: str) -> int | None:
        return None

    # Runtimes

    async def runtimes(self) -> list[RuntimeStatus]:
        return await self._runtimes.all()

    async def pick(self, runtime: str) -> str:
        return await self._runtimes.pick(runtime)

    def capabilities(self, runtime: str) -> Capabilities:
        keeps = any(pool.volume for pool in self._pools.of_runtime(runtime))
        return Capabilities(oom_shows_as_failure=runtime == "gvisor", keeps_disk=keeps, policy="broker")

    async def network(self) -> NetworkStatus:
        return await self._ways_out.links.status()

    async def _probe(self, pool: Pool) -> None:
        """Start a sandbox of this pool, wait for its agent, and take it away."""
        spec = BoxSpec(_new_id(), Image(pool.image), pool.runtime)
        box = await self._create(spec, pool)
        await self.destroy(box.record)

    # Warm sandboxes are the pools of the cluster

    def prewarm(self, spec: BoxSpec, count: int = 0) -> None:
        return None

    def warm_for(self, spec: BoxSpec) -> int:
        runtimes = [name for name in {pool.runtime for pool in self._pools.all()} if spec.runtime in (name, "auto")]
        found = [pool for name in runtimes for pool in self._pools.of_runtime(name) if pool.serves(spec.image.name)]
        return sum(pool.ready for pool in found)

    def warmth(self) -> Mapping[str, object]:
        pools = {pool.name: {"ready": pool.ready, "replicas": pool.replicas} for pool in self._pools.all()}
        ready = sum(pool["ready"] for pool in pools.values())
        return {"enabled": False, "ready": ready, "floor": 0, "pools": pools, **self._counts, **self._latency}

    async def drain(self) -> None:
        return None

    def _count(self, identity: Identity, seconds: float) -> None:
        self._counts[identity.started] += 1
        self._latency[f"{identity.started}_last_ms"] = round(seconds * 1000, 1)


def _check(spec: BoxSpec, runtime: str, can: Capabilities) -> None:
    """Raise Unsupported for what a pod cannot do, before anything is made."""
    policy = spec.policy
    can.check(
        runtime,
        mounts=bool(spec.mounts),
        ports=bool(policy.host_ports),
        shared=spec.workspace.kind == "shared",
        hosts=policy.network != "none",
        kept=spec.workspace.kind == "kept",
        memory=spec.memory is not None,
    )
    fixed = {"read_only_root": "a read-only root", "no_capabilities": "no capabilities"}
    for name, what in fixed.items():
        if getattr(spec, name):
            raise Unsupported(f"a started pod cannot be given {what}", hint="choose another security profile")


def _new_id() -> str:
    from base64 import b32encode
    from secrets import token_bytes

    return b32encode(token_bytes(13)).decode().lower()[:20]


async def _unless_it_ends(box: KubernetesBox, work: Coroutine[Any, Any, T]) -> T:
    """Return what comes of the work; raise SandboxGone as soon as the sandbox ends."""
    task, end = asyncio.ensure_future(work), asyncio.ensure_future(box.wait())
    try:
        await asyncio.wait([task, end], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        ended = end.result()
    finally:
        for one in (task, end):
            one.cancel()
        await asyncio.gather(task, end, return_exceptions=True)
    raise SandboxGone(
        f"the sandbox ended as soon as it had started: {ended.detail}",
        details={"sandbox_id": box.id, "reason": ended.kind, "detail": ended.detail},
    )


async def _finished(work: Coroutine[Any, Any, T]) -> T:
    """Run a call that changes the cluster to its end, also if the caller is cancelled meanwhile."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Finish the work even if the caller is cancelled again and again meanwhile."""
    task = asyncio.create_task(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(task)
