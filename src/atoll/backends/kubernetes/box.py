"""A living sandbox in a pod: the objects it is, the channel to its agent, and the first sign of its end."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NotRequired, TypedDict

from atoll.backends.contract import BoxFacts, Capabilities, Ended, Limits, Record, Traffic, Usage
from atoll.backends.kubernetes.api import Object
from atoll.backends.kubernetes.claims import Claims, Identity
from atoll.backends.kubernetes.identity import find_end
from atoll.backends.kubernetes.way_out import WaysOut
from atoll.errors import AtollError, Internal, SandboxGone, Unavailable, Unsupported
from atoll.guest import GuestClient
from atoll.model import Policy

AGENT_WORD = 3.0  # seconds for the agent's own answer to `shutdown`
RETRY = 1.0
STRANGERS = 5  # times that somebody else answers in place of the agent

Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class KubernetesRecord(TypedDict):
    """The stored record of a sandbox. The secrets of the hello are derived, not kept."""

    id: str
    identity: dict[str, str]
    fingerprint: str
    pool: str
    runtime: str
    engine: str
    limits: dict[str, float]
    enforced: dict[str, bool]
    volume: NotRequired[bool]  # its files can be kept while it is stopped


class KubernetesBox:
    """Implements `contract.Box` for one activated pod."""

    def __init__(
        self,
        record: KubernetesRecord,
        claims: Claims,
        capabilities: Capabilities,
        dial: Dial,
        secrets: tuple[str, str],
        ways_out: WaysOut,
        unreachable_s: float,
    ) -> None:
        host_secret, agent_secret = secrets
        self.capabilities = capabilities
        self._record = record
        self.identity = Identity.from_json(record["identity"])
        self.client = GuestClient(dial, host_secret=host_secret, agent_secret=agent_secret)
        self.renew_at = 0.0  # set by the backend
        self._claims = claims
        self._ways_out = ways_out
        self._unreachable_s = unreachable_s
        self._killed = ""
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._monitor: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self._record["id"]

    @property
    def record(self) -> KubernetesRecord:
        return self._record

    @property
    def facts(self) -> BoxFacts:
        record, identity = self._record, self.identity
        shown = {
            "claim": identity.claim,
            "pod": identity.sandbox,
            "node": identity.node,
            "started": identity.started,
            "pool": record["pool"],
        }
        limits = Limits.from_json(record["limits"])
        return BoxFacts(self.id, record["runtime"], record["engine"], limits, dict(record["enforced"]), shown)

    # Its end

    def watch(self) -> None:
        """From now on look at every change of its objects, and keep the channel open."""
        identity = self.identity
        self._claims.claims.follow(identity.claim, self._look)
        self._claims.sandboxes.follow(identity.sandbox, self._look)
        self._claims.pods.follow(identity.sandbox, self._look)
        self._monitor = asyncio.create_task(self._hold_channel(), name=f"channel-{self.id}")
        self._look(None)

    def release(self) -> None:
        """Stop looking; the sandbox goes on."""
        identity = self.identity
        self._claims.claims.unfollow(identity.claim, self._look)
        self._claims.sandboxes.unfollow(identity.sandbox, self._look)
        self._claims.pods.unfollow(identity.sandbox, self._look)
        if self._monitor is not None:
            self._monitor.cancel()

    def _look(self, _: Object | None) -> None:
        known, claims = self.identity, self._claims
        found = find_end(
            known,
            claims.claims.get(known.claim),
            claims.sandboxes.get(known.sandbox),
            claims.pods.get(known.sandbox),
        )
        if found is not None:
            self._end(found)

    def _end(self, how: Ended) -> None:
        if not self._ended.done():
            self._ended.set_result(Ended("killed", self._killed) if self._killed else how)
            self.release()

    async def wait(self) -> Ended:
        return await asyncio.shield(self._ended)

    async def _hold_channel(self) -> None:
        """Keep the channel connected; a sandbox whose agent stays out of reach is lost.

        The cluster mostly knows why, a moment later: its word is waited for.
        """
        loop = asyncio.get_running_loop()
        away, strangers = loop.time(), 0
        while not self._ended.done():
            try:
                connection = await self.client.connection()
                await asyncio.shield(connection.closed)
                away, strangers = loop.time(), 0
            except AtollError as error:
                if self.client.over is not None:
                    return
                strangers += not isinstance(error, Unavailable)
                if strangers > STRANGERS or loop.time() - away > self._unreachable_s:
                    node = self.identity.node
                    self._end(Ended("lost", f"its agent on node {node} is out of reach: {error.message}"))
                    return
            await asyncio.sleep(RETRY)

    async def kill(self) -> None:
        """Delete the claim; the pod is gone when this returns."""
        self._killed = self._killed or "killed by the gateway"
        if not self._ended.done():
            await self._ask_to_end()
        await self._claims.delete(self.identity.claim, self.identity.claim_uid)
        await self._ways_out.close(self.id)
        self._end(Ended("killed", self._killed))

    async def stop(self) -> None:
        """End the pod and keep the volume; the pod is gone when this returns."""
        self._killed = self._killed or "stopped by the gateway"
        if not self._ended.done():
            await self._ask_to_end()
        await self._claims.suspend(self.identity)
        await self._ways_out.close(self.id)
        self._end(Ended("killed", self._killed))

    async def _ask_to_end(self) -> None:
        """Let the agent end by itself: the kubelet's grace period is then not waited for."""
        try:
            async with asyncio.timeout(AGENT_WORD):
                await self.client.request("shutdown", reason="destroyed")
        except (AtollError, TimeoutError, OSError):
            pass

    # Operations

    def _alive(self) -> None:
        if self._ended.done() or self._killed:
            raise SandboxGone(f"sandbox {self.id} has ended", details={"reason": "exited"})

    async def freeze(self) -> None:
        self._alive()
        raise Unsupported("a sandbox in a cluster cannot be paused", hint="let it run, or destroy it")

    async def thaw(self) -> None:
        self._alive()

    async def save_memory(self, name: str, key: bytes = b"", *, end: bool = False) -> Record:
        self._alive()
        raise Unsupported("the memory of a sandbox in a cluster cannot be saved", hint="keep its files with a snapshot")

    async def usage(self) -> Usage:
        """As the agent counts it: the kubelet's counters are not the gateway's to read."""
        said = await self.client.request("usage")
        try:
            disk = said.get("disk") or {}
            total, free = disk.get("total"), disk.get("free")
            used = int(total) - int(free) if total is not None and free is not None else None
            return Usage(
                int(said["mem_kb"]) * 1024,
                None,
                None,
                int(said["procs"]),
                used,
                int(total) if total is not None else None,
                None,
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Internal("the guest agent answered `usage` with something else") from None

    async def update_limits(self, limits: Limits) -> None:
        """Nothing of a running pod can change, and `capabilities.resizes` says so."""
        self._alive()

    async def set_policy(self, policy: Policy) -> None:
        await self._ways_out.update(self.id, policy)

    async def traffic(self) -> Traffic:
        return await self._ways_out.traffic(self.id)
