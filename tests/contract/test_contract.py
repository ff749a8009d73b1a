"""What core may rely on of any backend and any runtime (`backends/contract.py`)."""

import asyncio
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from lab.contract import Place, run
from lab.waiting import PATIENCE, eventually

from atoll.backends.contract import Image, Limits, Mount, Traffic, Workspace
from atoll.backends.local.paths import new_id
from atoll.errors import (
    AlreadyExists,
    AtollError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SandboxGone,
    Unsupported,
)
from atoll.model import Policy

BIGGER = Limits(cpus=2.0, memory_mb=300, pids=200, files=2048, disk_mb=128, shm_mb=300)


async def test_BK01_create_returns_a_sandbox_that_answers(place: Place) -> None:
    """The agent was reached already, the environment is in force, and the facts are those of the request."""
    spec = place.spec(boot={"env": {"PATH": "/usr/bin:/bin", "WHO": "me"}})
    box = await place.create(spec)
    assert box.client.connections == 1
    assert await run(box, "/bin/sh", "-c", "echo $WHO") == (0, "me\n")
    assert (box.id, box.facts.id, box.facts.runtime) == (spec.id, spec.id, place.runtime)
    assert box.facts.limits == spec.limits
    assert box.capabilities == place.backend.capabilities(place.runtime)


async def test_BK20_destroy_leaves_nothing_and_may_be_repeated(place: Place) -> None:
    box = await place.create()
    await place.backend.destroy(box.record)
    await eventually(place.nothing_left, "nothing is left")
    await place.backend.destroy(box.record)
    await place.backend.destroy({"id": box.id})
    with pytest.raises(AtollError):
        await box.client.request("usage")


async def test_BK03_a_cancelled_create_leaves_nothing(place: Place) -> None:
    for pause in (0.0, 0.01, 0.05):
        task = asyncio.create_task(place.backend.create(place.spec()))
        await asyncio.sleep(pause)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await place.backend.destroy(task.result().record)
        await eventually(place.nothing_left, f"nothing is left of a create cancelled after {pause} s")


async def test_BK04_an_id_is_used_once(place: Place) -> None:
    box = await place.create()
    with pytest.raises(AlreadyExists):
        await place.backend.create(place.spec(id=box.id))
    assert (await run(box, "/bin/true"))[0] == 0


async def test_BK07_a_required_limit_is_held_or_the_create_is_refused(place: Place) -> None:
    """A name that no host knows stands for a limit that this host cannot hold."""
    if place.plain:
        pytest.skip("holds no limits")
    with pytest.raises(Unsupported) as refused:
        await place.backend.create(place.spec(required=frozenset(["moon_mb"])))
    assert "moon_mb" in refused.value.message and refused.value.hint
    await eventually(place.nothing_left, "nothing is left")
    box = await place.create()
    held = [name for name, is_held in box.facts.enforced.items() if is_held]
    assert await place.create(place.spec(required=frozenset(held)))


async def test_BK10_wait_tells_how_it_ended_by_itself(place: Place) -> None:
    """Every waiter is told the same, also one that comes late."""
    box = await place.create()
    waiting = asyncio.create_task(box.wait())
    await box.client.request("configure", deadline_ms=1)
    async with asyncio.timeout(PATIENCE):
        assert (await waiting).kind == "exit" and (await waiting).detail
    assert await box.wait() == await waiting


async def test_BK11_BK25_after_kill_nothing_of_it_runs(place: Place) -> None:
    """Killing again is no error; what needs a living one says that it is gone."""
    box = await place.create()
    waiting = asyncio.create_task(box.wait())
    await box.kill()
    assert (await waiting).kind in ("killed", "exit")
    await box.kill()
    for use in (box.freeze, box.thaw, lambda: box.update_limits(BIGGER)):
        with pytest.raises(SandboxGone):
            await use()
    with pytest.raises(AtollError):
        await box.client.request("usage")


async def test_BK16_usage_counts_or_says_that_it_does_not(place: Place) -> None:
    box = await place.create()
    usage = await box.usage()
    for one in fields(usage):
        value = getattr(usage, one.name)
        assert value is None or (isinstance(value, int) and value >= 0), one.name
    if box.facts.enforced.get("memory_mb"):
        assert usage.memory_bytes
    if box.facts.enforced.get("disk_mb"):
        assert usage.disk_total_bytes and usage.disk_bytes is not None
        assert usage.disk_bytes <= usage.disk_total_bytes


async def test_BK17_the_next_daemon_adopts_the_living(place: Place) -> None:
    """By the record alone, as JSON."""
    box = await place.create()
    record, facts = json.loads(json.dumps(box.record)), box.facts
    await box.client.close()
    await place.backend.close()
    backend = await place.open()
    found = await backend.adopt(record, Policy())
    assert found is not None and found.facts == facts
    assert await backend.reconnect() == set()
    assert (await run(found, "/bin/true"))[0] == 0


async def test_BK18_the_dead_are_not_adopted(place: Place) -> None:
    """One that died while no daemon was there is taken away instead."""
    box = await place.create()
    record = json.loads(json.dumps(box.record))
    await box.kill()
    await box.client.close()
    await place.backend.close()
    backend = await place.open()
    assert await backend.adopt(record, Policy()) is None
    await eventually(place.nothing_left, "nothing is left")


async def test_BK12_a_frozen_sandbox_goes_on_when_it_is_thawed(place: Place) -> None:
    """Nothing in it runs meanwhile. One that is frozen can be destroyed. However often it was frozen, nothing in it is lost."""
    box, other = await place.create(), await place.create()
    if not place.freezes:
        with pytest.raises(Unsupported):
            await box.freeze()
        return
    for _ in range(4):
        await box.freeze()
        await box.thaw()
    assert [await run(box, "/bin/echo", "here") for _ in range(3)] == [(0, "here\n")] * 3
    await box.freeze()
    running = asyncio.create_task(run(box, "/bin/true"))
    await asyncio.sleep(0.2)
    assert not running.done()
    await box.thaw()
    assert (await running)[0] == 0
    await other.freeze()
    await place.backend.destroy(other.record)


async def test_BK13_only_the_limits_that_resize_change(place: Place) -> None:
    box = await place.create()
    before, can = box.facts.limits, box.capabilities.resizes
    await box.update_limits(BIGGER)
    for one in fields(Limits):
        wanted = BIGGER if one.name in can else before
        assert getattr(box.facts.limits, one.name) == getattr(wanted, one.name), one.name


async def test_BK14_without_a_network_there_is_no_policy_to_change(place: Place) -> None:
    box = await place.create()
    assert await box.traffic() == Traffic()
    with pytest.raises(FailedPrecondition):
        await box.set_policy(Policy())


async def test_BK02_BK15_a_policy_is_in_force_from_the_start_and_after_a_restart(place: Place) -> None:
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


async def test_BK06_a_policy_that_cannot_be_enforced_is_refused(place: Place) -> None:
    """This backend was opened without a network."""
    assert not (await place.backend.network()).works
    with pytest.raises(Unsupported):
        await place.backend.create(place.spec(policy=Policy(network="hosts")))
    await eventually(place.nothing_left, "nothing is left")


async def test_BK05_an_image_that_is_not_there_is_refused(place: Place) -> None:
    with pytest.raises(NotFound) as refused:
        await place.backend.create(place.spec(image=Image("gone", f"sha256:{'0' * 64}")))
    assert "gone" in refused.value.message and refused.value.hint
    await eventually(place.nothing_left, "nothing is left")


async def test_BK08_a_reservation_is_used_once_or_destroyed(place: Place) -> None:
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


async def test_BK19_sweep_destroys_what_nobody_knows(place: Place) -> None:
    known, unknown = await place.create(), await place.create()
    records = {box.id: dict(box.record) for box in (known, unknown)}
    for box in (known, unknown):
        await box.client.close()
    await place.backend.close()
    backend = await place.open()
    adopted = await backend.adopt(records[known.id], Policy())
    if place.plain:
        return  # plain processes have no mark by which they could be found
    assert await backend.sweep({known.id}) == [unknown.id]
    assert adopted is not None and (await run(adopted, "/bin/true"))[0] == 0


async def test_BK06_BK22_a_workspace_is_shared_where_the_runtime_can(place: Place) -> None:
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


async def test_BK06_BK23_a_mount_has_what_is_hidden_and_guarded_covered(place: Place, tmp_path: Path) -> None:
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


async def test_BK21_a_kept_disk_is_there_again(place: Place) -> None:
    if place.plain:
        pytest.skip("has no disks")
    box = await place.create()
    if not box.capabilities.keeps_disk:
        with pytest.raises(Unsupported):
            await place.create(place.spec(workspace=Workspace("kept", disk=dict(box.record))))
        return
    await run(box, "/bin/sh", "-c", "echo mine > /workspace/file; echo kept > /root/file")
    await place.backend.destroy(box.record, keep_disk=True)
    again = await place.create(place.spec(id=box.id, workspace=Workspace("kept", disk=dict(box.record))))
    assert await run(again, "/bin/cat", "/workspace/file", "/root/file") == (0, "mine\nkept\n")


async def test_BK26_runtimes_say_what_works_and_why_not(place: Place) -> None:
    told = await place.backend.runtimes()
    assert place.runtime in [status.name for status in told if status.works]
    assert all(status.why for status in told if not status.works)


async def test_BK27_a_backend_without_network_says_why(place: Place) -> None:
    status = await place.backend.network()
    assert not status.works and status.why


def test_every_promise_is_tested_and_every_test_is_promised() -> None:
    """The ids of the table in docs/contracts.md are those in the names of the tests."""
    here = Path(__file__).parent
    page = (here.parent.parent / "docs" / "contracts.md").read_text()
    promised = re.findall(r"^\| (BK\d\d) \|", page, re.M)
    names = re.findall(r"^async def (test_\w+)", "".join(f.read_text() for f in here.glob("test_*.py")), re.M)
    assert len(promised) == len(set(promised)) > 20
    assert set(promised) == {found for name in names for found in re.findall(r"BK\d\d", name)}


async def test_BK24_a_runtime_that_is_not_there_is_refused_by_kind(place: Place) -> None:
    if place.name == "microvm":
        with pytest.raises(Unsupported, match="by itself"):
            await place.backend.pick("auto")
    else:
        assert await place.backend.pick("auto")
    with pytest.raises((InvalidArgument, Unsupported)):
        await place.backend.pick("jail")
    if not place.plain:
        with pytest.raises(Unsupported) as refused:
            await place.backend.pick("firecracker")
        assert refused.value.hint


def replace_hosts(policy: Policy, *hosts: str) -> Policy:
    return Policy(network=policy.network, hosts=hosts)
