"""What a cluster does to a sandbox: it ends with a reason, and never becomes another one."""

import asyncio
import os
import signal

import pytest
from lab.contract import PlaceInCluster, run
from lab.waiting import PATIENCE, eventually

from atoll.backends.contract import Ended
from atoll.errors import AtollError, Unsupported

pytestmark = pytest.mark.kubernetes


async def end_of(box: object) -> Ended:
    async with asyncio.timeout(PATIENCE):
        return await box.wait()  # type: ignore[attr-defined, no-any-return]


async def test_a_deleted_pod_is_a_lost_sandbox(place: PlaceInCluster) -> None:
    assert place.cluster is not None
    box = await place.create()
    place.cluster.kubectl("delete", "pod", box.facts.shown["pod"], "--wait=false")
    ended = await end_of(box)
    assert ended.kind in ("lost", "killed") and ended.detail
    await place.backend.destroy(box.record)


async def test_a_replaced_sandbox_below_a_claim_is_never_the_callers(runc: PlaceInCluster) -> None:
    """The controller gives the claim another Sandbox, and the claim is ready again as if nothing had happened."""
    assert runc.cluster is not None
    box = await runc.create()
    await run(box, "/bin/sh", "-c", "echo mine > /workspace/file")
    runc.cluster.kubectl("delete", "sandbox", box.facts.shown["pod"], "--wait=false")
    ended = await end_of(box)
    assert ended.kind in ("lost", "killed")
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(AtollError):
            while True:  # its own agent may answer until its pod is gone
                await box.client.request("usage", timeout=20)
                await asyncio.sleep(0.1)
    await runc.backend.destroy(box.record)


async def test_an_expired_claim_ends_and_a_renewed_one_does_not(runc: PlaceInCluster) -> None:
    assert runc.cluster is not None
    lost, kept = await runc.create(), await runc.create()
    soon = '{"spec": {"lifecycle": {"shutdownTime": "2020-01-01T00:00:00Z"}}}'
    runc.cluster.kubectl("patch", "sandboxclaim", f"atoll-{lost.id}", "--type=merge", "-p", soon)
    assert (await end_of(lost)).kind in ("lost", "killed")
    before = runc.cluster.kubectl(
        "get", "sandboxclaim", f"atoll-{kept.id}", "-o", "jsonpath={.spec.lifecycle.shutdownTime}"
    )
    await asyncio.sleep(1.1)
    identity = kept.identity  # type: ignore[attr-defined]
    await runc.backend._claims.renew(identity.claim, identity.claim_uid)
    after = runc.cluster.kubectl(
        "get", "sandboxclaim", f"atoll-{kept.id}", "-o", "jsonpath={.spec.lifecycle.shutdownTime}"
    )
    assert after > before and (await run(kept, "/bin/true"))[0] == 0


async def test_a_killed_agent_is_the_end_of_its_sandbox(runc: PlaceInCluster) -> None:
    assert runc.cluster is not None
    box = await runc.create()
    agents = runc.cluster.processes_of(box.record["identity"]["pod_uid"], "/.atoll/guest")
    os.kill(min(agents), signal.SIGKILL)
    ended = await end_of(box)
    assert ended.kind == "killed" and "SIGKILL" in ended.detail


async def test_out_of_memory_ends_the_program_or_the_pod_and_says_so(place: PlaceInCluster) -> None:
    """The host's kernel ends the program; a gVisor pod ends as a whole."""
    box = await place.create()
    fill = "b = bytearray(1 << 30); b[:: 4096] = b'x' * len(b[:: 4096]); print('held')"
    running = asyncio.create_task(run(box, "/usr/bin/python3", "-c", fill))
    if place.runtime == "container":
        code, output = await running
        assert code != 0 and "held" not in output
        assert (await run(box, "/bin/true"))[0] == 0
        return
    ended = await end_of(box)
    assert ended.kind in ("oom", "killed"), ended
    await asyncio.wait([running], timeout=PATIENCE)
    running.cancel()


async def test_without_the_enforcer_a_new_sandbox_is_refused(runc: PlaceInCluster) -> None:
    """A pod that started while nobody enforced policies has a way out: its canary finds it."""
    cluster = runc.cluster
    assert cluster is not None
    with cluster.without("kube-netpol", *cluster.nodes()):
        cluster.kubectl("delete", "sandboxes", "--all", "--wait=true")
        await eventually(lambda: cluster.ready("container") > 0, "a pod has started without a policy")
        with pytest.raises(Unsupported) as refused:
            await runc.backend.create(runc.spec())
    assert refused.value.details["reason"] == "egress_unenforceable"
    assert refused.value.details["node"] in refused.value.message
    cluster.kubectl("delete", "sandboxes", "--all", "--wait=true")
    await eventually(lambda: cluster.ready("container") > 0, "pods start under a policy again")
    assert (await run(await runc.create(), "/bin/true"))[0] == 0
