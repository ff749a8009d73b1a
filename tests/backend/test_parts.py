"""The parts of the backend that can be looked at alone."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from lab.backend import NOTHING, PATIENCE, Sandbox, census, local_backend, nothing_left, spec_for

from atoll.backends.contract import Limits, Workspace
from atoll.backends.local import LocalBackend, binaries
from atoll.backends.local.kernel import seccomp
from atoll.backends.local.kernel.cgroups import Groups, Hierarchies
from atoll.backends.local.kernel.disks import attached, copy_sparse
from atoll.backends.local.kernel.ids import COUNT, FIRST, IdRanges
from atoll.backends.local.launch import Launcher
from atoll.backends.local.layers import Rootfs
from atoll.backends.local.paths import Paths, new_id
from atoll.backends.local.runtimes import base
from atoll.backends.local.runtimes import version_floor as floor
from atoll.errors import Conflict, Internal, InvalidArgument, Unsupported

V2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
)
HYBRID = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("text", "unified", "cpu"),
    [
        (V2, "/sys/fs/cgroup", None),
        (V1, None, "/sys/fs/cgroup/cpu,cpuacct"),
        (HYBRID, "/sys/fs/cgroup/unified", "/sys/fs/cgroup/cpu,cpuacct"),
    ],
)
def test_layouts_are_told_apart(tmp_path: Path, text: str, unified: str | None, cpu: str | None) -> None:
    """Pure v2, pure v1 and hybrid, from the mount table."""
    table = tmp_path / "mountinfo"
    table.write_text(text)
    found = Hierarchies.detect(str(table))
    assert found.unified == (Path(unified) if unified else None)
    assert found.v1.get("cpu") == (Path(cpu) if cpu else None)
    assert found.is_v2("memory") == ("memory" not in text)
    assert "name=systemd" in found.v1 or not found.v1


def fake_v2(tmp_path: Path, controllers: str) -> Groups:
    """A v2 tree of plain files: this machine may not have the controllers there."""
    (tmp_path / "cgroup.controllers").write_text(controllers)
    groups = Groups("0" * 8, Hierarchies(tmp_path, {}))
    parent = tmp_path / "atoll" / groups.mark
    for level in (tmp_path, tmp_path / "atoll", parent):
        level.mkdir(exist_ok=True)
        (level / "cgroup.subtree_control").write_text("")
        (level / "cgroup.controllers").write_text(controllers)
    (tmp_path / "atoll" / "pids.max").write_text("max")
    return groups


def test_v2_limits(tmp_path: Path) -> None:
    """The files and formats of v2: cpu.max, memory.max without swap, pids.max."""
    groups = fake_v2(tmp_path, "cpu memory pids")
    groups.prepare()
    assert int((tmp_path / "atoll" / "pids.max").read_text()) > 0
    box = new_id()
    group = groups.create(box)
    directory = tmp_path / "atoll" / groups.mark / box
    for name in ("cpu.max", "memory.max", "memory.swap.max", "pids.max"):
        (directory / name).write_text("max")
    (directory / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\n")
    (directory / "cpu.stat").write_text("usage_usec 77\nuser_usec 70\n")
    (directory / "memory.current").write_text("4096\n")
    assert group.apply(Limits(cpus=1.5, memory_mb=100, pids=10)) == {"cpus": True, "memory_mb": True, "pids": True}
    assert (directory / "cpu.max").read_text() == "150000 100000"
    assert (directory / "memory.max").read_text() == str(100 << 20)
    assert (directory / "memory.swap.max").read_text()[0] == "0"
    assert int((directory / "pids.max").read_text()[:2]) >= 10
    assert (group.oom_kills(), group.cpu_us(), group.memory()) == (2, 77, (4096, None))


def test_v2_without_controllers_says_so(tmp_path: Path) -> None:
    """A limit whose file is not there is reported as not held, never as held."""
    groups = fake_v2(tmp_path, "")
    groups.prepare()
    assert not any(groups.create(new_id()).apply(Limits()).values())


def test_id_ranges_never_overlap(tmp_path: Path) -> None:
    """Taken once, held by name, found again, given back; another home's are not touched."""
    mine, other = IdRanges(tmp_path, "a" * 8), IdRanges(tmp_path, "b" * 8)
    boxes = [new_id() for _ in range(50)]
    bases = [(mine if n % 2 else other).take(box) for n, box in enumerate(boxes)]
    assert len(set(bases)) == 50 and all(base >= FIRST and base % COUNT == 0 for base in bases)
    assert mine.holders() == set(boxes[1::2])
    assert not mine.hold(bases[0], new_id()) and mine.hold(bases[1], boxes[1])
    mine.release(boxes[0])
    assert boxes[0] in other.holders()
    mine.release(boxes[1])
    assert boxes[1] not in mine.holders()


async def test_a_range_that_was_lost_stops_the_start(backend: LocalBackend, rootfs: Rootfs) -> None:
    """A stopped sandbox never starts with the ids of another."""
    box = await backend.create(spec_for(rootfs))
    record = box.record
    await backend.destroy(record, keep_disk=True)
    backend.ids.release(record["id"])
    thief = new_id()
    assert backend.ids.hold(record["base"], thief)
    with pytest.raises(Conflict):
        await backend.create(spec_for(rootfs, id=record["id"], workspace=Workspace("kept", disk=record)))
    backend.ids.release(thief)
    await backend.destroy(record)


def test_the_profile_denies_by_default() -> None:
    """No name of a dangerous call is allowed without a condition."""
    profile = seccomp.profile()
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO" and len(profile["architectures"]) == 1
    allowed = {name for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    free = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("args")
        for name in rule["names"]
    }
    never = {
        "mount", "umount", "umount2", "pivot_root", "unshare", "setns", "clone3", "keyctl", "add_key",
        "request_key", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter",
        "io_uring_register", "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load",
        "reboot", "swapon", "swapoff", "open_by_handle_at", "open_tree", "move_mount", "fsopen", "fsmount",
        "fsconfig", "fspick", "mount_setattr", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex",
        "syslog", "iopl", "ioperm", "acct", "quotactl", "quotactl_fd", "fanotify_init", "nfsservctl",
        "lookup_dcookie", "vm86", "vm86old", "modify_ldt", "sethostname", "setdomainname", "kcmp",
    }  # fmt: skip
    assert not allowed & never
    assert not free & {"clone", "socket", "personality"}


def test_sparse_copies_stay_sparse(tmp_path: Path) -> None:
    """Content and holes alike."""
    source, target = tmp_path / "a", tmp_path / "b"
    with open(source, "wb") as file:
        file.truncate(64 << 20)
        file.seek(33 << 20)
        file.write(b"middle")
    copy_sparse(source, target)
    assert target.stat().st_size == 64 << 20 and target.stat().st_blocks * 512 < 1 << 20
    with open(target, "rb") as file:
        file.seek(33 << 20)
        assert file.read(6) == b"middle"
    with pytest.raises(FileExistsError):
        copy_sparse(source, target)


def test_the_stage_is_never_our_own_home(tmp_path: Path) -> None:
    """A home below one candidate makes another one the stage."""
    usual = Paths(tmp_path).stage()
    assert Paths(Path(usual) / "home").stage() != usual


async def share_a_workspace(rootfs: Rootfs, home: Path) -> None:
    """One disk has one loop device, for as long as somebody uses it."""
    backend = local_backend(home)
    await backend.start()
    made = []
    try:
        made.append(first := Sandbox(backend, await backend.create(spec_for(rootfs))))
        made.append(
            second := Sandbox(backend, await backend.create(spec_for(rootfs, workspace=Workspace("shared", first.id))))
        )
        assert len(attached(backend.paths.disk(first.id))) == 1
        assert (await first.sh("echo x > /workspace/file")).ok
        assert (await second.run("cat", "/workspace/file")).stdout == "x\n"
    finally:
        for sandbox in reversed(made):
            await sandbox.destroy()
    assert census(backend) == NOTHING
    await backend.close()


async def test_a_home_behind_a_link_works(rootfs: Rootfs, tmp_path: Path) -> None:
    """Also its shared workspace, however the path of a disk is written."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    await share_a_workspace(rootfs, tmp_path / "link" / "home")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A directory that is a file system of its own."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m", "atoll-test", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


async def test_a_home_on_a_file_system_of_its_own_works(rootfs: Rootfs, mounted: Path) -> None:
    """There the kernel tells a disk's path only from that file system's root on, for the mount is another sandbox's."""
    await share_a_workspace(rootfs, mounted / "home")


async def test_a_launcher_that_is_let_go_leaves_nothing() -> None:
    """Namespaces made ahead of time vanish with their launcher."""
    launcher = await Launcher.prepare(FIRST)
    space = os.readlink(f"/proc/self/fd/{launcher.net}")
    assert space != os.readlink("/proc/self/ns/net")
    pid = launcher.pid
    await launcher.close()
    assert not Path(f"/proc/{pid}").exists()


async def test_a_launcher_refuses_what_it_does_not_understand() -> None:
    """An order with an unknown or missing field makes nothing."""
    for order in ({}, {"stage": "/mnt", "surprise": 1}):
        launcher = await Launcher.prepare(FIRST)
        with pytest.raises(Internal, match="not valid"):
            await launcher.start(order, [])
        await launcher.close()


@pytest.mark.usefixtures("unprobed")
async def test_runtimes_tell_the_truth(backend: LocalBackend) -> None:
    """Container works because it was tried; the answer is kept, and kept no longer than it is true."""
    statuses = {status.name: status for status in await backend.runtimes()}
    assert statuses["container"].works and statuses["container"].version
    assert statuses["gvisor"].works or (statuses["gvisor"].why and statuses["gvisor"].fix)
    assert await backend.pick("auto") == ("gvisor" if statuses["gvisor"].works else "container")
    assert await backend.pick("container") == "container"
    engine = statuses["container"].engine
    kept = json.loads(backend.paths.probes.read_text())[engine]
    assert kept["works"] and str(binaries.guest()) in kept["key"]
    assert census(backend) == NOTHING
    with pytest.raises(Unsupported, match="firecracker needs"):
        await backend.pick("firecracker")
    with pytest.raises(InvalidArgument):
        await backend.pick("jail")


@pytest.mark.usefixtures("unprobed")
async def test_an_engine_that_lies_is_found_out(backend: LocalBackend, tmp_path: Path, monkeypatch) -> None:
    """A program of the right name that does nothing does not pass; the reason is told and nothing is left."""
    monkeypatch.setitem(backend.probes._order, "container", ("runc", "crun"))
    fake = tmp_path / "bin"
    fake.mkdir()
    for name in ("runc", "crun", "runsc"):
        (fake / name).write_text('#!/bin/sh\n[ "$1" = --version ] && echo runc version 9.9.9\nexit 0\n')
        (fake / name).chmod(0o755)
    monkeypatch.setattr(binaries, "system", lambda name: str(fake / name))
    for runtime in ("gvisor", "container"):  # test_microvm.py has a virtual machine that does not boot
        status = await backend.probes.status(runtime)
        assert not status.works and "run" in status.why and status.fix
    with pytest.raises(Unsupported):
        await backend.pick("auto")
    assert census(backend) == NOTHING


LATE = """
import asyncio, os, signal, sys, threading
from atoll.backends.contract import BoxSpec, Image, Limits
from atoll.backends.local import LocalBackend
from atoll.backends.local.layers import Rootfs
home, box, delay, lowers, usr = sys.argv[1:6]
def die(_, name):
    if name == "bundle":
        threading.Timer(float(delay), os.kill, (os.getpid(), signal.SIGKILL)).start()
async def layers(image):
    return Rootfs(tuple(lowers.split(":")), tuple(usr.split(":")))
async def main():
    backend = LocalBackend(home, layers=layers)
    await backend.start()
    await backend.pick("container")
    backend.on_step = die
    await backend.create(BoxSpec(box, Image("given"), "container", limits=Limits(disk_mb=64)))
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("delay", ["0.002", "0.008", "0.016", "0.024", "0.032", "0.04"])
async def test_a_daemon_killed_while_the_engine_works(backend: LocalBackend, rootfs: Rootfs, delay: str) -> None:
    """The engine dies with the daemon at whatever moment; sweep then leaves nothing."""
    await backend.pick("container")
    box = new_id()
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-c",
            LATE,
            str(backend.paths.home),
            box,
            delay,
            ":".join(rootfs.lowers),
            ":".join(rootfs.usr),
        )
    )
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == -9
    assert await backend.sweep(set()) == [box]
    await nothing_left(backend)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            assert box.encode() not in command


@pytest.mark.parametrize(
    ("program", "good", "bad"),
    [
        (
            "runc",
            ["1.3.6", "1.3.7", "1.4.3", "1.4.10", "1.5.0", "2.0"],
            ["1.1.5+ds1", "1.1.15", "1.2.9", "1.3.5", "1.4.2"],
        ),
        ("crun", ["1.28", "1.28.1", "1.29.1", "2.0"], ["1.8.1", "1.27", "0.21"]),
        ("runsc", ["release-20240729.0", "0.0~20240729.0", "release-20260101.0"], ["0.0~20221219.0"]),
        ("firecracker", ["1.14.4", "1.15.1", "1.16.0"], ["1.13.0", "1.14.3", "1.15.0"]),
        ("linux", ["5.19", "6.1.0-13-amd64", "6.18.5"], ["5.4.0", "5.15.0-100-generic"]),
        ("unheard-of", ["0.1"], []),
    ],
)
def test_the_version_floor(program: str, good: list[str], bad: list[str]) -> None:
    """Each branch has its own first good version; what is below it is named with its holes and what closes them."""
    for version in good:
        assert floor.judge(program, version) is None, version
    for version in bad:
        found = floor.judge(program, version)
        assert found is not None and version in found.warning and found.fix, version
    assert floor.judge(program, "unknown") is None


async def test_an_old_engine_is_refused_if_the_operator_says_so(tmp_path: Path, monkeypatch) -> None:
    """By default it works with a warning; with `refuse` it does not, and says why and what to do."""
    monkeypatch.setattr(base, "version_of", _says("1.0.0"))
    for refuse in (False, True):
        backend = LocalBackend(tmp_path / f"home-{refuse}", refuse_old=refuse, engines=("runc",))
        await backend.start()
        status = await backend.probes.status("container")
        assert status.works is not refuse and "CVE-" in status.warning
        if refuse:
            with pytest.raises(Unsupported, match="older than") as caught:
                await backend.pick("container")
            assert "install" in (caught.value.hint or "")
        await backend.close()


def _says(version: str) -> Callable[[str], Awaitable[str]]:
    async def say(program: str) -> str:
        return version

    return say


def test_an_ordinary_users_v2_groups_lie_where_there_is_room(tmp_path: Path) -> None:
    """Not in the group that holds the caller's shell, but in the nearest of the user's own above it; what it has not been
    given is not held, and does not keep the daemon from starting."""
    manager = tmp_path / "user.slice" / "user@1000.service"
    shell = manager / "app.slice" / "terminal.scope"
    shell.mkdir(parents=True)
    for place, processes in ((manager, ""), (manager / "app.slice", ""), (shell, "4711\n")):
        (place / "cgroup.procs").write_text(processes)
        (place / "cgroup.controllers").write_text("memory\n")
        (place / "cgroup.subtree_control").write_text("")
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    own = tmp_path / "own"
    own.write_text("0::/user.slice/user@1000.service/app.slice/terminal.scope\n")
    found = Hierarchies(tmp_path, {}).delegated(str(own))
    assert found.top(tmp_path) == manager / "app.slice"
    assert found.holder("memory") == tmp_path and found.holder("pids") is None
    groups = Groups("0" * 8, found)
    groups.rootless = True
    groups.prepare()
    assert (manager / "app.slice" / "atoll" / ("0" * 8)).is_dir()
    assert (manager / "app.slice" / "cgroup.subtree_control").read_text() == "+memory"
    assert not (manager / "app.slice" / "atoll-daemon").exists()  # it is not there, so it need not step aside
