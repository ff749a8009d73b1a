"""Makes one virtual machine: its two disks, its network, and QEMU in a place where it can do nothing else.

QEMU is the one process that a hostile kernel inside talks to. It runs as an id of its own, without rights, under a filter of system
calls and in the sandbox's control group; of the files of this machine it sees its own program, the kernel, the image, its disk, and the
socket of the agent's channel. What it writes to its standard output goes nowhere once the sandbox is up.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.backends.contract import Limits
from atoll.backends.local.assembly import Boot
from atoll.backends.local.box import LocalBox, LocalRecord
from atoll.backends.local.kernel.cgroups import Group
from atoll.backends.local.kernel.children import Watched
from atoll.backends.local.launch import Bind, Disk, EngineOrder, Launcher, Overlay
from atoll.backends.local.runtimes import microvm_boot, microvm_filter, microvm_qemu
from atoll.backends.local.runtimes.dialled import DIAL_TARGET, DialledAssembly, DialledBox
from atoll.backends.local.runtimes.dialled_channel import SOCKET
from atoll.egress.router.tap import open_tap
from atoll.errors import Internal, Unavailable, Unsupported

if TYPE_CHECKING:
    from atoll.backends.local.runtimes.microvm import Microvm

BESIDE_MB = 320  # of QEMU itself
HOST_TASKS = 128  # threads of QEMU
BOOT_TIMEOUT = 240.0  # an emulated processor on a busy machine
KVM_DEVICE = "/dev/kvm"
_SAID_MOST = 1 << 16


class MicrovmBox(DialledBox):
    """Its keeper has QEMU below it."""

    @staticmethod
    def apply(group: Group, limits: Limits) -> dict[str, bool]:
        """The machine's size holds memory and processors, its kernel the number of processes."""
        return {**group.apply(limits, HOST_TASKS, microvm_qemu.KERNEL_MB + BESIDE_MB), "pids": True}

    def _disk(self) -> tuple[int | None, int | None]:
        """What its disk takes of the host, and its size: what is in it only its own kernel can say."""
        try:
            stat = os.stat(self._paths.disk(self.id))
        except OSError:
            return None, None
        return min(stat.st_blocks * 512, stat.st_size), stat.st_size


class MicrovmAssembly(DialledAssembly):
    """The launcher starts QEMU in the sandbox's namespaces, with one small directory as all its files."""

    box = MicrovmBox
    reads_only = True
    _image: Path
    _monitor: Path
    _base = 0
    _tap: int | None = None
    _read_said: int | None = None

    @property
    def runtime(self) -> "Microvm":
        from atoll.backends.local.runtimes.microvm import Microvm

        assert isinstance(self.engine.runtime, Microvm)
        return self.engine.runtime

    # Before the namespaces are used

    async def make_disk(self) -> None:
        kernel = self.runtime.kernel
        if self.backend.standing.rootless or kernel is None:
            raise Unsupported("a virtual machine needs the root daemon", hint="use --runtime gvisor or container")
        cache = self.paths.home / "images" / "microvm"
        self._monitor = await asyncio.to_thread(microvm_boot.make_monitor, cache, self.engine.program, kernel)
        self._image = await self.runtime.images.get(self.backend, self.rootfs)
        await super().make_disk()

    async def prepare(self, base: int) -> Launcher:
        self._base = base
        launcher = await super().prepare(base)
        if self.spec.policy.network != "none":
            try:
                self._tap = await asyncio.to_thread(open_tap, launcher.net)
            except BaseException:
                await launcher.close()
                raise
        return launcher

    def abandon(self) -> None:
        super().abandon()
        self._let_go()

    def _let_go(self) -> None:
        """Close what only starting needs."""
        for fd in (self._tap, self._read_said):
            if fd is not None:
                os.close(fd)
        self._tap = self._read_said = None

    # What QEMU sees

    def overlays(self) -> list[Overlay]:
        return [{"target": "", "lowers": [str(self._monitor)], "name": "root"}]

    def disk(self) -> Disk:
        """For the places to mount on; the sandbox's own disk is QEMU's."""
        return {"tmpfs": 1 << 20}

    def mountpoints(self) -> list[str]:
        return []

    def further(self, group: Group) -> list[tuple[str, Callable[[], int]]]:
        flags = os.O_PATH | os.O_CLOEXEC
        files = {
            microvm_qemu.IMAGE: self._image,
            microvm_qemu.DISK: self.paths.disk(self.spec.id),
            microvm_qemu.BOOT: self.run / "boot",
        }
        return [self.dial(), *((target, partial(os.open, path, flags)) for target, path in files.items())]

    def own_binds(self, further: list[str]) -> list[Bind]:
        """Behind the descriptors that every engine gets is the agent's, which this one needs not."""
        own = (microvm_qemu.DISK, microvm_qemu.BOOT)  # files of root's, which are its own in there
        binds = [
            Bind(source={"fd": fd}, target=target, read_only=target != microvm_qemu.DISK, idmap=target in own)
            for fd, target in enumerate(further, start=4)
        ]
        if self._accel == "kvm":
            binds.append(Bind(source={"device": KVM_DEVICE}, target=KVM_DEVICE, read_only=False, idmap=False))
        return binds

    def write_bundle(self, stage: str, launcher: Launcher, base: int, binds: list[Bind]) -> None:
        self.open_door()
        fd = os.open(self.run / "boot", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(self.message())

    def descriptors(self) -> list[Callable[[], int]]:
        return [partial(os.dup, self._tap)] if self._tap is not None else []

    def order(self, stage: str, descriptors: int) -> EngineOrder:
        link = self.backend.links.link(self.spec.id) if self._tap is not None else None
        program, accel = self.engine.program, self._accel
        machine = microvm_qemu.Machine(program, accel, self.spec, f"{DIAL_TARGET}/{SOCKET}", link)
        return {
            "inside": "",
            "jail": [descriptors - 1] if self._tap is not None else [],
            "filter": microvm_filter.program().hex(),
            "argv": machine.argv(),
        }

    @property
    def _accel(self) -> str:
        return self.engine.name.removeprefix("qemu-")

    # While it starts

    def log(self) -> int:
        """A pipe that holds little and is read by nobody later: a guest may make QEMU complain without end."""
        self._read_said, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return write

    def said(self) -> str:
        with suppress(OSError, TypeError):
            return os.read(self._read_said or -1, _SAID_MOST).decode(errors="replace").strip()[-2000:]
        return ""

    async def start(self, launcher: Launcher, base: int, binds: list[Bind], group: Group) -> None:
        """The machine boots for longer than an agent usually takes to answer."""
        await super().start(launcher, base, binds, group)
        assert self._door is not None
        keeper = Watched(int((self.run / "pid").read_text()))
        arrived = asyncio.ensure_future(self._door.arrived())
        try:
            both = (arrived, keeper.ended)
            done, _ = await asyncio.wait(both, timeout=BOOT_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        finally:
            arrived.cancel()
            ended = keeper.over
            keeper.close()
        if ended:
            raise Internal(f"the virtual machine ended: {self.said()}")
        if not done:
            raise Unavailable("the virtual machine did not boot in time")
        (self.run / "boot").unlink()
        self._let_go()

    def living(self, record: LocalRecord, group: Group, init: Watched) -> LocalBox:
        self._let_go()
        return super().living(record, group, init)

    def boot(self) -> Boot:
        return {"dial": microvm_qemu.AGENT_DIALS}
