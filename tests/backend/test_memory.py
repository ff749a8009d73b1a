"""Saving the memory of a gVisor sandbox and starting others from it: what they keep, what is new in them, what is refused."""

import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from lab.backend import Sandbox, chosen_runtime, spec_for

from atoll.backends.contract import BoxSpec, Memory
from atoll.backends.local import LocalBackend
from atoll.backends.local.box import LocalBox
from atoll.backends.local.layers import Rootfs
from atoll.backends.local.paths import new_id

pytestmark = pytest.mark.skipif(shutil.which("runsc") is None, reason="runsc is not installed")


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
