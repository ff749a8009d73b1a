"""Virtual machines: what QEMU may do, how one ends, what a hostile guest can bring about, its network. The contract has the rest.

Every start takes seconds on an emulated processor, so each test asks one machine several things.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from lab import orphans
from lab.backend import SMALL, census, children, image_of, inherited, local_backend
from lab.contract import run
from lab.microvm import emulated, share_made, small_rootfs
from lab.waiting import eventually

from atoll.backends.contract import BoxSpec, NetworkEvents
from atoll.backends.local import LocalBackend
from atoll.backends.local.kernel.cgroups import SPARE_PIDS
from atoll.backends.local.layers import Rootfs
from atoll.backends.local.network import Links
from atoll.backends.local.paths import new_id
from atoll.backends.local.runtimes import probe
from atoll.backends.local.runtimes.microvm import TCG, Microvm
from atoll.backends.local.runtimes.microvm_assembly import MicrovmAssembly
from atoll.egress import EgressEvent
from atoll.errors import DiskFull, Internal
from atoll.model import Policy

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(bool(emulated().lacking(TCG)), reason=emulated().lacking(TCG)),
]
ENV = {"PATH": "/usr/bin:/bin"}
# What a guest that has taken QEMU over would try. Each attempt tells `ok` or the number of its error.
ATTACK = r"""
import ctypes, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *words):
    if getattr(libc, name)(*words) < 0:
        raise OSError(ctypes.get_errno(), name)
def fork():
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
tries = {
    "hosts file": lambda: open("/etc/passwd").read(),
    "processes": lambda: os.listdir("/proc/1"),
    "write image": lambda: open("/.atoll/image", "ab").write(b"x"),
    "make file": lambda: open("/new", "w"),
    "internet": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "packets": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "mount": lambda: call("mount", b"none", b"/dev", b"tmpfs", 0, None),
    "namespace": lambda: call("unshare", 0x10000000),
    "other user": lambda: os.setuid(1000),
    "other root": lambda: os.chroot("/dev"),
    "trace": lambda: call("ptrace", 16, 1, 0, 0),
    "bpf": lambda: call("syscall", 321, 0, 0, 0),
    "own disk": lambda: open("/.atoll/disk", "r+b").read(1),
}
told = {}
for name, one in tries.items():
    if sys.argv[1:] and name not in sys.argv[1:]:
        continue
    try:
        one()
        told[name] = "ok"
    except OSError as error:
        told[name] = error.errno
told["root"] = sorted(os.listdir("/"))
sys.stderr.write("TOLD" + json.dumps(told))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Rootfs:
    return small_rootfs(tmp_path_factory.mktemp("small") / "image")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What homes of this module have in common: block images, and the answers of probes."""
    return tmp_path_factory.mktemp("made")


class Home:
    """A home whose backend starts virtual machines, with a network."""

    def __init__(self, path: Path, rootfs: Rootfs, made: Path) -> None:
        self.path, self._rootfs, self._made = path, rootfs, made
        self.refused: list[EgressEvent] = []

    async def open(self, runtime: Microvm | None = None) -> LocalBackend:
        """A backend on this home, as the next daemon makes it."""
        self.path.mkdir(exist_ok=True)
        share_made(self.path, self._made)
        known, own = self._made / "probes.json", self.path / "probes.json"
        if runtime is None and known.exists() and not own.exists():
            own.write_bytes(known.read_bytes())
        self.backend = local_backend(self.path, runtimes=(runtime or emulated(),), links=Links(self.path))
        await self.backend.start(NetworkEvents(on_blocked=self.refused.append))
        if runtime is None:
            await self.backend.pick("microvm")
            known.write_bytes(own.read_bytes())
        return self.backend

    def spec(self, **fields: Any) -> BoxSpec:
        given = {"limits": SMALL, "boot": {"env": ENV}, "base_env": ENV, "policy": Policy(network="none"), **fields}
        return BoxSpec(new_id(), image_of(self._rootfs), "microvm", **given)


@pytest.fixture
async def home(tmp_path: Path, small: Rootfs, made: Path) -> AsyncIterator[Home]:
    """After the test nothing may be left of it."""
    inherited.update(children())
    found = Home(tmp_path / "home", small, made)
    with orphans.gathered():
        try:
            yield found
        finally:
            for box in list(found.backend._boxes.values()):
                await found.backend.destroy(box.record)
            await found.backend.sweep(set())
        await eventually(lambda: not any(census(found.backend).values()), "nothing is left")
        await found.backend.close()


class Attacker(MicrovmAssembly):
    """A program of the attacker's in QEMU's place."""

    async def make_disk(self) -> None:
        await super().make_disk()
        self._monitor = Path(self.rootfs.lowers[0])

    def order(self, stage: str, descriptors: int) -> Any:
        return {**super().order(stage, descriptors), "argv": ["/usr/bin/python3", "-B", "-c", ATTACK]}


class Attacked(Microvm):
    assembly = Attacker


async def test_what_has_taken_qemu_over_has_nothing(home: Home) -> None:
    """No file but the sandbox's own, no network, no right, no other process. Without the jail the same program gets most of it."""
    runtime = Attacked(TCG)
    backend = await home.open(runtime)
    engine = probe.Engine(runtime, TCG, str(runtime.find(TCG)))
    with pytest.raises(Internal, match="TOLD") as ended:
        await backend._create(home.spec(), engine)
    told = json.loads(ended.value.message.partition("TOLD")[2])
    assert told.pop("root") == [".atoll", "bin", "dev", "etc", "lib", "lib64", "proc", "root", "sys", "usr"]
    assert told.pop("own disk") == "ok"
    assert [name for name, result in told.items() if result == "ok"] == [
        "hosts file"
    ]  # the attacker's own, brought along
    harmless = ("hosts file", "processes", "internet", "packets", "namespace")  # the others would change this machine
    free = await asyncio.create_subprocess_exec(sys.executable, "-c", ATTACK, *harmless, stderr=subprocess.PIPE)
    outside = json.loads((await free.communicate())[1].partition(b"TOLD")[2])
    outside.pop("root")
    assert outside == dict.fromkeys(harmless, "ok")


async def test_qemu_runs_without_rights_and_its_death_is_told(home: Home) -> None:
    """An id of its own, no capability, two filters, the sandbox's group, and files that are the sandbox's. Killed, it says so."""
    backend = await home.open()
    box = await backend.create(home.spec())
    (qemu,) = [pid for pid in backend.groups.open(box.id).pids() if b"qemu-system" in _read(f"/proc/{pid}/cmdline")]
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{qemu}/status").read_text().splitlines() if ":\t" in line
    )
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert set(status["Uid"].split()) == {str(box.record["base"])} and int(status["Uid"].split()[0]) > 65536
    assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"].strip()) == ("1", "2", "")
    assert int(status["Seccomp_filters"]) >= 2
    assert not Path(f"/proc/{qemu}/root/etc").exists() and not list(Path(f"/proc/{qemu}/root/proc").iterdir())
    assert sorted(os.listdir(f"/proc/{qemu}/root/.atoll")) == ["boot", "disk", "host", "image"]
    assert not (backend.paths.run(box.id) / "boot").exists()  # with the agent's secrets; read once
    os.kill(qemu, signal.SIGKILL)
    ended = await box.wait()
    assert (ended.kind, ended.detail) == ("killed", "killed by signal 9")
    await backend.destroy(box.record)


async def test_a_guest_can_use_up_only_what_is_its_own(home: Home) -> None:
    """Its disk and its processes; afterwards it goes on. It has none of the machine's devices."""
    backend = await home.open()
    box = await backend.create(home.spec())
    fill = "dd if=/dev/zero of=/workspace/big bs=1M count=200; rm /workspace/big; echo here"
    code, told = await run(box, "/bin/sh", "-c", fill)
    assert code == 0 and "No space left" in told and told.endswith("here\n")
    image = backend.paths.disk(box.id)
    assert image.stat().st_size == SMALL.disk_mb << 20 and image.stat().st_blocks * 512 <= SMALL.disk_mb << 20
    forks = "import os\ntry:\n while True:\n  if os.fork() == 0: import time; time.sleep(600)\n  n = globals().get('n', 0) + 1\n"
    code, told = await run(
        box, "/usr/bin/python3", "-c", f"{forks}except OSError as e: print(e.errno, n, flush=True)\nos.killpg(0, 9)"
    )
    number, made = told.split()
    assert number == "11" and SMALL.pids // 2 < int(made) <= SMALL.pids + SPARE_PIDS
    assert await run(box, "/bin/echo", "here") == (0, "here\n")
    _, devices = await run(box, "/bin/ls", "/dev")
    assert not {"mem", "vda", "vdb", "kmsg", "console"} & set(devices.split())


async def test_noise_on_the_channel_does_not_keep_the_next_daemon_out(home: Home) -> None:
    """Root inside connects in the agent's place and says things without end."""
    backend = await home.open()
    box = await backend.create(home.spec())
    noise = """import os, socket, time
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            s = socket.socket(socket.AF_UNIX); s.connect("/dev/atoll-agent")
            while True: s.sendall(os.urandom(4096))
        except OSError: time.sleep(0.1)
"""
    assert (await run(box, "/usr/bin/python3", "-c", noise))[0] == 0
    record = json.loads(json.dumps(box.record))
    await box.client.close()
    await backend.close()
    backend = await home.open()
    found = await backend.adopt(record, Policy(network="none"))
    assert found is not None
    assert await run(found, "/bin/echo", "here") == (0, "here\n")
    await backend.destroy(record)


async def test_the_network_is_the_routers(home: Home) -> None:
    """What is allowed goes through, all else is refused and told; after a restart too."""
    backend = await home.open()
    if not (status := await backend.network()).works:
        pytest.skip(status.why)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        policy = Policy(network="hosts", host_ports=(port,))
        box = await backend.create(home.spec(policy=policy))
        ask = f"""import socket
gateway = socket.inet_ntoa(int(open("/proc/net/route").read().split("\\n")[1].split()[2], 16).to_bytes(4, "little"))
for address in ((gateway, {port}), ("192.0.2.1", 80)):
    try: socket.create_connection(address, 30); print("open")
    except OSError as error: print(error.errno)
print([name for _, name in socket.if_nameindex()])
"""
        expected = (0, "open\n111\n['lo', 'eth0']\n")
        assert await run(box, "/usr/bin/python3", "-c", ask) == expected
        assert (await box.traffic()).refused >= 1
        assert any(event.sandbox == box.id for event in home.refused)
        record = json.loads(json.dumps(box.record))
        await box.client.close()
        await backend.close()
        backend = await home.open()
        found = await backend.adopt(record, policy)
        assert found is not None and await backend.reconnect() == set()
        assert await run(found, "/usr/bin/python3", "-c", ask) == expected
        await backend.destroy(record)


class Forgetless(Microvm):
    """Believes a failure, as with KVM."""

    def keeps_failure(self, engine: str) -> bool:
        return True


async def test_a_kernel_that_does_not_boot_is_found_out_once(home: Home, tmp_path: Path, monkeypatch) -> None:
    """The probe says why; the next daemon of this machine believes it, and starts nothing."""
    monkeypatch.setattr(probe, "FAILURES", tmp_path / "failures.json")
    runtime = Forgetless(TCG)
    assert runtime.kernel is not None
    broken = tmp_path / "vmlinuz-broken"
    broken.write_bytes(b"no kernel" * 1000)
    object.__setattr__(runtime.kernel, "image", broken)
    steps: list[str] = []
    for tried in (True, False):
        backend = await home.open(runtime)
        backend.on_step = lambda box, step: steps.append(step)
        (listed,) = [one for one in await backend.runtimes() if one.name == "microvm"]
        assert not listed.works and ("not tried yet" in listed.why) is tried and not steps
        status = await backend.probes.status("microvm")
        assert not status.works and "the virtual machine ended" in status.why
        assert bool(steps) is tried
        steps.clear()
        if tried:
            await backend.close()


async def test_an_image_that_does_not_fit_is_not_kept(home: Home, monkeypatch) -> None:
    """The host's disk is full, or the image too large: a typed error, and no half of a block device."""
    from atoll.backends.local.runtimes import microvm_image

    backend = await home.open()
    before = set((home.path / "images" / "microvm").iterdir())
    monkeypatch.setattr(microvm_image, "_key", lambda rootfs: "another")
    monkeypatch.setattr(microvm_image, "MOST_MB", 1)
    with pytest.raises(DiskFull):
        await backend.create(home.spec())
    assert set((home.path / "images" / "microvm").iterdir()) == before


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
