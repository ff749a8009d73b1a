"""What core may rely on of any backend and any runtime (`backends/contract.py`)."""

import asyncio
from dataclasses import fields, replace
from pathlib import Path

import pytest
from lab.contract import Place, run
from lab.waiting import eventually

from atoll.backends.contract import Image, Limits, Mount, Traffic, Workspace
from atoll.backends.local.paths import new_id
from atoll.errors import AtollError, FailedPrecondition, InvalidArgument, NotFound, Unsupported
from atoll.model import Policy

BIGGER = Limits(cpus=2.0, memory_mb=300, pids=200, files=2048, disk_mb=128, shm_mb=300)


async def test_create_returns_a_sandbox_that_answers(place: Place) -> None:
    """The agent was reached already, the environment is in force, and the facts are those of the request."""
    spec = place.spec(boot={"env": {"PATH": "/usr/bin:/bin", "WHO": "me"}})
    box = await place.create(spec)
    assert box.client.connections == 1
    assert await run(box, "/bin/sh", "-c", "echo $WHO") == (0, "me\n")
    assert (box.id, box.facts.id, box.facts.runtime) == (spec.id, spec.id, place.runtime)
    assert box.facts.limits == spec.limits
    assert box.capabilities == place.backend.capabilities(place.runtime)


async def test_destroy_leaves_nothing_and_may_be_repeated(place: Place) -> None:
    box = await place.create()
    await place.backend.destroy(box.record)
    await eventually(place.nothing_left, "nothing is left")
    await place.backend.destroy(box.record)
    await place.backend.destroy({"id": box.id})
    with pytest.raises(AtollError):
        await box.client.request("usage")


async def test_a_cancelled_create_leaves_nothing(place: Place) -> None:
    for pause in (0.0, 0.01, 0.05):
        task = asyncio.create_task(place.backend.create(place.spec()))
        await asyncio.sleep(pause)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await place.backend.destroy(task.result().record)
        await eventually(place.nothing_left, f"nothing is left of a create cancelled after {pause} s")


async def test_wait_tells_the_end_once_and_kill_is_one(place: Place) -> None:
    box = await place.create()
    waiting = asyncio.create_task(box.wait())
    await box.kill()
    assert (await waiting).kind in ("killed", "exit")
    assert await box.wait() == await waiting


async def test_the_next_daemon_adopts_the_living(place: Place) -> None:
    box = await place.create()
    record, facts = dict(box.record), box.facts
    await box.client.close()
    await place.backend.close()
    backend = await place.open()
    found = await backend.adopt(record, Policy())
    assert found is not None and found.facts == facts
    assert await backend.reconnect() == set()
    assert (await run(found, "/bin/true"))[0] == 0


async def test_the_dead_are_not_adopted(place: Place) -> None:
    box = await place.create()
    await place.backend.destroy(box.record)
    assert await place.backend.adopt(dict(box.record), Policy()) is None


async def test_a_frozen_sandbox_goes_on_when_it_is_thawed(place: Place) -> None:
    box = await place.create()
    await box.freeze()
    await box.thaw()
    assert (await run(box, "/bin/true"))[0] == 0


async def test_only_the_limits_that_resize_change(place: Place) -> None:
    box = await place.create()
    before, can = box.facts.limits, box.capabilities.resizes
    await box.update_limits(BIGGER)
    for one in fields(Limits):
        wanted = BIGGER if one.name in can else before
        assert getattr(box.facts.limits, one.name) == getattr(wanted, one.name), one.name


async def test_without_a_network_there_is_no_policy_to_change(place: Place) -> None:
    box = await place.create()
    assert await box.traffic() == Traffic()
    with pytest.raises(FailedPrecondition):
        await box.set_policy(Policy())


async def test_a_policy_is_in_force_from_the_start_and_after_a_restart(place: Place) -> None:
    policy = await place.connected()
    box = await place.create(policy=policy)
    look = ("/usr/bin/python3", "-c", "import socket; print(len(socket.if_nameindex()))")
    assert await run(box, *look) == (0, "2\n")
    await box.set_policy(replace_hosts(policy, "a.example"))
    assert (await box.traffic()).hosts == {}
    record = dict(box.record)
    await box.client.close()
    await place.backend.close()
    backend = await place.open(links=True)
    found = await backend.adopt(record, policy)
    assert found is not None and await backend.reconnect() == set()
    await found.set_policy(policy)
    assert await run(found, *look) == (0, "2\n")


async def test_a_policy_that_cannot_be_enforced_is_refused(place: Place) -> None:
    """This backend was opened without a network."""
    assert not (await place.backend.network()).works
    with pytest.raises(Unsupported):
        await place.backend.create(place.spec(policy=Policy(network="hosts")))
    await eventually(place.nothing_left, "nothing is left")


async def test_an_image_that_is_not_there_is_refused(place: Place) -> None:
    with pytest.raises(NotFound) as refused:
        await place.backend.create(place.spec(image=Image("gone", f"sha256:{'0' * 64}")))
    assert "gone" in refused.value.message and refused.value.hint
    await eventually(place.nothing_left, "nothing is left")


async def test_a_reservation_is_used_once_or_destroyed(place: Place) -> None:
    """A warm one keeps its id from the reservation on; one given back is never used for another caller."""
    backend = place.backend
    await backend.release("a" * 20)  # none is no error
    backend.prewarm(place.spec())
    if not backend.warmth()["enabled"]:
        spec = place.spec()
        assert backend.reserve(spec) == spec.id
        return
    await eventually(lambda: backend.warm_for(place.spec()) == 1, "one is warm")
    spec = place.spec()
    given_back = backend.reserve(spec)
    assert given_back != spec.id
    await backend.release(given_back)
    await eventually(lambda: backend.warm_for(place.spec()) == 1, "another one is warm")
    used = backend.reserve(spec)
    assert used not in (spec.id, given_back)
    box = await place.create(replace(spec, id=used))
    assert box.id == used and (await run(box, "/bin/true"))[0] == 0


async def test_sweep_destroys_what_nobody_knows(place: Place) -> None:
    known, unknown = await place.create(), await place.create()
    records = {box.id: dict(box.record) for box in (known, unknown)}
    for box in (known, unknown):
        await box.client.close()
    await place.backend.close()
    backend = await place.open()
    adopted = await backend.adopt(records[known.id], Policy())
    if not place.local:
        return  # plain processes have no mark by which they could be found
    assert await backend.sweep({known.id}) == [unknown.id]
    assert adopted is not None and (await run(adopted, "/bin/true"))[0] == 0


async def test_a_workspace_is_shared_where_the_runtime_can(place: Place) -> None:
    """Two sandboxes see the same files at once; a file of the rest of the disk stays its own."""
    box = await place.create()
    if not box.capabilities.shared_workspace:
        with pytest.raises(Unsupported):
            await place.backend.create(place.spec(workspace=Workspace("shared", box.id)))
        return
    await run(box, "/bin/sh", "-c", "echo mine > /workspace/file; echo own > /root/file")
    other = await place.create(workspace=Workspace("shared", box.id))
    assert await run(other, "/bin/cat", "/workspace/file") == (0, "mine\n")
    assert (await run(other, "/bin/cat", "/root/file"))[0] == 1
    with pytest.raises(NotFound):
        await place.backend.create(place.spec(workspace=Workspace("shared", new_id())))
    await place.backend.destroy(other.record)
    assert await run(box, "/bin/cat", "/workspace/file") == (0, "mine\n")


async def test_a_mount_has_what_is_hidden_and_guarded_covered(place: Place, tmp_path: Path) -> None:
    """Only what exists is covered, and a symbolic link is followed by neither."""
    shared = tmp_path / "shared"
    for name in ("secret", "settings", "plain"):
        (shared / name).mkdir(parents=True)
        (shared / name / "file").write_text(name)
    (shared / "link").symlink_to(shared / "plain")
    for path in (shared, *shared.iterdir()):
        path.chmod(0o777)
    hidden, guarded = ("absent", "secret"), ("absent", "link", "settings")
    mount = Mount(str(shared), "/mnt/shared", False, 0, 0, hidden, guarded)
    if not place.backend.capabilities(place.runtime).host_mounts:
        with pytest.raises(Unsupported):
            await place.backend.create(place.spec(mounts=(mount,)))
        await eventually(place.nothing_left, "nothing is left")
        return
    box = await place.create(mounts=(mount,))
    look = "cd /mnt/shared; ls -A secret; cat plain/file settings/file"
    assert await run(box, "/bin/sh", "-c", look) == (0, "plainsettings")
    assert (await run(box, "/bin/sh", "-c", "echo x > /mnt/shared/plain/new"))[0] == 0
    for covered in ("secret", "settings"):
        assert (await run(box, "/bin/sh", "-c", f"echo x > /mnt/shared/{covered}/new"))[0] != 0
    assert (shared / "plain" / "new").exists() and not (shared / "secret" / "new").exists()


async def test_a_kept_disk_is_there_again(place: Place) -> None:
    if not place.local:
        pytest.skip("has no disks")
    box = await place.create()
    await run(box, "/bin/sh", "-c", "echo mine > /workspace/file; echo kept > /root/file")
    await place.backend.destroy(box.record, keep_disk=True)
    again = await place.create(place.spec(id=box.id, workspace=Workspace("kept", disk=dict(box.record))))
    assert await run(again, "/bin/cat", "/workspace/file", "/root/file") == (0, "mine\nkept\n")


async def test_what_is_not_there_is_refused_by_kind(place: Place) -> None:
    assert await place.backend.pick("auto")
    with pytest.raises((InvalidArgument, Unsupported)):
        await place.backend.pick("jail")
    if place.local:
        with pytest.raises(Unsupported) as refused:
            await place.backend.pick("firecracker")
        assert refused.value.hint


def replace_hosts(policy: Policy, *hosts: str) -> Policy:
    return Policy(network=policy.network, hosts=hosts)
