"""What a caller is told when a node goes, is drained, or the namespace is full."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from lab.contract import PlaceInCluster, run
from lab.waiting import PATIENCE, eventually

from atoll.backends.contract import NetworkEvents
from atoll.backends.kubernetes import KubernetesBackend
from atoll.errors import AtollError, Exhausted

pytestmark = pytest.mark.kubernetes


@pytest.fixture
async def impatient(runc: PlaceInCluster) -> AsyncIterator[PlaceInCluster]:
    """A gateway that gives an agent five seconds to come back."""
    assert runc.cluster is not None
    if len(runc.cluster.nodes()) < 2:
        pytest.skip("needs a cluster with two nodes")
    await runc.backend.close()
    runc.backend = KubernetesBackend(runc.cluster.settings(unreachable_s=5.0))
    await runc.backend.start(NetworkEvents())
    yield runc


async def test_a_node_without_power_loses_its_sandboxes_and_the_others_go_on(impatient: PlaceInCluster) -> None:
    """The channel decides: the cluster's own conditions are late. New sandboxes come from the other node."""
    cluster = impatient.cluster
    assert cluster is not None
    await eventually(lambda: all(cluster.ready(pool) for pool in ("container", "gvisor")), "the pools are full")
    boxes = [await impatient.create() for _ in range(3)]
    node = boxes[0].facts.shown["node"]
    here = [box for box in boxes if box.facts.shown["node"] == node]
    there = [box for box in boxes if box.facts.shown["node"] != node]
    calls = [asyncio.create_task(run(box, "/bin/sleep", "1000")) for box in here]
    await asyncio.sleep(0)
    with cluster.without("node", node):
        for box in here:
            async with asyncio.timeout(PATIENCE):
                ended = await box.wait()
            assert ended.kind == "lost" and node in ended.detail, ended
        for box in there:
            assert (await run(box, "/bin/true"))[0] == 0
        await eventually(lambda: cluster.kubectl("get", "node", node, "-o", READY) != "True", "the node is noticed")
        fresh = await impatient.create()
        assert fresh.facts.shown["node"] != node and (await run(fresh, "/bin/true"))[0] == 0
    for call in calls:
        call.cancel()
    told = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(one, AtollError | asyncio.CancelledError) for one in told), told
    await eventually(lambda: cluster.kubectl("get", "node", node, "-o", READY) == "True", "the node is back")


async def test_an_evicted_sandbox_is_lost_with_a_reason(runc: PlaceInCluster) -> None:
    """By the API that a drain uses."""
    cluster = runc.cluster
    assert cluster is not None
    box = await runc.create()
    pod = box.facts.shown["pod"]
    eviction = f'{{"apiVersion":"policy/v1","kind":"Eviction","metadata":{{"name":"{pod}"}}}}'
    path = f"/api/v1/namespaces/sandbox-matrix/pods/{pod}/eviction"
    cluster.kubectl("create", "--raw", path, "-f", "-", input=eviction)
    async with asyncio.timeout(PATIENCE):
        ended = await box.wait()
    assert ended.kind in ("lost", "killed") and ended.detail


async def test_a_full_namespace_is_exhausted_and_leaves_nothing(runc: PlaceInCluster) -> None:
    cluster = runc.cluster
    assert cluster is not None
    hard = "--hard=count/sandboxclaims.extensions.agents.x-k8s.io=1"
    cluster.kubectl("create", "quota", "few", hard)
    try:
        used = ("get", "quota", "few", "-o", "jsonpath={.status.hard}")
        await eventually(lambda: cluster.kubectl(*used), "the quota is in force")
        box = await runc.create()
        with pytest.raises(Exhausted) as refused:
            await runc.backend.create(runc.spec())
        assert "quota" in refused.value.message and refused.value.hint
        assert cluster.claims() == [f"atoll-{box.id}"]
    finally:
        cluster.kubectl("delete", "quota", "few")


READY = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
