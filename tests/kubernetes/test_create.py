"""Creates in a cluster: warm and cold, repeated, and refused with the cluster's own reason."""

from dataclasses import replace

import pytest
from lab.contract import PlaceInCluster, run
from lab.kubernetes import IMAGE, RUNTIMES, WARM
from lab.waiting import eventually

from atoll.backends.contract import NetworkEvents
from atoll.backends.kubernetes import KubernetesBackend
from atoll.errors import AlreadyExists, FailedPrecondition, Unsupported

pytestmark = pytest.mark.kubernetes


async def test_k8e_P47_a_create_is_a_claim_that_kubectl_shows(runc: PlaceInCluster) -> None:
    """It has the labels to be found by, a deadline, and nothing secret."""
    assert runc.cluster is not None
    secret = "not-for-the-cluster"
    box = await runc.create(boot={"env": {"PATH": "/usr/bin:/bin", "TOKEN": secret}})
    claim = next(one for one in runc.cluster.get("sandboxclaims"))
    assert claim["metadata"]["name"] == f"atoll-{box.id}"
    assert claim["metadata"]["labels"]["atoll.dev/sandbox"] == box.id
    assert claim["metadata"]["labels"]["atoll.dev/runtime"] == "container"
    assert claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete" and claim["spec"]["lifecycle"]["shutdownTime"]
    assert secret not in runc.cluster.kubectl("get", "sandboxclaims,sandboxes,pods", "-o", "json")
    assert (await run(box, "/bin/sh", "-c", "echo $TOKEN"))[1] == f"{secret}\n"


async def test_a_warm_pod_is_taken_and_an_empty_pool_starts_cold(place: PlaceInCluster) -> None:
    cluster = place.cluster
    assert cluster is not None
    await eventually(lambda: place.backend.warm_for(place.spec()) == WARM, "the pool is full")
    box = await place.create()
    assert box.facts.shown["started"] == "warm"
    pools = [cluster.pool(name, name, kind, replicas=0) for name, kind in RUNTIMES.items()]
    cluster.upgrade(pools)
    try:
        await eventually(lambda: place.backend.warm_for(place.spec()) == 0, "the pool is empty")
        cold = await place.create()
        assert cold.facts.shown["started"] == "cold"
        assert (await run(cold, "/bin/true"))[0] == 0
    finally:
        cluster.upgrade([cluster.pool(name, name, kind) for name, kind in RUNTIMES.items()])


async def test_a_repeated_create_is_the_same_sandbox_and_another_one_is_refused(runc: PlaceInCluster) -> None:
    """The second gateway has the same key and has never heard of the first one's sandbox."""
    assert runc.cluster is not None
    spec = runc.spec()
    first = await runc.create(spec)
    assert (await run(first, "/bin/sh", "-c", "echo mine > /workspace/file"))[0] == 0
    other = KubernetesBackend(runc.cluster.settings())
    await other.start(NetworkEvents())
    try:
        with pytest.raises(AlreadyExists):
            await other.create(replace(spec, boot={"env": {"PATH": "/bin", "MORE": "1"}}))
        again = await other.create(spec)
        assert await run(again, "/bin/cat", "/workspace/file") == (0, "mine\n")
        assert again.record["identity"] == first.record["identity"]
    finally:
        await other.close()


async def test_an_unknown_runtime_class_is_refused_at_once_with_its_name(runc: PlaceInCluster) -> None:
    cluster = runc.cluster
    assert cluster is not None
    usual = [cluster.pool(name, name, kind) for name, kind in RUNTIMES.items()]
    cluster.upgrade([*usual, cluster.pool("kata", "kata", "no-such-class", replicas=0)])
    try:
        await eventually(lambda: runc.backend._pools.of_runtime("kata"), "the pool is seen")
        with pytest.raises(Unsupported) as refused:
            await runc.backend.create(runc.spec(runtime="kata"))
        assert "no-such-class" in refused.value.message
        # The same when the controller finds out: the claim fails with its reason, long before the time is up.
        with pytest.raises(FailedPrecondition) as failed:
            await runc.backend._create(runc.spec(runtime="kata"), runc.backend._pools.get("kata"))
        assert "no-such-class" in failed.value.message
    finally:
        cluster.upgrade(usual)


async def test_k8e_P48_runtimes_are_those_that_really_started(runc: PlaceInCluster) -> None:
    told = {status.name: status for status in await runc.backend.runtimes()}
    assert told["container"].works and told["gvisor"].works
    assert not told["kata"].works and told["kata"].fix
    assert await runc.backend.pick("auto") == "gvisor"


async def test_a_required_size_takes_the_pool_that_has_it(runc: PlaceInCluster) -> None:
    box = await runc.create(required=frozenset(["memory_mb", "cpus"]))
    assert box.facts.enforced["memory_mb"] and box.facts.enforced["cpus"]
    wanted = replace(runc.spec().limits, memory_mb=300)
    with pytest.raises(Unsupported) as refused:
        await runc.backend.create(runc.spec(limits=wanted, required=frozenset(["memory_mb"])))
    assert "memory_mb=300" in refused.value.message
    larger = await runc.create(limits=wanted)
    assert not larger.facts.enforced["memory_mb"]
    assert larger.record["pool"] == "container" and IMAGE
