"""What a sandbox is from inside and from outside."""

import asyncio
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.backend import Sandbox, namespaces, spec_for

from atoll.backends.contract import Mount, Workspace
from atoll.backends.local import LocalBackend, bundle
from atoll.backends.local.layers import Rootfs
from atoll.errors import AlreadyExists, InvalidArgument, NotFound, PermissionDenied
from atoll.model import Policy

pytestmark = pytest.mark.usefixtures("runtime")


async def test_runs_a_command_as_root_of_its_own(make) -> None:
    """Root inside, its own host name, /workspace as working directory, exit code and both streams told apart."""
    sandbox = await make(hostname="lagoon")
    result = await sandbox.sh("id -u; hostname; pwd; echo no >&2; exit 3")
    assert (result.exit.code, result.stdout.split(), result.stderr) == (3, ["0", "lagoon", "/workspace"], "no\n")


async def test_root_inside_is_nobody_outside(make, runtime: str) -> None:
    """Every id of init, and of a command, lies in the sandbox's own range; all namespaces are its own."""
    sandbox = await make()
    base = sandbox.box.record["base"]
    for line in Path(f"/proc/{sandbox.box.pid}/status").read_text().splitlines():
        if line.startswith(("Uid:", "Gid:")):
            assert set(line.split()[1:]) == {str(base)}
    assert base >= 0x1000_0000
    assert not namespaces(sandbox.box.pid) & namespaces(os.getpid())
    if runtime == "gvisor":
        return  # its kernel says nothing of the host's ids inside
    mapping = (await sandbox.run("cat", "/proc/self/uid_map")).stdout.split()
    assert mapping == ["0", str(base), "65536"]


async def test_newer_engines_find_the_map_of_the_user_namespace(
    make, backend: LocalBackend, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """runc 1.1.15 reads the map of process N for any path below /proc/N, so ours is not one."""
    if runtime == "gvisor":
        return  # it is started inside
    monkeypatch.setitem(backend.probes._order, "container", ("runc",))
    sandbox = await make()
    config = json.loads((backend.paths.runs / sandbox.id / "config.json").read_text())
    [path] = [space["path"] for space in config["linux"]["namespaces"] if space["type"] == "user"]
    assert not path.startswith("/proc/") and os.path.islink(path)


async def test_two_sandboxes_share_no_id(make) -> None:
    """Each has a range of its own."""
    first, second = await make(), await make()
    assert abs(first.box.record["base"] - second.box.record["base"]) >= 65536


async def test_writes_to_the_system_tree_stay_inside(make) -> None:
    """/usr and /etc can be changed and the host's are not touched; a second sandbox sees nothing of it."""
    first, second = await make(), await make()
    name = f"atoll-test-{first.id}"
    result = await first.sh(
        f"echo x > /usr/bin/{name} && echo x > /etc/{name} && rm /usr/bin/env && touch /usr/bin/cat && "
        f"chown 5:5 /usr/bin/id && ls /usr/bin/{name} /etc/{name} && stat -c %u:%g /usr/bin/id"
    )
    assert result.ok, result.stderr
    assert "5:5" in result.stdout
    assert not Path(f"/usr/bin/{name}").exists() and not Path(f"/etc/{name}").exists()
    assert Path("/usr/bin/env").exists() and Path("/usr/bin/id").stat().st_uid == 0
    assert not (await second.sh(f"ls /usr/bin/{name} || ls /etc/{name}")).ok
    assert (await second.run("ls", "/usr/bin/env")).ok


async def test_privileges_are_the_checked_in_ones(make, runtime: str) -> None:
    """Capabilities are the short list, no new privileges, seccomp filters, for agent and commands alike."""
    sandbox = await make()
    inside = (await sandbox.run("cat", "/proc/self/status")).stdout
    outside = Path(f"/proc/{sandbox.box.pid}/status").read_text()
    bits = {
        "CHOWN": 0,
        "DAC_OVERRIDE": 1,
        "FOWNER": 3,
        "FSETID": 4,
        "KILL": 5,
        "SETGID": 6,
        "SETUID": 7,
        "NET_BIND_SERVICE": 10,
    }
    allowed = sum(1 << bits[name.removeprefix("CAP_")] for name in bundle.CAPABILITIES)
    for report in (inside,) if runtime == "gvisor" else (inside, outside):  # its kernel has its own: see test_gvisor
        fields = dict(line.split(":\t", 1) for line in report.splitlines() if ":\t" in line)
        assert int(fields["CapBnd"], 16) == allowed
        assert int(fields["CapEff"], 16) | int(fields["CapPrm"], 16) == allowed
        assert int(fields.get("CapAmb", "0"), 16) == int(fields["CapInh"], 16) == 0
        assert fields.get("NoNewPrivs", "1") == "1" and fields["Seccomp"] == "2"


REFUSED = """
import ctypes, errno, json, socket
libc = ctypes.CDLL(None, use_errno=True)
calls = dict(mount=165, umount2=166, pivot_root=155, unshare=272, setns=308, keyctl=250, add_key=248, bpf=321,
    io_uring_setup=425, userfaultfd=323, perf_event_open=298, init_module=175, finit_module=313, kexec_load=246,
    open_by_handle_at=304, swapon=167, reboot=169, settimeofday=164, syslog=103, iopl=172, acct=163, quotactl=179,
    fanotify_init=300, open_tree=428, move_mount=429, fsopen=430, mount_setattr=442, clone3=435, vhangup=153)
found = {}
for name, number in calls.items():
    ctypes.set_errno(0)
    libc.syscall(number, 0, 0, 0, 0, 0)
    found[name] = errno.errorcode.get(ctypes.get_errno(), "done")
found["clone(NEWUSER)"] = "done" if libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0 else errno.errorcode[ctypes.get_errno()]
for name, family in dict(vsock=40, packet=17, alg=38, bluetooth=31).items():
    try:
        socket.socket(family, socket.SOCK_DGRAM).close()
        found[name] = "done"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]
high = libc.syscall(41, ctypes.c_ulong(40 | 1 << 32), 1, 0)
found["vsock with a high bit"] = "done" if high >= 0 else errno.errorcode[ctypes.get_errno()]
try:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
    found["raw"] = "done"
except OSError as error:
    found["raw"] = errno.errorcode[error.errno]
print(json.dumps(found))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system call numbers of x86_64")
async def test_the_kernel_surface_is_small(make) -> None:
    """Calls that make namespaces, mounts, keys, programs for the kernel or exotic sockets are refused by number."""
    sandbox = await make()
    result = await sandbox.python(REFUSED)
    assert result.ok, result.stderr
    found = json.loads(result.stdout)
    assert found.pop("clone3") == "ENOSYS"
    assert set(found.values()) == {"EPERM"}, found


async def test_ordinary_programs_are_not_disturbed(make) -> None:
    """Threads, sockets, inotify, pty, memfd, subprocesses, shared memory and venv work under the filter."""
    sandbox = await make()
    code = """
import threading, socket, os, pty, subprocess, multiprocessing.shared_memory as m, asyncio, tempfile
threads = [threading.Thread(target=lambda: None) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
server = socket.create_server(("127.0.0.1", 80)); socket.create_connection(("127.0.0.1", 80)).close()
socket.create_server(("::1", 8080), family=socket.AF_INET6)
os.close(pty.openpty()[0]); os.memfd_create("x"); s = m.SharedMemory(create=True, size=4096); s.close(); s.unlink()
assert subprocess.run(["/bin/true"]).returncode == 0
asyncio.run(asyncio.sleep(0))
tempfile.TemporaryFile().write(b"x")
print("fine")
"""
    result = await sandbox.python(code)
    assert result.stdout == "fine\n", result.stderr


async def test_kernel_files_are_out_of_reach(make) -> None:
    """Nothing of the kernel's controls can be written, and what is masked cannot be read."""
    sandbox = await make()
    for path in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/modprobe",
        "/proc/sysrq-trigger",
        "/sys/kernel/uevent_helper",
    ):
        assert not (await sandbox.sh(f"echo x > {path}")).ok, path
    for path in bundle.MASKED:
        seen = await sandbox.sh(f"[ ! -e {path} ] || if [ -d {path} ]; then ls -A {path}; else cat {path}; fi")
        assert seen.stdout == "", path
    assert (await sandbox.sh("ls -A /sys/fs")).stdout == "cgroup\n"
    assert not (await sandbox.sh("find /sys/fs -type f -exec sh -c 'exec 3> $1' sh {} \\; -print | grep .")).ok
    assert not (await sandbox.sh("mount -t tmpfs none /mnt || umount /proc/sys || mount -o remount,rw /sys")).ok


async def test_dev_is_fresh_and_short(make, runtime: str) -> None:
    """The device list is the fixed one; nothing else can be made."""
    sandbox = await make()
    names = set((await sandbox.run("ls", "-A", "/dev")).stdout.split())
    assert names == {
        *(
            "fd",
            "full",
            "mqueue",
            "null",
            "ptmx",
            "pts",
            "random",
            "shm",
            "stderr",
            "stdin",
            "stdout",
            "tty",
            "urandom",
            "zero",
        )
    } - ({"mqueue"} if runtime == "gvisor" else set()) | (
        names & ({"char", "fuse", "net"} if runtime == "gvisor" else {"core"})
    )
    assert not (await sandbox.sh("mknod /workspace/sda b 8 0")).ok


async def test_every_mount_is_nosuid_and_nothing_of_the_host_is_writable(make, runtime: str) -> None:
    """nosuid and nodev on all that can be written; no mount of the host but the agent, read-only."""
    sandbox = await make()
    keeper = sandbox.box.record["gofer"] if runtime == "gvisor" else sandbox.box.pid  # who has the sandbox's files
    for line in Path(f"/proc/{keeper}/mountinfo").read_text().splitlines():
        fields = line.split()
        place, options, kind = fields[4], fields[5].split(","), line.split(" - ")[1].split()[0]
        if kind == "devtmpfs" or place.startswith(("/proc/", "/sys/")):
            continue
        assert "nosuid" in options, line
        assert "nodev" in options or place in ("/dev", "/dev/pts"), line
        if kind not in ("overlay", "proc", "sysfs", "tmpfs", "devpts", "mqueue"):
            assert place == "/workspace" or "ro" in options, line


async def test_no_descriptor_leaks(make, runtime: str) -> None:
    """A fresh process has 0, 1 and 2 and nothing else; the agent's own cannot be looked at."""
    sandbox = await make()
    result = await sandbox.python("import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    assert result.stdout.strip() in ("[0, 1, 2, 3]", "[0, 1, 2]")  # the directory being listed is one of them
    secrets = "/proc/1/fd/0 /proc/1/fd/3 /proc/1/exe /proc/1/root /proc/1/cwd"
    if runtime == "gvisor":  # shows names and places of everybody to root inside, contents to nobody
        seen = (await sandbox.sh("cat /proc/1/mem /proc/1/environ /proc/1/cmdline")).stdout
        assert not any(sandbox.box.record[name] in seen for name in ("host_secret", "agent_secret"))
        tracing = "import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0)); open('/proc/1/mem', 'rb')"
        assert (await sandbox.python(tracing)).stdout == "-1\n"
    else:
        assert (await sandbox.sh(f"readlink {secrets}; cat /proc/1/environ /proc/1/maps /proc/1/mem")).stdout == ""
    assert not (
        await sandbox.sh(
            "echo x > /.atoll/guest || echo x > /proc/1/exe || chmod 777 /.atoll/guest || rm /.atoll/guest"
        )
    ).ok


async def test_only_loopback_without_network(make) -> None:
    """No interface but lo, and lo is up."""
    sandbox = await make()
    code = "import socket; print([name for _, name in socket.if_nameindex()]); socket.create_server(('127.0.0.1', 0))"
    result = await sandbox.python(code)
    assert result.stdout == "['lo']\n", result.stderr


async def test_the_network_comes_before_the_first_process(
    backend: LocalBackend, rootfs: Rootfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the sandbox's own network namespace while no process of the sandbox exists."""
    seen: list[tuple[str, bool]] = []

    async def attach(sandbox: str, fd: int, policy: Policy) -> None:
        seen.append((os.readlink(f"/proc/self/fd/{fd}"), (backend.paths.run(sandbox) / "pid").exists()))

    monkeypatch.setattr(backend.links, "attach", attach)
    spec = spec_for(rootfs, policy=Policy(network="hosts"))
    box = await backend.create(spec)
    assert seen == [(os.readlink(f"/proc/{box.record['pid']}/ns/net"), False)]


async def test_a_read_only_root_keeps_the_workspace_writable(make) -> None:
    """Nothing but /workspace and the kernel's own tmpfs can be written."""
    sandbox = await make(read_only_root=True)
    assert not (await sandbox.sh("touch /x || touch /usr/x || touch /etc/x")).ok
    assert (await sandbox.sh("touch /workspace/x && touch /dev/shm/x")).ok


async def test_an_id_is_used_once(backend: LocalBackend, make) -> None:
    """A second sandbox with a living one's id is refused and the living one is unharmed; odd ids never become paths."""
    sandbox = await make()
    with pytest.raises(AlreadyExists):
        await make(id=sandbox.id)
    assert (await sandbox.run("true")).ok
    for bad in ("../x", "", "A" * 20, "a" * 19, "a" * 21, "a" * 19 + "\n", "a" * 19 + "/"):
        with pytest.raises(InvalidArgument):
            await make(id=bad)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that any user can reach; pytest's own are closed."""
    with tempfile.TemporaryDirectory(prefix="atoll-mounts-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def test_mounts_act_as_their_owner(make, open_path: Path) -> None:
    """Root inside is the owner of a writable mount, not host root; a read-only one stays so."""
    shared, fixed = open_path / "shared", open_path / "fixed"
    for path in (shared, fixed):
        path.mkdir()
        os.chown(path, 12345, 12345)
        path.chmod(0o755)
    (fixed / "file").write_text("kept")
    (shared / "roots").write_text("not yours")
    (shared / "roots").chmod(0o644)
    sandbox = await make(
        mounts=(
            Mount(str(shared), "/data", False, 12345, 12345),
            Mount(str(fixed), "/opt/deep/fixed", True, 12345, 12345),
        )
    )
    result = await sandbox.sh(
        "touch /data/made && cp /bin/true /data/suid && chmod 4755 /data/suid; cat /opt/deep/fixed/file"
    )
    assert result.stdout == "kept", result.stderr
    assert (shared / "made").stat().st_uid == 12345
    made = (shared / "suid").stat()
    assert made.st_uid == 12345 or not made.st_mode & stat.S_ISUID
    assert not (await sandbox.sh("echo x > /data/roots")).ok
    assert not (await sandbox.sh("echo x > /opt/deep/fixed/file || touch /opt/deep/fixed/new")).ok
    assert (fixed / "file").read_text() == "kept"


async def test_mount_sources_are_opened_as_the_caller_and_without_links(make, tmp_path: Path) -> None:
    """What the caller cannot reach, a link, a socket and a missing path are each refused; so are places that are ours."""
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(closed)
    with pytest.raises(PermissionDenied):
        await make(mounts=(Mount(str(closed / "inner"), "/data", True, 12345, 12345),))
    with pytest.raises(InvalidArgument):
        await make(mounts=(Mount(str(link), "/data", True, 0, 0),))
    with pytest.raises(NotFound):
        await make(mounts=(Mount(str(tmp_path / "missing"), "/data", True, 0, 0),))
    with pytest.raises(InvalidArgument):
        await make(mounts=(Mount("/dev/null", "/data", True, 0, 0),))
    for target in ("/proc/x", "/", "data", "/a/../b", "/.atoll/guest", "/dev"):
        with pytest.raises(InvalidArgument):
            await make(mounts=(Mount(str(closed), target, True, 0, 0),))


async def test_a_workspace_can_be_shared(make, backend: LocalBackend) -> None:
    """Two sandboxes with different ids see one workspace, each as root; it outlives the one it came from."""
    first = await make()
    second = await make(workspace=Workspace("shared", first.id))
    assert (await first.sh("echo one > /workspace/a; mkdir -m 700 /workspace/d; echo two > /workspace/d/b")).ok
    result = await second.sh("cat /workspace/a /workspace/d/b; stat -c %u /workspace/a; echo three > /workspace/c")
    assert result.stdout.split() == ["one", "two", "0"], result.stderr
    assert (await first.run("cat", "/workspace/c")).stdout == "three\n"
    assert not (await second.sh("ls /etc/passwd.first || touch /workspace/../x && ls /workspace/../upper-root")).ok
    await first.destroy()
    assert (await second.run("cat", "/workspace/a")).stdout == "one\n"
    with pytest.raises(NotFound):
        await make(workspace=Workspace("shared", first.id))


async def restarted(sandbox: Sandbox, make) -> Sandbox:
    record = sandbox.box.record
    await sandbox.destroy(keep_disk=True)
    return await make(id=sandbox.id, workspace=Workspace("kept", disk=record))


async def test_a_stopped_sandbox_starts_again_with_its_files(make) -> None:
    """Root layer, /usr and workspace are kept with their owners; processes and /dev/shm are not."""
    first = await make()
    assert (await first.sh("echo a > /etc/a; echo b > /usr/b; echo c > c; chown 7:7 c; touch /dev/shm/x")).ok
    second = await restarted(first, make)
    result = await second.sh("cat /etc/a /usr/b c; stat -c %u /etc/a c; ls -A /dev/shm")
    assert result.stdout.split() == ["a", "b", "c", "0", "7"], result.stderr


@pytest.mark.parametrize("name", ["proc", "dev", "sys", "workspace", ".atoll"])
async def test_a_disk_that_turned_hostile_does_not_start(
    make, backend: LocalBackend, tmp_path: Path, name: str
) -> None:
    """A stopped sandbox whose mount points became links to elsewhere is refused, and elsewhere is not touched."""
    decoy = tmp_path / "decoy"
    decoy.mkdir()
    first = await make()
    record, root = first.box.record, f"/proc/{first.box.pid}/root"
    # Done from outside: inside, the mounts keep the names busy. A bug in any program with these rights would do the same.
    await first.destroy(keep_disk=True)
    await _replace_by_link(backend, first.id, name, str(decoy))
    with pytest.raises(InvalidArgument):
        await make(id=first.id, workspace=Workspace("kept", disk=record))
    assert list(decoy.iterdir()) == [] and root
    await backend.destroy(record)


async def _replace_by_link(backend: LocalBackend, box: str, name: str, target: str) -> None:
    script = 'set -e; mount -o loop "$1" /mnt; cd /mnt/upper-root; rm -rf "$2"; ln -s "$3" "$2"; cd /; umount /mnt'
    process = await asyncio.create_subprocess_exec(
        *("unshare", "-m", "sh", "-c", script, "sh", str(backend.paths.disk(box)), name, target)
    )
    assert await process.wait() == 0
