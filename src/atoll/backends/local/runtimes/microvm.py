"""`microvm`: the sandbox has a kernel of its own, in a virtual machine by QEMU.

With KVM the processor is the machine's own. Without it QEMU can emulate one (TCG): that works everywhere, is slow, and is done only
when the operator asks for it (`[microvm] accel = "tcg"`). Who wants it names it: `auto` never takes it.
"""

import os
from pathlib import Path

from atoll.backends.contract import Capabilities
from atoll.backends.local import binaries
from atoll.backends.local.kernel.rootless import standing
from atoll.backends.local.runtimes import microvm_kernel
from atoll.backends.local.runtimes.base import Engine, Runtime
from atoll.backends.local.runtimes.microvm_assembly import BOOT_TIMEOUT, KVM_DEVICE, MicrovmAssembly, MicrovmBox
from atoll.backends.local.runtimes.microvm_image import BlockImages

KVM, TCG = "qemu-kvm", "qemu-tcg"
KVM_TIMEOUT = 20.0  # where KVM works a kernel boots in one
PROGRAMS = ("qemu-system-x86_64", "mkfs.erofs")


class Microvm(Runtime):
    """One virtual machine for each sandbox."""

    name = "microvm"
    engines = (KVM, TCG)
    fix = "install the packages qemu-system-x86 and erofs-utils, and a kernel: scripts/install-kernel.sh"
    package = "qemu-system-x86"
    automatic = False  # it mounts no directories of the host and shares no workspace
    capabilities = Capabilities(
        freezes_idle=True, oom_shows_as_failure=True, host_ports=True, spares=False, keeps_disk=False, policy="broker"
    )
    assembly = MicrovmAssembly
    box = MicrovmBox

    def __init__(self, engine: str = "auto", places: tuple[Path, ...] = microvm_kernel.PLACES) -> None:
        super().__init__(engine)
        self.kernel = microvm_kernel.find(places)
        self.images = BlockImages()

    def order(self, *, rootless: bool) -> tuple[str, ...]:
        return (KVM,) if self._chosen == "auto" else (self._chosen,)

    def keeps_failure(self, engine: str) -> bool:
        return engine == KVM

    def probe_limit(self, engine: str) -> float:
        return KVM_TIMEOUT if engine == KVM else BOOT_TIMEOUT

    @classmethod
    def program(cls, engine: str) -> str:
        return PROGRAMS[0]

    def find(self, engine: str) -> str | None:
        return None if self.lacking(engine) else super().find(engine)

    def lacking(self, engine: str) -> str:
        """Return the needed parts that are not there; empty when nothing is missing."""
        if standing().rootless:
            return "an ordinary user's daemon starts no virtual machines"
        if engine == KVM and not os.path.exists(KVM_DEVICE):
            return f'there is no {KVM_DEVICE}; with [microvm] accel = "tcg" the processor is emulated, which is slow'
        if missing := [name for name in PROGRAMS if binaries.system(name) is None]:
            return f"{' and '.join(missing)} not installed"
        return "" if self.kernel else "no kernel with the drivers it needs"

    async def version(self, engine: Engine) -> str:
        kernel = f" with Linux {self.kernel.version} (sha256 {self.kernel.hash[:16]})" if self.kernel else ""
        return f"{await super().version(engine)}{kernel}"
