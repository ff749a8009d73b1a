"""Limits: the sandbox that goes over one is stopped, nobody else notices."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from lab.backend import PATIENCE, SMALL, spec_for
from lab.waiting import eventually

from atoll.backends.contract import Limits
from atoll.backends.local import LocalBackend
from atoll.backends.local.layers import Rootfs
from atoll.errors import DiskFull, InvalidArgument, SandboxGone

pytestmark = pytest.mark.usefixtures("runtime")


async def test_all_limits_are_held_here(make) -> None:
    """This host enforces each, and says so."""
    sandbox = await make()
    assert sandbox.box.facts.enforced == dict.fromkeys(SMALL.to_json(), True)


async def test_too_much_memory_kills_the_hog_only(make, runtime: str) -> None:
    """The kernel kills inside the sandbox's group, and the counter says so; under gVisor the agent kills. The neighbour lives on."""
    hog, neighbour = await make(), await make()
    result = await hog.python("x = bytearray(1 << 30); print(len(x))")
    assert result.stdout == "" and not result.ok
    kills = (await hog.box.usage()).oom_kills
    assert kills == 0 and result.exit.oom if runtime == "gvisor" else kills and kills >= 1
    assert (await hog.run("true")).ok
    assert (await neighbour.run("true")).ok
    assert (await neighbour.box.usage()).oom_kills == 0


async def test_an_init_that_dies_of_memory_is_told_as_oom(make, runtime: str) -> None:
    """When the kernel's choice falls on the agent itself the sandbox ends with the reason `oom`."""
    if runtime == "gvisor":
        pytest.skip("there the host kills nothing inside: see the test before")
    sandbox = await make()
    await sandbox.python("x = bytearray(1 << 30)")
    sandbox.box._init.signal(9)  # as the kernel would, after the counter went up
    async with asyncio.timeout(PATIENCE):
        ended = await sandbox.box.wait()
    assert ended.kind == "oom" and "memory" in ended.detail


async def test_memory_of_tmpfs_counts(make) -> None:
    """/dev/shm is sized, and what is in it belongs to the sandbox."""
    sandbox = await make(limits=replace(SMALL, shm_mb=64))
    result = await sandbox.sh("dd if=/dev/zero of=/dev/shm/x bs=1M count=100")
    assert not result.ok and "No space" in result.stderr


async def test_a_fork_bomb_stays_inside(make) -> None:
    """Forks fail at the limit, the agent answers on, and kill empties the group."""
    sandbox = await make(limits=Limits(memory_mb=1024, pids=64, disk_mb=64))
    code = """
import os, time
made = 0
try:
    for _ in range(1000):
        if os.fork() == 0:
            time.sleep(600)
        made += 1
except OSError as error:
    print(made, error.errno)
"""
    result = await sandbox.python(code)
    made, errno = map(int, result.stdout.split())
    assert errno == 11 and made < 80
    async with asyncio.timeout(PATIENCE):
        await sandbox.box.kill()
    assert (await sandbox.box.wait()).kind == "killed"
    await eventually(lambda: not sandbox.backend.groups.open(sandbox.id).pids(), "the group is empty")


async def test_a_full_disk_is_enospc_for_the_writer_only(make) -> None:
    """Root, /usr, /tmp and workspace share the disk; deleting gives the room back."""
    sandbox = await make(limits=Limits(memory_mb=256, disk_mb=32))
    result = await sandbox.sh("dd if=/dev/zero of=/workspace/x bs=1M count=64")
    assert not result.ok and "No space" in result.stderr
    assert "No space" in (await sandbox.sh("dd if=/dev/zero of=/usr/y bs=1M count=8")).stderr
    assert (await sandbox.sh("rm /workspace/x && dd if=/dev/zero of=/tmp/y bs=1M count=8")).ok
    usage = await sandbox.box.usage()
    assert usage.disk_total_bytes and usage.disk_total_bytes <= 32 << 20
    image = sandbox.backend.paths.disk(sandbox.id)
    assert image.stat().st_size == 32 << 20


async def test_inodes_end_too(make) -> None:
    """Millions of empty files are ENOSPC inside and one file outside."""
    sandbox = await make(limits=Limits(memory_mb=256, disk_mb=16))
    code = """
import os
try:
    for n in range(10**6): os.close(os.open(f"/workspace/{n}", os.O_CREAT | os.O_WRONLY))
except OSError as error: print(error.errno)
"""
    assert (await sandbox.python(code)).stdout == "28\n"
    assert [path.name for path in sandbox.backend.paths.box(sandbox.id).iterdir()] == ["disk.img"]


async def test_the_cpu_quota_is_set_and_felt(make) -> None:
    """The kernel has the number, and a busy loop is throttled by it."""
    sandbox = await make(limits=Limits(cpus=0.05, memory_mb=256, disk_mb=64))
    directory = sandbox.backend.groups.open(sandbox.id)._of("cpu")
    assert directory is not None
    name = "cpu.max" if sandbox.backend.groups.hierarchies.is_v2("cpu") else "cpu.cfs_quota_us"
    quota = Path(directory, name)
    assert quota.read_text().split()[0] == "5000"
    await sandbox.client.request("exec", id="burner", shell="while :; do :; done", detach=True)

    def throttled() -> bool:
        counters = dict(line.split() for line in Path(directory, "cpu.stat").read_text().splitlines())
        return int(counters["nr_throttled"]) > 0

    await eventually(throttled, "the busy loop is throttled")
    assert (await sandbox.box.usage()).cpu_us


async def test_open_files_end(make) -> None:
    """RLIMIT_NOFILE is the asked one, hard."""
    sandbox = await make(limits=Limits(memory_mb=256, disk_mb=64, files=100))
    result = await sandbox.python("import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")
    assert result.stdout == "100 100\n"


async def test_limits_can_change(make, runtime: str) -> None:
    """Up and down, at once, in both orders memory and swap allow. Under gVisor the agent holds the limit it was started with."""
    sandbox = await make()
    if runtime == "gvisor":
        await sandbox.box.update_limits(Limits(memory_mb=512, cpus=2))
        kept = sandbox.box.record["limits"]
        assert (kept["memory_mb"], kept["pids"]) == (SMALL.memory_mb, SMALL.pids)
        return
    for memory in (512, 128, 256):
        await sandbox.box.update_limits(Limits(memory_mb=memory, pids=50, cpus=2))
        limit = sandbox.backend.groups.open(sandbox.id)._of("memory")
        assert limit is not None
        v1 = Path(limit, "memory.limit_in_bytes")
        text = (v1 if v1.exists() else Path(limit, "memory.max")).read_text()
        assert int(text) == memory << 20
    kept = sandbox.box.record["limits"]
    assert kept["disk_mb"] == SMALL.disk_mb
    assert kept["pids"] == 50


async def test_freeze_and_thaw(make) -> None:
    """A frozen sandbox makes no progress, answers after thawing, and can be killed while frozen."""
    sandbox = await make()
    await sandbox.client.request("exec", id="clock", shell="while :; do echo x >> /workspace/ticks; done", detach=True)
    await sandbox.box.freeze()
    before = (await sandbox.box.usage()).cpu_us
    await asyncio.sleep(0.2)
    assert (await sandbox.box.usage()).cpu_us == before
    await sandbox.box.thaw()
    assert (await sandbox.run("true")).ok
    await sandbox.box.freeze()
    async with asyncio.timeout(PATIENCE):
        await sandbox.box.kill()
    with pytest.raises(SandboxGone):
        await sandbox.box.thaw()


async def test_absurd_disks_are_refused(backend: LocalBackend, rootfs: Rootfs) -> None:
    """Too small, negative and larger than the host each say why, and leave nothing."""
    for size, kind in ((1, InvalidArgument), (-5, InvalidArgument), (1 << 30, InvalidArgument), (1 << 24, DiskFull)):
        with pytest.raises(kind):
            await backend.create(spec_for(rootfs, limits=Limits(disk_mb=size)))


async def test_the_host_keeps_its_pids(backend: LocalBackend) -> None:
    """All sandboxes together have a limit too."""
    holder = backend.groups.hierarchies.holder("pids")
    if holder is None:
        pytest.skip("no pids controller here")
    assert int((holder / "atoll" / "pids.max").read_text()) < int(Path("/proc/sys/kernel/threads-max").read_text())
