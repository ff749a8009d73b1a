"""Saving the memory of a gVisor sandbox and starting others from it: what they keep, what is new in them, what is refused."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from lab.backend import Sandbox, chosen_runtime, spec_for
from lab.memory import gvisor_saves

from atoll.backends.contract import BoxSpec, Memory, Workspace
from atoll.backends.local import LocalBackend
from atoll.backends.local.box import LocalBox
from atoll.backends.local.layers import Rootfs
from atoll.backends.local.memory import save as save_module
from atoll.backends.local.memory.seal import new_key
from atoll.backends.local.paths import new_id
from atoll.errors import AtollError, DiskFull, FailedPrecondition, Unsupported

pytestmark = gvisor_saves


@pytest.fixture
def gvisor() -> Iterator[None]:
    chosen_runtime.append("gvisor")
    yield
    chosen_runtime.pop()


class Saved:
    """A saved memory, and sandboxes made from it."""

    def __init__(self, backend: LocalBackend, spec: BoxSpec, name: str, record: dict, key: bytes) -> None:
        self.backend, self.spec, self.name, self.record, self.key = backend, spec, name, record, key

    async def start(self, **changes: object) -> Sandbox:
        spec = replace(self.spec, id=new_id(), memory=Memory(self.record, self.key), **changes)
        box = await self.backend.create(spec)
        assert isinstance(box, LocalBox)
        return Sandbox(self.backend, box)


async def save(backend: LocalBackend, sandbox: Sandbox, spec: BoxSpec, *, key: bytes = b"") -> Saved:
    name = new_id()
    record = await sandbox.box.save_memory(name, key)
    return Saved(backend, spec, name, dict(record), key)


@pytest.fixture
async def parent(backend: LocalBackend, rootfs: Rootfs, gvisor: None) -> AsyncIterator[tuple[Sandbox, BoxSpec]]:
    spec = spec_for(rootfs)
    box = await backend.create(spec)
    assert isinstance(box, LocalBox)
    yield Sandbox(backend, box), spec
    await backend.sweep_memories(set())


async def test_a_fork_goes_on_with_memory_and_disk(backend: LocalBackend, parent) -> None:
    """A program that counts goes on counting in both; files of the disk are there; what one writes the other does not see."""
    sandbox, spec = parent
    await sandbox.sh("echo kept > /workspace/file; echo root > /etc/mark")
    await sandbox.sh("(i=0; while :; do i=$((i+1)); echo $i > /dev/shm/n; sleep 0.05; done) >/dev/null 2>&1 &")
    saved = await save(backend, sandbox, spec)
    before = int((await sandbox.sh("cat /dev/shm/n")).stdout)
    child = await saved.start()
    assert (await child.sh("cat /workspace/file /etc/mark")).stdout == "kept\nroot\n"
    first = int((await child.sh("cat /dev/shm/n")).stdout)
    await child.sh("sleep 0.5; echo mine > /workspace/file; echo more > /etc/mark")
    assert int((await child.sh("cat /dev/shm/n")).stdout) > first
    assert int((await sandbox.sh("cat /dev/shm/n")).stdout) > before
    assert (await sandbox.sh("cat /workspace/file /etc/mark")).stdout == "kept\nroot\n"
    assert (await child.sh("hostname")).stdout != (await sandbox.sh("hostname")).stdout
    await child.destroy()
    await sandbox.destroy()


async def test_each_part_that_has_to_be_equal_is_compared(backend: LocalBackend, parent) -> None:
    """Refused before anything is made, with the name of what differs."""
    sandbox, spec = parent
    saved = await save(backend, sandbox, spec)
    for name in saved.record["fit"]:
        other = {**saved.record, "fit": {**saved.record["fit"], name: "another"}}
        with pytest.raises(FailedPrecondition) as refused:
            await Saved(backend, spec, saved.name, other, b"").start()
        assert refused.value.details["differs"] == [name]
    with pytest.raises(FailedPrecondition):
        await saved.start(limits=replace(spec.limits, memory_mb=512))
    with pytest.raises(FailedPrecondition):
        await saved.start(seccomp="restrictive")
    await sandbox.destroy()


async def test_a_failed_save_leaves_nothing_and_the_sandbox_goes_on(
    backend: LocalBackend, parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step that can fail."""
    sandbox, spec = parent

    async def fail(*args: object) -> None:
        raise OSError(28, "no space left")

    def fail_at_once(*args: object, **options: object) -> None:
        raise OSError(28, "no space left")

    for owner, name, broken in (
        (type(sandbox.box), "write_state", fail),
        (save_module.disks, "copy_sparse", fail_at_once),
        (save_module.seal, "seal", fail_at_once),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(DiskFull):
                await save(backend, sandbox, spec, key=new_key())
        assert not os.listdir(backend.paths.memories)
        assert (await sandbox.sh("echo on")).stdout == "on\n"
    own = sandbox.box.record["agent_secret"]
    saved = await save(backend, sandbox, spec, key=new_key())
    assert sandbox.box.record["agent_secret"] == own != saved.record["agent_secret"]
    await sandbox.destroy()


async def test_ended_with_its_memory_it_goes_on_alone_on_its_own_disk(backend: LocalBackend, parent) -> None:
    """With `end` it has ended at that moment; another sandbox cannot start from it, it can, with the same id."""
    sandbox, spec = parent
    await sandbox.sh("echo memory > /dev/shm/m; echo disk > /workspace/d")
    name, key = new_id(), new_key()
    record = await sandbox.box.save_memory(name, key, end=True)
    await asyncio.wait_for(sandbox.box.wait(), 60)
    kept = sandbox.box.record
    await backend.destroy(kept, keep_disk=True)
    with pytest.raises(AtollError):
        await Saved(backend, spec, name, dict(record), key).start()
    again = replace(spec, memory=Memory(record, key), workspace=Workspace("kept", disk=kept))
    box = await backend.create(again)
    assert isinstance(box, LocalBox)
    woken = Sandbox(backend, box)
    assert (await woken.sh("cat /dev/shm/m /workspace/d")).stdout == "memory\ndisk\n"
    await woken.destroy()


async def test_other_runtimes_refuse(backend: LocalBackend, rootfs: Rootfs) -> None:
    """Saving and starting alike, with a hint."""
    box = await backend.create(spec_for(rootfs, runtime="container"))
    with pytest.raises(Unsupported) as refused:
        await box.save_memory(new_id())
    assert "another runtime" in (refused.value.hint or "")
    with pytest.raises(Unsupported):
        await backend.create(spec_for(rootfs, runtime="container", memory=Memory({"name": new_id()})))
    await backend.destroy(box.record)
