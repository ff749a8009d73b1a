"""What the backend makes of a cluster's answers, on a scripted API server with real agents. The real cluster has the other tests."""

import asyncio
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.contract import run
from lab.scripted_kubernetes import ScriptedApi, put_pool, scripted_backend
from lab.waiting import PATIENCE, eventually

from atoll.backends.contract import BoxSpec, Ended, Image, Limits, Workspace
from atoll.backends.kubernetes.claims import TERMINAL
from atoll.backends.local.paths import new_id
from atoll.errors import AlreadyExists, Exhausted, FailedPrecondition, NotFound, Unavailable, Unsupported
from atoll.model import Policy

ENV = {"PATH": "/usr/bin:/bin"}


def spec(**fields: Any) -> BoxSpec:
    return replace(BoxSpec(new_id(), Image("host"), "container", boot={"env": ENV}, base_env=ENV), **fields)


async def ended(box: Any) -> Ended:
    async with asyncio.timeout(PATIENCE):
        result: Ended = await box.wait()
        return result


async def test_a_claim_is_made_activated_used_adopted_and_deleted(tmp_path: Path) -> None:
    async with scripted_backend(tmp_path) as (api, backend):
        box = await backend.create(spec())
        assert await run(box, "/bin/sh", "-c", "echo hello") == (0, "hello\n")
        claim = api.objects["sandboxclaims"][f"atoll-{box.id}"]
        assert claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"
        assert claim["metadata"]["annotations"]["atoll.dev/fingerprint"] == "ab" * 32
        record = json.loads(json.dumps(box.record))
        backend._boxes.pop(box.id).release()  # as a gateway that was killed leaves it
        found = await backend.adopt(record, Policy())
        assert found is not None and found.facts == box.facts
        await backend.destroy(record)
        await backend.destroy({"id": box.id})
        assert not api.objects["sandboxclaims"] and not api.objects["pods"]


async def test_a_claim_that_was_given_up_fails_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    async def give_up(claim: dict[str, Any]) -> None:
        condition = {"type": "Ready", "status": "False", "reason": reason, "message": "says why"}
        claim["status"] = {"conditions": [condition]}
        api.put("sandboxclaims", claim)

    async with scripted_backend(tmp_path) as (api, backend):
        await backend.pick("container")
        api.controller = give_up
        for reason in sorted(TERMINAL):
            with pytest.raises(FailedPrecondition, match="says why"):
                await backend.create(spec())
            assert not api.objects["sandboxclaims"], reason


async def test_a_repeated_create_finds_its_claim_and_another_request_does_not(tmp_path: Path) -> None:
    async with scripted_backend(tmp_path) as (api, backend):
        wanted = spec()
        first = await backend.create(wanted)
        with pytest.raises(AlreadyExists):
            await backend.create(wanted)
        backend._boxes.pop(first.id).release()
        with pytest.raises(AlreadyExists):
            await backend.create(replace(wanted, limits=Limits(memory_mb=99)))
        assert first.id in str(api.objects["sandboxclaims"].keys())
        again = await backend.create(wanted)
        assert again.record == first.record
        backend._boxes.pop(first.id).release()
        claim = api.objects["sandboxclaims"][f"atoll-{first.id}"]
        claim["metadata"]["deletionTimestamp"] = "2020-01-01T00:00:00Z"
        with pytest.raises(AlreadyExists):
            await backend.create(wanted)


async def test_any_other_object_under_the_name_is_the_end(tmp_path: Path) -> None:
    """The cluster replaces pods and Sandboxes under their old names without asking."""

    def replace_pod(api: ScriptedApi, name: str) -> None:
        pod = api.objects["pods"][name]["metadata"]
        api.remove("pods", name)
        api.put_pod(name, pod["ownerReferences"][0]["uid"], pod["labels"]["agents.x-k8s.io/claim-uid"])

    def delete_pod(api: ScriptedApi, name: str) -> None:
        pod = copy.deepcopy(api.objects["pods"][name])
        pod["metadata"]["deletionTimestamp"] = "2020-01-01T00:00:00Z"
        api.put("pods", pod)

    def rebind_claim(api: ScriptedApi, name: str) -> None:
        claim = copy.deepcopy(api.objects["sandboxclaims"][name])
        claim["status"]["sandbox"]["name"] = "another"
        api.put("sandboxclaims", claim)

    faults = {
        "lost": [
            replace_pod,
            delete_pod,
            rebind_claim,
            lambda api, name: api.remove("sandboxes", name),
            lambda api, name: api.delete_claim(name),
        ],
        "oom": [lambda api, name: api.end_container(name, exitCode=137, reason="OOMKilled")],
        "killed": [lambda api, name: api.end_container(name, exitCode=137, reason="Error")],
        "exit": [lambda api, name: api.end_container(name, exitCode=0, reason="Completed")],
    }
    async with scripted_backend(tmp_path) as (api, backend):
        for kind, ways in faults.items():
            for fault in ways:
                box = await backend.create(spec())
                fault(api, f"atoll-{box.id}")
                end = await ended(box)
                assert end.kind == kind and end.detail, (kind, end)
                await backend.destroy(box.record)


async def test_a_broken_watch_is_taken_up_again_with_nothing_missed(tmp_path: Path) -> None:
    async with scripted_backend(tmp_path) as (api, backend):
        box = await backend.create(spec())
        api.cut_watches()
        api.end_container(f"atoll-{box.id}", exitCode=3, reason="Error")
        listed = len([call for call in api.calls if call == ("GET", "pods")])
        api.refuse = lambda method, kind: None
        other = await backend.create(spec())
        assert (await run(other, "/bin/true"))[0] == 0
        assert (await ended(box)).detail.endswith("3"), listed


async def test_a_cancelled_create_leaves_nothing(tmp_path: Path) -> None:
    async with scripted_backend(tmp_path) as (api, backend):
        await backend.pick("container")
        for pause in (0.0, 0.005, 0.02, 0.1):
            task = asyncio.create_task(backend.create(spec()))
            await asyncio.sleep(pause)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                await backend.destroy(task.result().record)
            await eventually(lambda: not api.objects["sandboxclaims"] and not api.objects["pods"], "nothing is left")


async def test_refusals_have_a_kind_and_a_hint(tmp_path: Path) -> None:
    async with scripted_backend(tmp_path) as (api, backend):
        await backend.pick("container")
        cases: list[tuple[type[Exception], dict[str, Any]]] = [
            (NotFound, {"image": Image("gone")}),
            (Unsupported, {"required": frozenset(["memory_mb"]), "limits": Limits(memory_mb=300)}),
            (Unsupported, {"read_only_root": True}),
            (Unsupported, {"policy": Policy(network="hosts")}),
            (Unsupported, {"workspace": Workspace("kept", disk={"id": "a" * 20})}),
        ]
        for kind, fields in cases:
            with pytest.raises(kind) as refused:
                await backend.create(spec(**fields))
            assert refused.value.hint, fields  # type: ignore[attr-defined]
        message = 'sandboxclaims "x" is forbidden: exceeded quota: sandboxes'
        api.refuse = lambda method, kind: (403, message) if (method, kind) == ("POST", "sandboxclaims") else None
        with pytest.raises(Exhausted):
            await backend.create(spec())
        api.refuse = lambda method, kind: None


async def test_what_nobody_knows_is_swept(tmp_path: Path) -> None:
    async with scripted_backend(tmp_path) as (api, backend):
        known, unknown, living = [await backend.create(spec()) for _ in range(3)]
        for box in (known, unknown):
            backend._boxes.pop(box.id).release()
        api.put("sandboxclaims", {"metadata": {"name": "somebody-elses"}, "spec": {}})
        assert await backend.sweep({known.id}) == [unknown.id]
        assert f"atoll-{living.id}" in api.objects["sandboxclaims"] and "somebody-elses" in api.objects["sandboxclaims"]


async def test_a_stopped_sandbox_keeps_its_objects_and_starts_in_a_new_pod(tmp_path: Path) -> None:
    async with scripted_backend(tmp_path) as (api, backend):
        put_pool(api, "python", "container", backend._agents.public_key, volume=True)
        await eventually(lambda: backend._pools.get("python").volume, "the pool is seen")  # type: ignore[union-attr]
        box = await backend.create(spec())
        assert box.capabilities.keeps_disk
        record, claim = json.loads(json.dumps(box.record)), api.objects["sandboxclaims"][f"atoll-{box.id}"]
        first = claim["spec"]["lifecycle"]["shutdownTime"]
        for _ in range(2):  # again is no error
            await backend.destroy(record, keep_disk=True)
            assert not api.objects["pods"] and await backend.sweep({box.id}) == []
        assert (await ended(box)).kind == "killed"
        assert (
            claim["metadata"]["annotations"]["atoll.dev/stopped"] and claim["spec"]["lifecycle"]["shutdownTime"] > first
        )
        again = await backend.create(spec(id=box.id, workspace=Workspace("kept", disk=record)))
        assert await run(again, "/bin/sh", "-c", "echo back") == (0, "back\n")
        assert again.record["identity"]["pod_uid"] != record["identity"]["pod_uid"]
        assert not claim["metadata"]["annotations"]["atoll.dev/stopped"]
        await backend.destroy(again.record)
        assert not api.objects["sandboxclaims"] and not api.objects["pods"]


async def test_a_start_that_fails_leaves_the_sandbox_stopped(tmp_path: Path) -> None:
    async with scripted_backend(tmp_path, start_s=0.5) as (api, backend):
        put_pool(api, "python", "container", backend._agents.public_key, volume=True)
        await eventually(lambda: backend._pools.get("python").volume, "the pool is seen")  # type: ignore[union-attr]
        box = await backend.create(spec())
        record = json.loads(json.dumps(box.record))
        await backend.destroy(record, keep_disk=True)
        usual, api.put_pod = api.put_pod, lambda *_: {}  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await backend.create(spec(id=box.id, workspace=Workspace("kept", disk=record)))
        api.put_pod = usual  # type: ignore[method-assign]
        assert f"atoll-{box.id}" in api.objects["sandboxclaims"] and not api.objects["pods"]
        assert api.objects["sandboxes"][f"atoll-{box.id}"]["spec"]["operatingMode"] == "Suspended"
        again = await backend.create(spec(id=box.id, workspace=Workspace("kept", disk=record)))
        assert (await run(again, "/bin/true"))[0] == 0
        await backend.destroy(again.record)
        assert not api.objects["sandboxclaims"]
