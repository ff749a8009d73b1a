"""Sandboxes with a kernel of their own, in a virtual machine: QEMU, and a file server for the sandbox's tree.

Both run inside the sandbox's namespaces as its own root, as gVisor does: neither ever has a privileged id on the host. The machine has
a virtio serial port for the agent's channel and sees the tree that the launcher has put together over virtiofs. It has no network yet.
QEMU emulates the processor (TCG), which works everywhere and is slow. `auto` never chooses this runtime.
"""

import asyncio
import math
import os
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

from atoll.backends.contract import Capabilities, Limits
from atoll.backends.local import binaries, bundle
from atoll.backends.local.assembly import Boot
from atoll.backends.local.kernel.cgroups import Group
from atoll.backends.local.kernel.children import Watched
from atoll.backends.local.launch import Bind, EngineOrder, Launcher, boot_log
from atoll.backends.local.runtimes import microvm_boot
from atoll.backends.local.runtimes.base import Engine, Runtime
from atoll.backends.local.runtimes.dialled import DIAL_TARGET, DialledAssembly, DialledBox
from atoll.backends.local.runtimes.dialled_channel import SOCKET
from atoll.errors import Internal, Unavailable

KERNEL_TARGET, ARCHIVE_TARGET = "/.atoll/vm/kernel", "/.atoll/vm/start"
AGENT_DIALS = "/dev/atoll-agent"  # inside the machine (`guest/src/vm.rs`)
KERNEL_MB = 96  # of the machine's own kernel
BESIDE_MB = 320  # QEMU and the file server
HOST_TASKS = 128
BOOT_TIMEOUT = 240.0  # an emulated processor on a busy machine
FILE_SERVERS = ("/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd")
_NUMBERS = {
    "CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4, "CAP_KILL": 5, "CAP_SETGID": 6,
    "CAP_SETUID": 7, "CAP_NET_BIND_SERVICE": 10,
}  # fmt: skip

# In the sandbox's namespaces, below the stage. The file server insists on a lock below /run, which is not ours: it gets an empty one.
_SCRIPT = """
cat > state/boot && mount -t tmpfs -o size=64k,mode=755 none /run || exit 1
{files} --socket-path={stage}/state/files -o source={stage}/root -o sandbox=chroot -o cache=auto &
n=0; while [ ! -S state/files ]; do n=$((n+1)); [ $n -lt 3000 ] || exit 1; sleep 0.01; done
{machine} < /dev/null &
echo $! > state/pid
"""


class MicrovmBox(DialledBox):
    """Its keeper has QEMU and virtiofsd below it."""

    file_server = "files"

    @staticmethod
    def apply(group: Group, limits: Limits) -> dict[str, bool]:
        """The machine's size holds memory and processors. Its root may have as many processes as its kernel allows."""
        return {**group.apply(limits, HOST_TASKS, KERNEL_MB + BESIDE_MB), "pids": False}


class MicrovmAssembly(DialledAssembly):
    """The launcher starts a script inside the sandbox's namespaces, which leaves QEMU and the file server behind."""

    box = MicrovmBox

    def further(self, group: Group) -> list[tuple[str, Callable[[], int]]]:
        runtime = self.engine.runtime
        assert isinstance(runtime, Microvm) and runtime.kernel is not None
        archive = microvm_boot.make_archive(self.paths.home / "images" / "microvm", runtime.kernel)
        flags = os.O_PATH | os.O_CLOEXEC
        kernel, start = (partial(os.open, path, flags) for path in (runtime.kernel.image, archive))
        return [self.dial(), (KERNEL_TARGET, kernel), (ARCHIVE_TARGET, start)]

    def write_bundle(self, stage: str, launcher: Launcher, base: int, binds: list[Bind]) -> None:
        self.open_door()

    def order(self, stage: str, descriptors: int) -> EngineOrder:
        runtime = self.engine.runtime
        assert isinstance(runtime, Microvm) and runtime.file_server is not None
        machine = shlex.join(self._machine(stage))
        script = _SCRIPT.format(files=shlex.quote(runtime.file_server), stage=stage, machine=machine)
        return {"inside": "{}", "argv": ["/bin/sh", "-c", script]}

    def _machine(self, stage: str) -> list[str]:
        limits = self.spec.limits
        memory = limits.memory_mb + KERNEL_MB
        kept = 0 if self.spec.no_capabilities else sum(1 << _NUMBERS[name] for name in bundle.CAPABILITIES)
        line = " ".join(
            [
                *("quiet loglevel=1 panic=-1 mitigations=off rdinit=/init", f"atoll.shm={limits.shm_mb}"),
                *(f"atoll.hostname={self.spec.hostname}", f"atoll.caps={kept:x}", "-- vm"),
            ]
        )
        return [
            *(self.engine.program, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
            *("-machine", "q35,vmport=off,smm=off,usb=off,memory-backend=memory", "-accel", "tcg", "-cpu", "max"),
            *("-m", f"{memory}M", "-smp", str(math.ceil(limits.cpus))),
            *("-object", f"memory-backend-memfd,id=memory,size={memory}M,share=on"),
            *("-kernel", f"{stage}/root{KERNEL_TARGET}", "-initrd", f"{stage}/root{ARCHIVE_TARGET}", "-append", line),
            *("-fw_cfg", f"name=opt/atoll/boot,file={stage}/state/boot"),
            *("-chardev", f"socket,id=agent,path={stage}/root{DIAL_TARGET}/{SOCKET},reconnect=1"),
            *("-device", "virtio-serial-pci,max_ports=2", "-device", "virtserialport,chardev=agent,name=atoll"),
            *("-chardev", f"socket,id=files,path={stage}/state/files"),
            *("-device", "vhost-user-fs-pci,chardev=files,tag=root,queue-size=1024"),
            *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        ]

    async def _start(self, launcher: Launcher, base: int, binds: list[Bind], group: Group) -> None:
        """The machine boots for longer than an agent usually takes to answer."""
        await super()._start(launcher, base, binds, group)
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
            raise Internal(f"the virtual machine ended: {boot_log(self.run / 'boot.log')}")
        if not done:
            raise Unavailable("the virtual machine did not boot in time")

    def boot(self) -> Boot:
        return {"dial": AGENT_DIALS}

    def is_file_server(self, words: bytes) -> bool:
        return b"--socket-path=" in words


class Microvm(Runtime):
    """`microvm`: the sandbox has a kernel of its own, on an emulated machine."""

    name = "microvm"
    engines = ("qemu-tcg",)
    fix = "install the packages qemu-system-x86, virtiofsd and linux-image-cloud-amd64"
    package = "qemu-system-x86"
    automatic = False
    probe_timeout = BOOT_TIMEOUT
    capabilities = Capabilities(freezes_idle=True, oom_shows_as_failure=True, host_mounts=True, shared_workspace=True)
    assembly = MicrovmAssembly
    box = MicrovmBox

    def __init__(self, engine: str = "auto", boot: Path = Path("/boot"), modules: Path = Path("/lib/modules")) -> None:
        super().__init__(engine)
        self.kernel = microvm_boot.find_kernel(boot, modules)
        self.file_server = next(filter(os.path.isfile, FILE_SERVERS), None) or binaries.system("virtiofsd")

    @classmethod
    def program(cls, engine: str) -> str:
        return "qemu-system-x86_64"

    def find(self, engine: str) -> str | None:
        return super().find(engine) if self.kernel is not None and self.file_server is not None else None

    async def version(self, engine: Engine) -> str:
        kernel = self.kernel.image.name.removeprefix("vmlinuz-") if self.kernel is not None else ""
        return f"{await super().version(engine)} with Linux {kernel}"
