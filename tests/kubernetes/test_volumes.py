"""Sandboxes whose /workspace is a volume: stopped and started again, and gone with everything when they end."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from lab.contract import PlaceInCluster, run
from lab.kubernetes import RUNTIMES
from lab.waiting import eventually

from atoll.backends.contract import Box, NetworkEvents, Workspace
from atoll.backends.kubernetes import KubernetesBackend
from atoll.errors import AtollError, NotFound

pytestmark = pytest.mark.kubernetes

MEMORY = 300  # of the pool with volumes alone, so that asking for it takes that pool


@pytest.fixture
async def durable(place: PlaceInCluster) -> AsyncIterator[PlaceInCluster]:
    """The place, with another pool of its runtime whose sandboxes have volumes."""
    cluster = place.cluster
    assert cluster is not None
    usual = [cluster.pool(name, name, kind) for name, kind in RUNTIMES.items()]
    kind = RUNTIMES[place.runtime]
    cluster.upgrade([*usual, cluster.pool("durable", place.runtime, kind, replicas=1, memoryMb=MEMORY, volumeMb=64)])
    try:
        await eventually(lambda: place.backend._pools.get("durable"), "the pool is seen")
        yield place
        await place.clear()
    finally:
        cluster.upgrade(usual)
        await eventually(lambda: not cluster.get("persistentvolumeclaims"), "no volume is left")


async def create(place: PlaceInCluster) -> Box:
    limits = replace(place.spec().limits, memory_mb=MEMORY)
    return await place.create(place.spec(limits=limits, required=frozenset(["memory_mb"])))


def volumes_of(place: PlaceInCluster, box: Box) -> list[str]:
    assert place.cluster is not None
    found = [one["metadata"]["name"] for one in place.cluster.get("persistentvolumeclaims")]
    return [name for name in found if name.endswith(box.facts.shown["pod"])]


async def test_k8e_D39_files_outlive_a_stop_and_end_with_their_session(durable: PlaceInCluster) -> None:
    """The next pod is another one: its processes and other files are new, and so is its environment."""
    box = await create(durable)
    assert box.capabilities.keeps_disk and len(volumes_of(durable, box)) == 1
    assert (await run(box, "/bin/sh", "-c", "echo kept > /workspace/file; echo gone > /root/file"))[0] == 0
    record = json.loads(json.dumps(box.record))
    await durable.backend.destroy(box.record, keep_disk=True)
    assert durable.cluster is not None and box.facts.shown["pod"] not in durable.cluster.claimed_pods()
    claim = next(one for one in durable.cluster.get("sandboxclaims") if one["metadata"]["name"] == f"atoll-{box.id}")
    until = datetime.fromisoformat(claim["spec"]["lifecycle"]["shutdownTime"])
    assert (until - datetime.now(UTC)).days >= 29, "the volume outlives its gateway for a month"
    again = await durable.create(
        durable.spec(
            id=box.id,
            limits=box.facts.limits,
            workspace=Workspace("kept", disk=record),
            boot={"env": {"PATH": "/usr/bin:/bin", "ROUND": "2"}},
        )
    )
    look = "cat /workspace/file; test -e /root/file || echo no other file; echo $ROUND"
    assert await run(again, "/bin/sh", "-c", look) == (0, "kept\nno other file\n2\n")
    assert again.record["identity"]["pod_uid"] != record["identity"]["pod_uid"]  # type: ignore[index]
    await durable.backend.destroy(again.record)
    await eventually(lambda: not volumes_of(durable, box), "the volume went with its sandbox")


async def test_another_gateway_starts_what_the_first_one_stopped_or_lost(durable: PlaceInCluster) -> None:
    cluster = durable.cluster
    assert cluster is not None
    box = await create(durable)
    assert (await run(box, "/bin/sh", "-c", "echo kept > /workspace/file"))[0] == 0
    record = json.loads(json.dumps(box.record))
    cluster.kubectl("delete", "pod", box.facts.shown["pod"], "--wait=false")
    assert (await box.wait()).kind in ("lost", "killed")
    await durable.backend.close()
    other = durable.backend = KubernetesBackend(cluster.settings())
    await other.start(NetworkEvents())
    await other.destroy(record, keep_disk=True)
    assert await other.sweep({box.id}) == []
    spec = durable.spec(id=box.id, limits=box.facts.limits, workspace=Workspace("kept", disk=record))
    again = await durable.create(spec)
    assert await run(again, "/bin/cat", "/workspace/file") == (0, "kept\n")


async def test_a_stop_without_a_volume_to_keep_leaves_nothing(durable: PlaceInCluster) -> None:
    """Somebody has deleted the Sandbox, and the cluster gives the claim an empty one."""
    cluster = durable.cluster
    assert cluster is not None
    box = await create(durable)
    cluster.kubectl("delete", "sandbox", box.facts.shown["pod"], "--wait=true")
    assert (await box.wait()).kind in ("lost", "killed")
    await durable.backend.destroy(box.record, keep_disk=True)
    assert f"atoll-{box.id}" not in cluster.claims()


async def test_a_stopped_sandbox_whose_volume_was_taken_away_is_gone(durable: PlaceInCluster) -> None:
    """The claim is given another, empty Sandbox by the cluster; the caller never gets it."""
    cluster = durable.cluster
    assert cluster is not None
    box = await create(durable)
    record = json.loads(json.dumps(box.record))
    await durable.backend.destroy(box.record, keep_disk=True)
    cluster.kubectl("delete", "sandbox", box.facts.shown["pod"], "--wait=true")
    spec = durable.spec(id=box.id, limits=box.facts.limits, workspace=Workspace("kept", disk=record))
    with pytest.raises(AtollError) as gone:
        await durable.backend.create(spec)
    assert gone.value.code in ("sandbox_gone", NotFound.code, "conflict"), gone.value
    await durable.backend.destroy(record)
