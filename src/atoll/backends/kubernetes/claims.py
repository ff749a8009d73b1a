"""Claims: made once, found again, followed until the sandbox below them is ready, and taken away."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from atoll.backends.kubernetes import names
from atoll.backends.kubernetes.api import CLAIMS, EVENTS, EXTENSIONS, PODS, SANDBOXES, Cluster, Object
from atoll.backends.kubernetes.watching import Watch
from atoll.errors import AlreadyExists, AtollError, Conflict, FailedPrecondition, NotFound, SandboxGone, Unavailable

log = logging.getLogger("atoll.kubernetes")

TERMINAL = frozenset(
    [
        "WarmPoolNotFound",
        "TemplateNotFound",
        "InvalidMetadata",
        "EnvVarsInjectionRejected",
        "VolumeClaimTemplatesError",
        "ReconcilerError",
        "ClaimExpired",
        "SandboxExpired",
        "PodSucceeded",
        "PodFailed",
    ]
)
ENDED_BEFORE = frozenset(["PodSucceeded", "PodFailed"])
AGAIN = 5  # attempts to make a claim while the API server is away
GONE_TIMEOUT = 120.0  # for a pod to go


@dataclass(frozen=True, slots=True)
class Identity:
    """The objects that a sandbox is. Another UID under one of these names is another sandbox."""

    claim: str
    claim_uid: str
    sandbox: str
    sandbox_uid: str
    pod_uid: str
    address: str
    node: str
    started: Literal["warm", "cold"]

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Identity":
        return Identity(**value)


class Claims:
    """All claims of the namespace that have this gateway's mark."""

    def __init__(self, cluster: Cluster, mark: str, lease_s: float, stopped_s: float) -> None:
        self._cluster = cluster
        self._mark = mark
        self._lease_s = lease_s
        self._stopped_s = stopped_s
        self.claims = Watch(cluster, CLAIMS, f"{names.GATEWAY}={mark}")
        self.sandboxes = Watch(cluster, SANDBOXES)
        self.pods = Watch(cluster, PODS, names.NAME_HASH)

    async def start(self) -> None:
        await asyncio.gather(*(watch.start() for watch in (self.claims, self.sandboxes, self.pods)))

    async def close(self) -> None:
        await asyncio.gather(*(watch.close() for watch in (self.claims, self.sandboxes, self.pods)))

    # Making

    async def make(self, sandbox: str, pool: str, labels: Mapping[str, str], digest: str) -> Object:
        """Create the claim of a sandbox; adopt one that is there already if it is the same request's."""
        name = names.claim_name(sandbox)
        labels = {names.GATEWAY: self._mark, names.SANDBOX: sandbox, **labels}
        wanted: Object = {
            "apiVersion": EXTENSIONS,
            "kind": "SandboxClaim",
            "metadata": {"name": name, "labels": labels, "annotations": {names.REQUEST: digest}},
            "spec": {"warmPoolRef": {"name": pool}, "lifecycle": self._lifecycle()},
        }
        for attempt in range(1, AGAIN + 1):
            try:
                return await self._cluster.create(CLAIMS, wanted)
            except AlreadyExists:
                found = await self._cluster.get(CLAIMS, name)
                if not self._is_same(found, pool, digest):
                    raise AlreadyExists(f"sandbox {sandbox} is there already") from None
                return found
            except Unavailable:  # whether it was made is found out by making it again
                if attempt == AGAIN:
                    raise
                await asyncio.sleep(0.2 * attempt)
        raise AssertionError("unreachable")

    def _is_same(self, found: Object, pool: str, digest: str) -> bool:
        metadata = found["metadata"]
        return (
            found["spec"]["warmPoolRef"]["name"] == pool
            and metadata.get("labels", {}).get(names.GATEWAY) == self._mark
            and metadata.get("annotations", {}).get(names.REQUEST) == digest
            and "deletionTimestamp" not in metadata
        )

    def _lifecycle(self, seconds: float = 0.0) -> Object:
        until = datetime.now(UTC) + timedelta(seconds=seconds or self._lease_s)
        return {"shutdownTime": until.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"}

    async def renew(self, name: str, uid: str) -> None:
        """Move the deadline of a claim."""
        change = {"metadata": {"uid": uid}, "spec": {"lifecycle": self._lifecycle()}}
        await self._cluster.patch(CLAIMS, name, change)

    async def renew_stopped(self) -> None:
        """Move the deadlines of stopped sandboxes of which half the time is over."""
        for claim in self.claims.all():
            if names.STOPPED in claim["metadata"].get("annotations", {}) and self._left(claim) < self._stopped_s / 2:
                metadata = claim["metadata"]
                change = {"metadata": {"uid": metadata["uid"]}, "spec": {"lifecycle": self._lifecycle(self._stopped_s)}}
                await self._cluster.patch(CLAIMS, metadata["name"], change)

    def _left(self, claim: Object) -> float:
        """Return the seconds until a claim's deadline."""
        until = claim["spec"].get("lifecycle", {}).get("shutdownTime", "")
        return (datetime.fromisoformat(until) - datetime.now(UTC)).total_seconds() if until else 0.0

    async def annotate(self, name: str, uid: str, notes: Mapping[str, str]) -> None:
        await self._cluster.patch(CLAIMS, name, {"metadata": {"uid": uid, "annotations": dict(notes)}})

    # Following

    async def ready(self, name: str, uid: str, timeout: float, *, again: bool = False) -> Identity:
        """Wait until the sandbox of a claim runs. Fail at once when the controller has given it up.

        `again`: it starts again, and its claim may still tell how it ended last time.
        """
        changed = asyncio.Event()

        def notice(_: Object | None) -> None:
            changed.set()

        with ExitStack() as following:
            following.enter_context(self.claims.followed(name, notice))
            below = ""
            try:
                async with asyncio.timeout(timeout):
                    while True:
                        changed.clear()
                        claim = self.claims.get(name)
                        if claim is not None and claim["metadata"]["uid"] == uid:
                            self._check(claim, again=again)
                            if below != (now := _sandbox_name(claim)):
                                below = now
                                following.enter_context(self.sandboxes.followed(now, notice))
                                following.enter_context(self.pods.followed(now, notice))
                            if (found := self.identify(claim)) is not None:
                                return found
                        await changed.wait()
            except TimeoutError:
                raise await self._late(name, below or name, timeout) from None

    def _check(self, claim: Object, *, again: bool) -> None:
        """Raise what the controller says of a claim that will never be ready."""
        name = claim["metadata"]["name"]
        if "deletionTimestamp" in claim["metadata"]:
            raise SandboxGone(f"the claim {name} was deleted while its sandbox started", details={"reason": "lost"})
        condition = find_condition(claim, "Ready")
        if condition.get("status") == "False" and condition.get("reason") in (
            TERMINAL - ENDED_BEFORE if again else TERMINAL
        ):
            raise FailedPrecondition(
                f"the cluster cannot start the sandbox: {condition['reason']}: {condition.get('message', '')}",
                hint=f"kubectl -n {self._cluster.namespace} describe sandboxclaim {name}",
                details={"reason": condition["reason"]},
            )

    def identify(self, claim: Object) -> Identity | None:
        """Return the objects below a claim if they all run and belong to it; None: not yet, or not any more."""
        sandbox = _sandbox_name(claim)
        if find_condition(claim, "Ready").get("status") != "True" or not sandbox:
            return None
        below, pod = self.sandboxes.get(sandbox), self.pods.get(sandbox)
        if below is None or not _owned_by(below, claim) or pod is None or not _owned_by(pod, below):
            return None
        status = pod.get("status", {})
        if "deletionTimestamp" in pod["metadata"] or status.get("phase") != "Running" or not status.get("podIP"):
            return None
        name = claim["metadata"]["name"]
        return Identity(
            name,
            claim["metadata"]["uid"],
            sandbox,
            below["metadata"]["uid"],
            pod["metadata"]["uid"],
            status["podIP"],
            pod["spec"].get("nodeName", ""),
            "cold" if sandbox == name else "warm",
        )

    async def _late(self, name: str, pod: str, timeout: float) -> AtollError:
        """Return the error for a sandbox that is not ready in time, with what the cluster says about it."""
        said = await self._newest_event(pod)
        condition = find_condition(self.claims.get(name) or {}, "Ready")
        said = said or str(condition.get("message", "")) or "the controller has not answered; does it run?"
        return Unavailable(
            f"the sandbox was not ready after {timeout:g} s: {said}",
            hint=f"kubectl -n {self._cluster.namespace} describe pod {pod}",
        )

    async def _newest_event(self, pod: str) -> str:
        try:
            found = await self._cluster.list(EVENTS, fields=f"involvedObject.name={pod},type=Warning")
        except AtollError:
            return ""
        newest: Object = max(found["items"], key=lambda one: one.get("lastTimestamp") or "", default={})
        return str(newest.get("message", ""))

    # Stopping and starting again

    async def suspend(self, known: Identity) -> None:
        """End the pod of a sandbox and keep its volume; return when the pod is gone.

        Its deadline is moved first: a gateway that dies in the middle leaves a volume, not nothing. Where somebody else has
        taken the Sandbox away there is no volume to keep: the claim is deleted, with what the cluster put in its place.
        """
        try:
            await self._suspend(known)
        except (NotFound, Conflict, SandboxGone) as error:
            log.error("the files of %s cannot be kept: %s", known.claim, error.message)
            await self.delete(known.claim, known.claim_uid)

    async def _suspend(self, known: Identity) -> None:
        notes = {"uid": known.claim_uid, "annotations": {names.STOPPED: "true"}}
        change = {"metadata": notes, "spec": {"lifecycle": self._lifecycle(self._stopped_s)}}
        await self._cluster.patch(CLAIMS, known.claim, change)
        await self._set_mode(known, "Suspended")
        await self._until_stopped(known)

    async def resume(self, known: Identity, digest: str) -> None:
        """Let a stopped sandbox have a pod again."""
        await self._until_stopped(known)
        notes = {"uid": known.claim_uid, "annotations": {names.STOPPED: None, names.REQUEST: digest}}
        await self._cluster.patch(CLAIMS, known.claim, {"metadata": notes, "spec": {"lifecycle": self._lifecycle()}})
        await self._set_mode(known, "Running")

    async def _set_mode(self, known: Identity, mode: str) -> None:
        change = {"metadata": {"uid": known.sandbox_uid}, "spec": {"operatingMode": mode}}
        await self._cluster.patch(SANDBOXES, known.sandbox, change)

    async def _until_stopped(self, known: Identity) -> None:
        """Wait until the pod of a suspended sandbox is gone: until then it may still write to the volume."""
        changed = asyncio.Event()
        with ExitStack() as following:
            for watch in (self.sandboxes, self.pods):
                following.enter_context(watch.followed(known.sandbox, lambda _: changed.set()))
            try:
                async with asyncio.timeout(GONE_TIMEOUT):
                    while not self._is_stopped(known):
                        changed.clear()
                        await changed.wait()
            except TimeoutError:
                raise Unavailable(
                    f"pod {known.sandbox} (node {known.node}) has not ended after {GONE_TIMEOUT:g} s",
                    hint="if the node is lost, wait for it or taint it node.kubernetes.io/out-of-service",
                ) from None

    def _is_stopped(self, known: Identity) -> bool:
        below = self.sandboxes.get(known.sandbox)
        if below is None or below["metadata"]["uid"] != known.sandbox_uid:
            raise SandboxGone(f"the Sandbox {known.sandbox} is gone, and its files", details={"reason": "lost"})
        suspended = find_condition(below, "Suspended").get("status") == "True"
        return suspended and self.pods.get(known.sandbox) is None

    # Taking away

    async def delete(self, name: str, uid: str = "") -> None:
        """Delete a claim and wait until nothing is left below it. One that is not there is no error."""
        if not uid:
            with suppress(NotFound):
                uid = str((await self._cluster.get(CLAIMS, name))["metadata"]["uid"])
        if not uid:
            return
        await self._cluster.delete(CLAIMS, name, uid)
        try:
            async with asyncio.timeout(GONE_TIMEOUT):
                while left := self._left_of(name, uid):
                    await self._until_changed(*left)
        except TimeoutError:
            watch, what = self._left_of(name, uid) or (self.claims, name)
            node = (watch.get(what) or {}).get("spec", {}).get("nodeName", "?")
            raise Unavailable(
                f"{what} (node {node}) is not gone after {GONE_TIMEOUT:g} s",
                hint="if the node is lost, wait for it or taint it node.kubernetes.io/out-of-service",
            ) from None

    async def delete_request(self, sandbox: str, pool: str, digest: str) -> None:
        """Delete the claim that one create has made, and no other of the same name."""
        name = names.claim_name(sandbox)
        with suppress(NotFound):
            found = await self._cluster.get(CLAIMS, name)
            if self._is_same(found, pool, digest) or "deletionTimestamp" in found["metadata"]:
                await self.delete(name, found["metadata"]["uid"])

    def _left_of(self, name: str, uid: str) -> tuple[Watch, str] | None:
        """Return one object that is still there of a claim that was deleted."""
        claim = self.claims.get(name)
        if claim is not None and claim["metadata"]["uid"] == uid:
            return self.claims, name
        for watch in (self.sandboxes, self.pods):
            for value in watch.all():
                metadata = value["metadata"]
                owners = [one.get("uid") for one in metadata.get("ownerReferences", ())]
                if uid in owners or metadata.get("labels", {}).get(names.CLAIM_UID) == uid:
                    return watch, str(metadata["name"])
        return None

    async def _until_changed(self, watch: Watch, name: str) -> None:
        changed = asyncio.Event()
        with watch.followed(name, lambda _: changed.set()):
            await changed.wait()


def find_condition(value: Object, kind: str) -> Object:
    """Return a condition of an object's status; an empty one if it is not there."""
    found = [one for one in value.get("status", {}).get("conditions", ()) if one.get("type") == kind]
    return found[0] if found else {}


def _sandbox_name(claim: Object) -> str:
    return str(claim.get("status", {}).get("sandbox", {}).get("name", ""))


def _owned_by(value: Object, owner: Object) -> bool:
    uid = owner["metadata"]["uid"]
    return any(one.get("uid") == uid for one in value["metadata"].get("ownerReferences", ()))
