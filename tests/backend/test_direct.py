"""The direct engine builds the walls that runc builds: the same sandbox is made with both, and everything that can be told about the
two has to be equal. runc is the reference; the few differences are listed here, each with why it is none of a wall."""

import asyncio
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab.backend import PATIENCE, Sandbox, local_backend, nothing_left, spec_for
from lab.direct import COVERED, LOOK, WRITTEN, answer, comparable, filter_of, groups_of, opened, outside
from lab.waiting import eventually

from atoll.backends.local import LocalBackend, binaries, bundle
from atoll.backends.local.kernel import filters, seccomp
from atoll.backends.local.kernel.cgroups import Groups, Hierarchies
from atoll.backends.local.kernel.syscalls import AUDIT_ARCHITECTURES, machine_name, numbers
from atoll.backends.local.layers import Rootfs
from atoll.backends.local.runtimes.base import Engine
from atoll.backends.local.runtimes.container import Container
from atoll.errors import Internal

Start = Callable[..., Awaitable[Sandbox]]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "strict": {"read_only_root": True, "no_capabilities": True, "seccomp": "restrictive", "hostname": "strict.example"},
}
ALLOW, REFUSE, ABSENT = 0x7FFF_0000, 0x0005_0000 | errno.EPERM, 0x0005_0000 | errno.ENOSYS
I386 = 0x4000_0003
_NS_GET_USERNS = 0xB701
OPEN = """
import errno, os, sys
with open(sys.argv[1], 'w') as door: door.write(str(os.getpid()))
for path in sys.argv[2:]:
    try: os.close(os.open(path, os.O_RDONLY)); print('open')
    except OSError as error: print(errno.errorcode[error.errno])
"""


@pytest.fixture
async def start(backend: LocalBackend, rootfs: Rootfs) -> AsyncIterator[Start]:
    """Makes a sandbox with an engine of that name."""
    made: list[Sandbox] = []

    async def one(engine: str, **fields: Any) -> Sandbox:
        program = str(binaries.launcher()) if engine == "direct" else binaries.system(engine)
        if program is None:
            pytest.skip(f"{engine} is not installed")
        made.append(
            Sandbox(backend, await backend._create(spec_for(rootfs, **fields), Engine(Container(), engine, program)))
        )
        return made[-1]

    yield one
    for sandbox in made:
        await sandbox.destroy()


@dataclass(frozen=True)
class Seen:
    inside: dict[str, Any]
    outside: dict[str, Any]
    groups: dict[str, str]
    devices: set[str]
    filter: bytes


async def look(sandbox: Sandbox) -> Seen:
    box = sandbox.box
    result = await sandbox.run("/usr/bin/python3", "-c", LOOK, json.dumps([COVERED, WRITTEN]))
    assert result.ok, result.stderr
    await eventually(lambda: not opened(box.pid), "its first process holds no file")
    mount = sandbox.backend.groups.hierarchies.v1.get("devices")
    path = sandbox.backend.groups.path(box.id)
    rules = (mount / path.lstrip("/") / "devices.list").read_text().splitlines() if mount else []
    return Seen(
        comparable(json.loads(result.stdout), box.record["base"], box.id),
        outside(box.pid, box.record["base"]),
        {kind: group.replace(box.id, "id") for kind, group in groups_of(box.pid).items()},
        set(rules),
        filter_of(box.pid),
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_both_engines_make_the_same_sandbox(start: Start, kind: str) -> None:
    """Credentials, capabilities, filter, mounts with their flags, devices, limits, settings, groups, descriptors: all equal."""
    reference, direct = await look(await start("runc", **KINDS[kind])), await look(await start("direct", **KINDS[kind]))
    expected, found = dict(reference.inside), dict(direct.inside)
    # The queues of the sandbox belong to its own root, who makes their namespace; runc makes it before it is anybody inside.
    for seen in (expected, found):
        seen["devices"] = {**seen["devices"], "/dev/mqueue": seen["devices"]["/dev/mqueue"][0]}
    # runc gives the memory on /tmp the mode of the directory below; the configuration says 1777.
    if kind == "strict":
        assert found["tops"]["/tmp"][0] == "0o41777"
        expected["tops"] = {**expected["tops"], "/tmp": found["tops"]["/tmp"]}
    # A part of the kernel that somebody loads meanwhile brings settings of its own.
    both = expected["settings"].keys() & found["settings"].keys()
    assert "/proc/sys/net/ipv4/ip_forward" in both
    for seen in (expected, found):
        seen["settings"] = {path: seen["settings"][path] for path in both}
    for name in expected:
        assert found[name] == expected[name], name
    for name, value in reference.outside.items():
        assert direct.outside[name] == value, name
    assert direct.outside["parent"] == os.getpid()
    # In these no limit is set, and nothing is asked of them.
    unused = {
        "cpuset",
        "blkio",
        "freezer",
        "net_cls",
        "net_prio",
        "net_cls,net_prio",
        "perf_event",
        "hugetlb",
        "rdma",
        "misc",
    }
    assert {k: v for k, v in direct.groups.items() if k not in unused} == {
        k: v for k, v in reference.groups.items() if k not in unused
    }
    # runc lets a tunnel's device through, of which no sandbox has a node.
    assert direct.devices == reference.devices - {"c 10:200 rwm"}
    compare_filters(reference.filter, direct.filter, KINDS[kind].get("seccomp", "default"))


def compare_filters(reference: bytes, direct: bytes, name: str) -> None:
    """The same answer to every call; but runc's libseccomp may not know the newest ones yet, for which it says ENOSYS."""
    native, known = AUDIT_ARCHITECTURES[machine_name()], numbers()
    newest = max(n for n in range(700) if answer(reference, n, native) != ABSENT)
    allowed = {known[call] for call in seccomp.allowed(name) if call in known}
    for number in [
        *range(700),
        0x3FFF_FFFF,
        0x4000_0000,
        0x4000_0000 + known["read"],
        0x7FFF_FFFF,
        0xFFFF_FFFE,
        0xFFFF_FFFF,
    ]:
        said, wanted = answer(direct, number, native), answer(reference, number, native)
        if newest < number <= max(allowed):
            assert (wanted, said) == (ABSENT, ALLOW if number in allowed else REFUSE), number
        else:
            assert said == wanted, number
        assert answer(direct, number, I386) == answer(reference, number, I386), number
    values = [
        0,
        1,
        2,
        3,
        8,
        10,
        11,
        15,
        16,
        17,
        38,
        40,
        0x1200011,
        0x20000,
        0x20008,
        0x40000,
        0xFFFF_FFFF,
        1 << 32,
        (1 << 32) + 2,
    ]
    values += [1 << bit for bit in range(64)] + [0xFFFF_FFFF_FFFF_FFFF, 0x1200011 | 1 << 40]
    for call in ("clone", "socket", "personality"):
        for value in values:
            at = (known[call], native, value)
            assert answer(direct, *at) == answer(reference, *at), (call, hex(value))


@pytest.mark.parametrize("name", ["default", "moderate", "ai-agent", "restrictive"])
def test_the_program_is_the_profile(name: str) -> None:
    """Each call of the configuration's own profile is answered as the profile says, with or without a libseccomp to compare with."""
    program, known, native = filters.of_profile(name), numbers(), AUDIT_ARCHITECTURES[machine_name()]
    allowed = {known[call] for call in seccomp.allowed(name) if call in known}
    judged = {known[call] for call in ("clone", "socket", "personality")}
    for number in range(max(allowed) + 1):
        if number not in judged:
            expected = ALLOW if number in allowed else ABSENT if number == known["clone3"] else REFUSE
            assert answer(program, number, native) == expected, number
    assert answer(program, max(allowed) + 1, native) == ABSENT
    assert answer(program, known["read"], I386) == answer(program, 0x4000_0000, native) == 0


async def test_every_namespace_belongs_to_the_sandbox(start: Start) -> None:
    """Root inside owns them all: none is the host's, none was made by the host's root."""
    sandbox = await start("direct")
    users = os.stat(f"/proc/{sandbox.box.pid}/ns/user").st_ino
    for kind in ("mnt", "pid", "ipc", "uts", "cgroup", "net"):
        space = os.open(f"/proc/{sandbox.box.pid}/ns/{kind}", os.O_RDONLY)
        owner = fcntl.ioctl(space, _NS_GET_USERNS)
        assert os.fstat(owner).st_ino == users, kind
        os.close(owner)
        os.close(space)


async def test_devices_are_held_back_without_the_v1_controller(backend: LocalBackend, start: Start) -> None:
    """On the unified hierarchy a program does it: even the host's root, once in the group, opens no other device."""
    groups = backend.groups
    found = groups.hierarchies
    if found.unified is None:
        pytest.skip("no unified hierarchy")
    v1 = {name: mount for name, mount in found.v1.items() if name != "devices"}
    backend.groups = Groups(groups.mark, Hierarchies(found.unified, v1))
    try:
        sandbox = await start("direct")
        assert (
            await sandbox.sh("cat /dev/urandom | head -c 4 | wc -c; echo > /dev/null; head -c 3 /dev/zero | wc -c")
        ).ok
        door = found.unified / backend.groups.path(sandbox.id).lstrip("/") / "cgroup.procs"
        paths = ["/dev/null", "/dev/urandom", "/dev/loop-control", "/dev/kmsg"]
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", OPEN, str(door), *paths],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.stdout.split() == ["open", "open", "EPERM", "EPERM"], done
    finally:
        for box in list(backend._boxes.values()):
            await backend.destroy(box.record)
        backend.groups = groups


@pytest.mark.usefixtures("unprobed")
async def test_what_it_does_not_know_is_refused_and_runc_is_taken(
    backend: LocalBackend, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that asks for more than the engine does: no sandbox of it, nothing left, and the reason is said."""
    original = bundle.configuration

    def more(**fields: Any) -> bytes:
        config = json.loads(original(**fields))
        config["linux"]["sysctl"] = {"net.ipv4.ip_unprivileged_port_start": "0"}
        return json.dumps(config).encode()

    monkeypatch.setattr(bundle, "configuration", more)
    with pytest.raises(Internal, match="unknown field sysctl"):
        await start("direct")
    await nothing_left(backend)
    if shutil.which("runc") is None:
        pytest.skip("no other engine here")
    monkeypatch.setitem(backend.probes._order, "container", ("direct", "runc"))
    status = await backend.probes.status("container")
    assert (status.works, status.engine) == (True, "runc")
    assert "unknown field sysctl" in status.why


@pytest.mark.usefixtures("unprobed")
async def test_a_named_engine_is_never_replaced(
    tmp_path: Path, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by the operator, and it does not work: then the runtime does not."""
    chosen = local_backend(backend.paths.home, engines=("direct",))
    monkeypatch.setattr(filters, "of_profile", lambda name: b"\0" * 8)
    status = await chosen.probes.status("container")
    assert (status.works, status.engine) == (False, "direct")
    assert "seccomp" in status.why


async def test_a_sandbox_that_cannot_be_born_leaves_nothing(
    backend: LocalBackend, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its first process could not do is told by the error, and all of it is gone."""
    original = bundle.configuration
    monkeypatch.setattr(
        bundle, "configuration", lambda **fields: original(**fields).replace(b'/.atoll/guest"', b'/nothing"')
    )
    with pytest.raises(Internal, match="cannot run /nothing: No such file"):
        await start("direct")
    await nothing_left(backend)


async def test_the_next_daemon_finds_it(backend: LocalBackend, start: Start) -> None:
    """Adopted by its record, as one of runc's, and buried without it."""
    sandbox, other = await start("direct"), await start("direct")
    record = dict(sandbox.box.record)
    await sandbox.client.close()
    await other.client.close()
    for box in list(backend._boxes.values()):
        box.release()
    backend._boxes.clear()
    second = local_backend(backend.paths.home)
    adopted = await second.adopt(record)
    assert adopted is not None
    again = Sandbox(second, adopted)  # type: ignore[arg-type]
    assert (await again.sh("echo alive")).stdout == "alive\n"
    assert await second.sweep({sandbox.id}) == [other.id]
    await again.destroy()
    await eventually(lambda: not Path(f"/proc/{record['pid']}").exists(), "its init is gone")


# The rows of ESC whose wall the engine builds.
ROWS = "devices exec_user fd_hygiene image_dev_symlink kernel_hooks masked_paths mount_race no_host_sockets proc_exe surface"


def test_the_escape_rows_hold(tmp_path: Path) -> None:
    """On the one of the two engines that all the other tests do not use."""
    tests = Path(__file__).parents[1]
    other = "runc" if Container.engines[0] == "direct" else "direct"
    rows = [str(tests / "threats" / "escape" / f"test_{row}.py") for row in ROWS.split()]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--basetemp={tmp_path / 't'}",
            *rows,
        ],
        env={**os.environ, "ATOLL_TEST_RUNTIMES": "container", "ATOLL_TEST_ENGINE": other, "ATOLL_TEST_LONG": ""},
        cwd=tests.parent,
        capture_output=True,
        text=True,
        timeout=20 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
