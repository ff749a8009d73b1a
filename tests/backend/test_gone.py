"""Nothing is left: after destroy, after a create that failed anywhere, after a daemon that died."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from lab.backend import (
    NOTHING,
    PATIENCE,
    Sandbox,
    census,
    chosen_runtime,
    holders_of,
    local_backend,
    namespaces,
    nothing_left,
    spec_for,
)
from lab.waiting import eventually

from atoll.backends.contract import BoxSpec, Workspace
from atoll.backends.local import LocalBackend
from atoll.backends.local.assembly import STEPS
from atoll.backends.local.layers import Rootfs
from atoll.backends.local.paths import new_id
from atoll.errors import AtollError, Internal
from atoll.model import Policy

pytestmark = pytest.mark.usefixtures("runtime")


class Broken(Exception):
    """The fault a test puts in."""


async def test_destroy_leaves_nothing(make, backend: LocalBackend) -> None:
    """No process, mount, namespace, group, loop device, directory or id range; a second destroy is fine."""
    sandbox = await make()
    await sandbox.client.request("exec", id="bg", shell="sleep 600 & setsid sleep 600", detach=True)
    spaces = namespaces(sandbox.box.pid) - namespaces(os.getpid())  # gVisor's kernel is in the host's pid namespace
    assert census(backend) != NOTHING
    await sandbox.destroy()
    assert census(backend) == NOTHING
    assert holders_of(spaces) == []
    await sandbox.destroy()
    assert (await sandbox.box.wait()).kind == "killed"


async def test_many_lives_at_once(make, backend: LocalBackend) -> None:
    """Eight made and destroyed together leave nothing and never share an id range."""
    boxes: list[Sandbox] = await asyncio.gather(*(make() for _ in range(8)))
    assert len({sandbox.box.record["base"] for sandbox in boxes}) == 8
    results = await asyncio.gather(*(sandbox.run("hostname") for sandbox in boxes))
    assert all(result.ok for result in results)
    await asyncio.gather(*(sandbox.destroy() for sandbox in boxes), *(sandbox.destroy() for sandbox in boxes))
    assert census(backend) == NOTHING


async def test_the_host_sees_no_mount(make) -> None:
    """The host's mount table has nothing of a living sandbox."""
    sandbox = await make()
    table = Path("/proc/self/mountinfo").read_text()
    for mark in (str(sandbox.backend.paths.home), f"{sandbox.backend.paths.stage()} ", " atoll ", "upper-root"):
        assert mark not in table


@pytest.mark.parametrize("cycles", [10, pytest.param(1000, marks=pytest.mark.long)])
async def test_cycles_leave_the_daemon_as_it_was(backend: LocalBackend, rootfs: Rootfs, cycles: int) -> None:
    """Descriptors, tasks and children of the daemon do not grow with the sandboxes it has had."""
    if cycles > 10 and not os.environ.get("ATOLL_TEST_LONG"):
        pytest.skip("only in the long run")

    async def once() -> None:
        sandbox = Sandbox(backend, await backend.create(spec_for(rootfs)))
        assert (await sandbox.run("true")).ok
        await sandbox.destroy()

    await once()
    before = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    for _ in range(cycles):
        await once()
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before[0], "descriptors are closed")
    assert len(asyncio.all_tasks()) <= before[1]
    assert census(backend) == NOTHING


@pytest.mark.parametrize("step", STEPS)
async def test_a_fault_at_any_step_leaves_nothing(backend: LocalBackend, rootfs: Rootfs, step: str) -> None:
    """Create is all or nothing, whichever step breaks; the same id can be used afterwards."""
    await backend.pick(chosen_runtime[-1])

    def fault(box: str, name: str) -> None:
        if name == step:
            raise Broken(name)

    backend.on_step = fault
    spec = spec_for(rootfs)
    with pytest.raises(Broken):
        await backend.create(spec)
    assert census(backend) == NOTHING
    backend.on_step = lambda box, name: None
    box = await backend.create(spec)
    await backend.destroy(box.record)
    assert census(backend) == NOTHING


@pytest.mark.parametrize("step", STEPS)
async def test_a_cancelled_create_leaves_nothing(backend: LocalBackend, rootfs: Rootfs, step: str) -> None:
    """A caller that goes away in the middle is no reason to leave anything."""
    await backend.pick(chosen_runtime[-1])
    reached = asyncio.Event()
    backend.on_step = lambda box, name: reached.set() if name == step else None
    task = asyncio.create_task(backend.create(spec_for(rootfs)))
    async with asyncio.timeout(PATIENCE):
        await reached.wait()
    task.cancel()
    try:
        box = await task
    except asyncio.CancelledError:
        pass
    else:
        await backend.destroy(box.record)  # it was done before the cancellation arrived
    assert census(backend) == NOTHING


async def test_bad_parts_leave_nothing(backend: LocalBackend, rootfs: Rootfs, tmp_path: Path) -> None:
    """A missing layer, an image without a directory to mount on, a network that cannot be had."""
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "proc").symlink_to("/etc")
    for spec in (
        spec_for(Rootfs(("/nonexistent/layer",))),
        spec_for(Rootfs((str(tmp_path / "image"),))),
        spec_for(rootfs, policy=Policy(network="hosts")),
    ):
        with pytest.raises((AtollError, Broken)):
            await backend.create(spec)
        assert census(backend) == NOTHING


async def test_a_failed_start_keeps_the_disk_of_a_stopped_sandbox(backend: LocalBackend, rootfs: Rootfs) -> None:
    """Only what the failed start made is taken away."""
    box = await backend.create(spec_for(rootfs))
    record = box.record
    await backend.destroy(record, keep_disk=True)

    def fault(box: str, name: str) -> None:
        raise Broken(name)

    backend.on_step = fault
    with pytest.raises(Broken):
        await backend.create(spec_for(rootfs, id=record["id"], workspace=Workspace("kept", disk=record)))
    backend.on_step = lambda box, name: None
    assert backend.paths.disk(record["id"]).exists()
    again = await backend.create(spec_for(rootfs, id=record["id"], workspace=Workspace("kept", disk=record)))
    assert again.record["base"] == record["base"]
    await backend.destroy(again.record)


async def test_sweep_buries_strangers_and_spares_the_known(make, backend: LocalBackend, rootfs: Rootfs) -> None:
    """Whatever bears our mark and nobody knows goes; the living and other people's files stay."""
    known, forgotten = await make(), await make()
    await forgotten.client.close()
    forgotten.box.release()
    del backend._boxes[forgotten.id]
    stray = {kind: new_id() for kind in ("run", "box", "group", "engine", "ids")}
    backend.paths.run(stray["run"]).mkdir()
    backend.paths.box(stray["box"]).mkdir()
    (backend.paths.disk(stray["box"])).write_bytes(b"x")
    backend.groups.create(stray["group"])
    backend.paths.state("runc", stray["engine"]).mkdir(parents=True)
    backend.ids.take(stray["ids"])
    other = backend.paths.runs / "not-a-sandbox"
    other.mkdir()
    found = await backend.sweep({known.id})
    assert set(found) == {forgotten.id, *stray.values()}
    assert other.exists()
    other.rmdir()
    assert (await known.run("true")).ok
    assert await backend.sweep({known.id}) == []
    await known.destroy()
    assert census(backend) == NOTHING


async def test_two_homes_do_not_bury_each_other(make, tmp_path: Path) -> None:
    """A second daemon's sweep finds nothing of the first one's."""
    sandbox = await make()
    other = local_backend(tmp_path / "other")
    await other.start()
    assert await other.sweep(set()) == []
    await other.close()
    assert (await sandbox.run("true")).ok


async def test_adoption_after_a_restart(make, backend: LocalBackend, rootfs: Rootfs) -> None:
    """A new daemon finds the sandbox by its record: running, reachable, with its files, and can end it."""
    first = await make()
    await first.client.request("exec", id="bg", shell="sleep 600", detach=True)
    await first.sh("echo kept > file")
    record = dict(first.box.record)
    await first.client.close()
    await backend.close()
    second = local_backend(backend.paths.home)
    await second.start()
    assert await second.sweep({first.id}) == []
    box = await second.adopt(record)
    assert box is not None and box is await second.adopt(record)
    again = Sandbox(second, box)
    assert (await again.run("cat", "file")).stdout == "kept\n"
    assert (await again.client.request("poll", id="bg"))["running"] is True
    await again.destroy()
    assert (await box.wait()).kind == "killed"
    assert census(second) == NOTHING
    await second.close()
    await backend.start()


async def test_the_dead_are_buried_not_adopted(make, backend: LocalBackend) -> None:
    """A sandbox that died meanwhile, and a number that now means another process, are None, and nothing of them is left."""
    dead, mistaken = await make(), await make()
    for sandbox in (dead, mistaken):
        await sandbox.client.close()
    dead_record, mistaken_record = dict(dead.box.record), dict(mistaken.box.record)
    mistaken_record["pid"] = os.getpid()
    await backend.close()
    os.kill(dead_record["pid"], signal.SIGKILL)
    fresh = local_backend(backend.paths.home)
    await fresh.start()
    await eventually(lambda: not fresh.groups.open(dead.id).pids(), "the killed one is gone")
    assert await fresh.adopt(dead_record) is None
    assert await fresh.adopt(mistaken_record) is None
    assert os.getpid()  # still here: the number alone never kills
    await nothing_left(fresh)
    await fresh.close()
    await backend.start()


async def test_how_it_ended(make) -> None:
    """An agent that is told to exit, and one that is shot from outside, are told apart."""
    exits, shot = await make(), await make()
    await exits.client.request("shutdown", reason="test")
    os.kill(shot.box.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        assert (await exits.box.wait()).kind == "exit"
        ended = await shot.box.wait()
    assert (ended.kind, ended.detail) == ("killed", "killed by signal 9")


CRASHER = """
import asyncio, os, signal, sys
from atoll.backends.contract import BoxSpec, Image, Limits
from atoll.backends.local import LocalBackend
from atoll.backends.local.layers import Rootfs
home, box, step, lowers, usr, runtime = sys.argv[1:7]
def die(_, name):
    if name == step:
        os.kill(os.getpid(), signal.SIGKILL)
async def layers(image):
    return Rootfs(tuple(lowers.split(":")), tuple(usr.split(":")))
async def main():
    backend = LocalBackend(home, layers=layers)
    await backend.start()
    await backend.pick(runtime)
    backend.on_step = die
    await backend.create(BoxSpec(box, Image("given"), runtime, limits=Limits(disk_mb=64)))
asyncio.run(main())
"""


@pytest.mark.parametrize("step", STEPS)
async def test_a_daemon_killed_in_the_middle_leaves_only_what_sweep_takes(
    backend: LocalBackend, rootfs: Rootfs, step: str
) -> None:
    """SIGKILL at every step of create; the next daemon's sweep leaves nothing."""
    await backend.pick(chosen_runtime[-1])
    spec: BoxSpec = spec_for(rootfs)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CRASHER, str(backend.paths.home), spec.id, step),
        *(":".join(rootfs.lowers), ":".join(rootfs.usr), spec.runtime),
    )
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == -signal.SIGKILL
    assert await backend.sweep(set()) == [spec.id]
    await nothing_left(backend)


async def test_destroy_says_when_something_stays(backend: LocalBackend) -> None:
    """A cleanup that fails is an error that names what was left, not silence."""
    box = new_id()
    run = backend.paths.run(box)
    run.mkdir()
    backend.groups.create(box)
    backend._verify(new_id(), keep_disk=False)
    with pytest.raises(Internal) as caught:
        backend._verify(box, keep_disk=False)
    assert str(run) in caught.value.details["left"]
    await backend.destroy({"id": box})
