"""What only gVisor does: its processes are nobody on the host, its agent dials, and strangers who knock are not let in."""

import asyncio
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from lab.backend import PATIENCE, SMALL, Sandbox, chosen_runtime, namespaces
from lab.waiting import eventually

from atoll.backends.local import LocalBackend
from atoll.backends.local.runtimes import probe
from atoll.backends.local.runtimes import version_floor as floor
from atoll.backends.local.runtimes.base import Engine
from atoll.backends.local.runtimes.dialled_channel import KNOCKS, SOCKET, Door
from atoll.backends.local.runtimes.gvisor import Gvisor, built_with, module_version
from atoll.errors import Unsupported
from atoll.guest import wire

pytestmark = pytest.mark.skipif(shutil.which("runsc") is None, reason="runsc is not installed")
SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def gvisor() -> AsyncIterator[None]:
    chosen_runtime.append("gvisor")
    yield
    chosen_runtime.pop()


@pytest.mark.usefixtures("unprobed")
async def test_auto_is_gvisor_where_it_works(backend: LocalBackend) -> None:
    """The strongest whose probe passed."""
    assert await backend.pick("auto") == await backend.pick("") == "gvisor"
    assert await backend.pick("container") == "container"


async def test_no_process_of_it_is_root_outside(make) -> None:
    """Sentry, gofer and all their helpers have the sandbox's own id, no new privileges and a filter."""
    sandbox = await make()
    assert (await sandbox.run("true")).ok
    base = str(sandbox.box.record["base"])
    pids = sandbox.backend.groups.open(sandbox.id).pids()
    assert len(pids) >= 2 and sandbox.box.record["gofer"] in pids
    for pid in pids:
        try:
            status = dict(
                line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
            )
        except OSError:
            continue  # one of its helpers that has just ended
        assert set(status["Uid"].split()) == {base} and set(status["Gid"].split()) == {base}
        assert status["NoNewPrivs"] == "1"
        if pid == sandbox.box.pid:
            assert int(status["CapPrm"], 16) == int(status["CapEff"], 16) == 0 and status["Threads"] == "1"
        else:
            assert status["Seccomp"] == "2"
            shared = namespaces(pid) & namespaces(os.getpid())
            assert not shared, shared


async def test_the_machine_is_not_the_host(make) -> None:
    """The kernel seen inside is gVisor's."""
    sandbox = await make()
    assert os.uname().release not in (await sandbox.run("uname", "-r")).stdout
    assert "Starting gVisor" in (await sandbox.run("dmesg")).stdout or (await sandbox.sh("cat /proc/version")).ok


async def test_everyday_listings_work(make) -> None:
    """`ls -l` of links, threads and pipes: things that builds of gVisor stumble over."""
    sandbox = await make()
    result = await sandbox.sh("ls -la / /etc/alternatives > /dev/null && find / -xdev -maxdepth 2 -ls | wc -l")
    assert result.ok and result.stderr == "", result.stderr


async def test_writes_land_on_the_limited_disk(make) -> None:
    """/tmp too is no memory: more than the memory limit fits on a larger disk, and is counted there."""
    sandbox = await make()
    result = await sandbox.sh("dd if=/dev/zero of=/tmp/x bs=1M count=40 && sync")
    assert result.ok, result.stderr
    usage = await sandbox.box.usage()
    assert usage.disk_bytes is not None and usage.disk_bytes >= 40 << 20
    assert usage.disk_total_bytes is not None and usage.disk_total_bytes <= SMALL.disk_mb << 20


async def test_the_host_has_a_backstop_for_tasks(make) -> None:
    """The control group holds 64 + 10 N."""
    sandbox = await make()
    holder = sandbox.backend.groups.open(sandbox.id)._of("pids")
    assert holder is not None and int(Path(holder, "pids.max").read_text()) == 64 + 10 * SMALL.pids


async def test_the_agent_dials_again(make) -> None:
    """A cut channel is made anew, by the agent, and nothing that runs is lost."""
    sandbox = await make()
    await sandbox.client.request("exec", id="bg", shell="sleep 600", detach=True)
    for _ in range(3):
        sandbox.client.drop_connection()
        assert (await sandbox.client.request("poll", id="bg"))["running"] is True


async def test_strangers_inside_do_not_get_in(make) -> None:
    """Who knows no secret can knock as often as it likes: it is never mistaken for the agent, and the agent gets through."""
    sandbox = await make()
    flood = """
import socket, time
held = []
for n in range(300):
    s = socket.socket(socket.AF_UNIX)
    try:
        s.connect("/.atoll/host/agent.sock")
        s.send([b"", b"x" * 5000, b"\\0\\0\\0\\x05\\0\\0\\0\\0\\0hello", b"\\xff" * 9][n % 4])
        held.append(s)
    except OSError:
        pass
    if len(held) > 40: held.pop(0).close()
print("done")
"""
    await sandbox.client.request("exec", id="flood", argv=["/usr/bin/python3", "-c", flood], detach=True)
    for _ in range(3):
        sandbox.client.drop_connection()
        assert (await sandbox.run("true")).ok
    assert not (await sandbox.sh("rm /.atoll/host/agent.sock || touch /.atoll/host/x")).ok


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    made = Door(tmp_path, SECRET)
    yield made
    made.close()


def _call(directory: Path, said: bytes) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(str(directory / SOCKET))
    caller.send(said)
    return caller


HELLO = wire.control(wire.HELLO, 0, {"v": 1, "secret": SECRET})


async def test_a_door_hands_on_what_it_has_only_looked_at(door: Door, tmp_path: Path) -> None:
    """The hello is still there for the one who gets the connection; the newest caller wins."""
    old = _call(tmp_path, HELLO)
    await eventually(lambda: door._arrived is not None, "the first is seen")
    first = door._arrived
    new = _call(tmp_path, HELLO + b"more")
    await eventually(lambda: door._arrived is not first, "the second is seen")
    reader, writer = await asyncio.wait_for(door.connect(), PATIENCE)
    assert await reader.readexactly(len(HELLO) + 4) == HELLO + b"more"
    assert _closed(old)
    writer.close()
    new.close()
    old.close()


async def test_a_door_stays_shut_for_others(door: Door, tmp_path: Path) -> None:
    """Wrong secrets, half frames, floods of silent callers: refused or bounded, and the agent still comes in."""
    wrong = wire.control(wire.HELLO, 0, {"v": 1, "secret": SECRET[::-1]})
    odd = wire.control(wire.HELLO, 0, {"v": 1, "secret": 5})
    for said in (wrong, odd, b"\0" * 9, b"\xff" * 5000, wire.head(2, 0, wire.REQUEST) + b"\x80\x80"):
        with _call(tmp_path, said) as caller:
            caller.settimeout(PATIENCE)
            assert await asyncio.to_thread(_closed, caller)
    silent = []
    for _ in range(KNOCKS * 3):
        silent.append(_call(tmp_path, HELLO[:5]))
        await asyncio.sleep(0)
    await eventually(lambda: len(door._guests) <= KNOCKS + 1, "few are looked at")
    assert door._arrived is None
    agent = _call(tmp_path, HELLO)
    _, writer = await asyncio.wait_for(door.connect(), PATIENCE)
    writer.close()
    for caller in (*silent, agent):
        caller.close()


def _closed(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


async def test_a_closed_door_tells_who_waits(door: Door) -> None:
    """No waiting for a sandbox that has ended."""
    waiting = asyncio.create_task(door.connect())
    await asyncio.sleep(0)
    door.close()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(waiting, PATIENCE)


CACHE = Path(os.environ.get("ATOLL_CACHE") or Path.home() / ".cache" / "atoll")
OLDER = {
    "2022": ("runsc-ptrace", "/usr/bin/runsc"),  # Debian 12's
    "2024": ("runsc-systrap", f"{CACHE}/runsc-2024-{os.uname().machine}/runsc"),  # scripts/install-runsc.sh fallback
}


def _is_of(year: str, program: str) -> bool:
    if not os.path.exists(program):
        return False
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=PATIENCE).stdout
    return f"~{year}" in said


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that the ids of sandboxes can reach, as that of an installed program."""
    with tempfile.TemporaryDirectory(prefix="atoll-runsc-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.mark.parametrize("year", OLDER)
async def test_older_builds_work(backend: LocalBackend, rootfs, reachable: Path, year: str) -> None:
    """Commands, files, kills of whole trees, a second connection and freezing on the builds that set-up falls back to."""
    from lab.backend import spec_for

    engine, program = OLDER[year]
    if not _is_of(year, program):
        pytest.skip(f"no build of {year} here")
    program = str(shutil.copy(program, reachable / "runsc"))
    box = await backend._create(spec_for(rootfs), Engine(Gvisor(), engine, program))
    sandbox = Sandbox(backend, box)
    try:
        assert (await sandbox.sh("echo out; echo err >&2; exit 3")).exit.code == 3
        assert (await sandbox.python("print(sum(range(10)))")).stdout == "45\n"
        await sandbox.client.request("exec", id="tree", shell="sleep 600 & sleep 601 & wait", detach=True)
        await sandbox.client.request("kill", id="tree")
        sandbox.client.drop_connection()
        left = (await sandbox.client.request("ps"))["processes"]
        assert not [process for process in left if "sleep" in process["comm"]]
        for _ in range(3):
            await box.freeze()
            await box.thaw()
        assert (await sandbox.sh("echo still here")).stdout == "still here\n"
    finally:
        await sandbox.destroy()


def test_set_up_installs_the_build_it_kept(tmp_path: Path) -> None:
    """A build in the cache is installed without compiling; one that was changed there is not."""
    script = Path(__file__).parents[2] / "scripts" / "install-runsc.sh"
    text = script.read_text()
    version = text.partition("\nversion=")[2].partition("\n")[0]
    kept = tmp_path / "cache" / f"runsc-{version}-{os.uname().machine}"
    kept.parent.mkdir()
    kept.write_text(f"#!/bin/sh\n# mod\tgvisor.dev/gvisor\t{version}\necho runsc version VERSION_MISSING\n")
    kept.chmod(0o755)
    tools = tmp_path / "tools"  # neither Go, nor curl, nor apt, nor another runsc
    tools.mkdir()
    for name in (
        "bash",
        "sed",
        "grep",
        "head",
        "cp",
        "mv",
        "rm",
        "mkdir",
        "mktemp",
        "chmod",
        "uname",
        "id",
        "dirname",
        "sha256sum",
    ):
        (tools / name).symlink_to(shutil.which(name) or name)
    closed = script_without_extra_path(text, tmp_path)

    def install(target: str) -> bool:
        env = {"PATH": str(tools), "HOME": str(tmp_path), "ATOLL_CACHE": str(kept.parent)}
        env["ATOLL_RUNSC_TARGET"] = str(tmp_path / target)
        subprocess.run(["bash", closed], env=env, check=True, timeout=PATIENCE)
        return (tmp_path / target / "runsc").exists()

    assert not install("unsigned")
    checksum = hashlib.sha256(kept.read_bytes()).hexdigest()
    (kept.parent / f"{kept.name}.sha256").write_text(f"{checksum}  {kept.name}\n")
    assert install("good")
    kept.write_text(kept.read_text() + "# changed\n")
    assert not install("changed")


def script_without_extra_path(text: str, where: Path) -> Path:
    """The script, as on a machine where nothing lies outside of PATH."""
    changed = where / "install-runsc.sh"
    changed.write_text(text.replace('export PATH="$PATH:/usr/local/go/bin:/usr/sbin:/sbin"\n', ""))
    return changed


# A build of gVisor whose kernel ends a moment after it has started a sandbox, as one did that a newer Go had compiled.
CRASHING = """#!/bin/sh
case " $* " in *" run "*) ;; *) exec {runsc} "$@" ;; esac
{runsc} "$@" || exit $?
[ -e {sign} ] || exit 0
for word in "$@"; do case $word in --pid-file=*) kernel=$(cat "${{word#*=}}") ;; esac; done
(sleep 0.2; kill -KILL "$kernel") > /dev/null 2>&1 < /dev/null &
"""


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runsc that is found; it crashes while the file this returns is there."""
    with tempfile.TemporaryDirectory(prefix="atoll-runsc-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        sign, program = Path(directory) / "crash", Path(directory) / "runsc"
        program.write_text(CRASHING.format(runsc=shutil.which("runsc"), sign=sign))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        monkeypatch.setattr(probe, "ROUNDS", 50)  # 5 s: it crashes well before that, however busy the machine is
        yield sign


def remembered(backend: LocalBackend) -> dict[str, bool]:
    return {name: entry["works"] for name, entry in json.loads(backend.paths.probes.read_text()).items()}


@pytest.mark.usefixtures("unprobed")
async def test_distro_2_a_build_that_crashes_is_not_picked(crashing: Path, backend: LocalBackend) -> None:
    """`auto` is what works, and `gvisor` by name is refused with the reason."""
    crashing.touch()
    assert await backend.pick("auto") == "container"
    with pytest.raises(Unsupported, match="crashed while programs waited"):
        await backend.pick("gvisor")
    assert not any(works for name, works in remembered(backend).items() if name.startswith("runsc"))


def test_distro_2_the_fix_names_the_compiler() -> None:
    """The same version of gVisor works or crashes with the Go that built it."""
    assert "go1." in Gvisor().fix_of("runsc-systrap") and built_with("/bin/sh") == ""


@pytest.mark.usefixtures("unprobed")
async def test_distro_2_a_crash_makes_the_probe_run_again(
    crashing: Path, make, backend: LocalBackend, monkeypatch
) -> None:
    """What was found good and crashes in use is found bad before the next sandbox is made, and not kept as good."""
    monkeypatch.setattr(probe, "ROUNDS", 1)
    assert await backend.pick("auto") == "gvisor" and any(remembered(backend).values())
    monkeypatch.setattr(probe, "ROUNDS", 50)
    crashing.touch()
    sandbox = await make()
    ended = await asyncio.wait_for(sandbox.box.wait(), PATIENCE)
    assert "signal 9" in ended.detail
    assert await backend.pick("auto") == "container"
    assert not any(works for name, works in remembered(backend).items() if name.startswith("runsc"))


@pytest.mark.usefixtures("unprobed")
async def test_distro_2_a_sandbox_cannot_talk_its_engine_down(make, backend: LocalBackend) -> None:
    """A sandbox that is killed makes the probe run again, which finds that all is well."""
    sandbox = await make()
    os.kill(sandbox.box.pid, signal.SIGKILL)
    await asyncio.wait_for(sandbox.box.wait(), PATIENCE)
    assert await backend.pick("auto") == "gvisor"


def test_the_version_of_a_build_that_does_not_name_itself(tmp_path: Path) -> None:
    """`go install` leaves `VERSION_MISSING` in what runsc says, and the module's version in the program."""
    program = tmp_path / "runsc"
    program.write_bytes(
        b"\x7fELF" + b"x" * 5000 + b"\npath\tp\nmod\tgvisor.dev/gvisor\tv0.0.0-20260905035102-160f\th1:=\n"
    )
    assert module_version(str(program)) == "v0.0.0-20260905035102-160f"
    assert floor.parse("runsc", module_version(str(program))) == (20260905,)
    program.write_bytes(b"x\nmod\tgvisor.dev/gvisor\t(devel)\t\n")
    assert module_version(str(program)) == module_version("/bin/sh") == module_version("/no/such") == ""
