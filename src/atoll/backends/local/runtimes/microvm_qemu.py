"""The command line of QEMU: a machine of virtio devices alone, and nothing that a sandbox does not need."""

import math
from dataclasses import dataclass

from atoll.backends.contract import BoxSpec
from atoll.backends.local import bundle
from atoll.backends.local.kernel.cgroups import SPARE_PIDS
from atoll.backends.local.runtimes.microvm_boot import FIRMWARE, KERNEL, START
from atoll.egress.router.router import LinkFields

KERNEL_MB = 96  # of the machine's own kernel
AGENT_DIALS = "/dev/atoll-agent"  # inside the machine (`guest/src/vm.rs`)
# In the directory that is all QEMU sees.
BOOT, IMAGE, DISK = "/.atoll/boot", "/.atoll/image", "/.atoll/disk"
TAP_FD = 3
_CAPABILITIES = {
    "CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4, "CAP_KILL": 5, "CAP_SETGID": 6,
    "CAP_SETUID": 7, "CAP_NET_BIND_SERVICE": 10,
}  # fmt: skip
_MACHINE = "q35,vmport=off,smm=off,usb=off,sata=off,smbus=off,hpet=off,graphics=off"
_PROCESSORS = {"kvm": "host", "tcg": "max"}


@dataclass(frozen=True, slots=True)
class Machine:
    """What one virtual machine is made of."""

    program: str
    accel: str  # kvm or tcg
    spec: BoxSpec
    socket: str  # on which the daemon listens for the agent
    link: LinkFields | None  # its network; None is no interface at all

    def argv(self) -> list[str]:
        """The command that starts it."""
        return [
            *(self.program, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none"),
            *("-machine", _MACHINE, "-accel", self.accel, "-cpu", _PROCESSORS[self.accel]),
            *("-m", f"{self.spec.limits.memory_mb + KERNEL_MB}M", "-smp", str(math.ceil(self.spec.limits.cpus))),
            *("-L", f"/{FIRMWARE}", "-kernel", f"/{KERNEL}", "-initrd", f"/{START}", "-append", self._kernel_line()),
            *("-fw_cfg", f"name=opt/atoll/boot,file={BOOT}"),
            *_disk("image", IMAGE, "read-only=on"),
            *_disk("disk", DISK, "discard=unmap"),
            *("-chardev", f"socket,id=agent,path={self.socket},reconnect=1"),
            *("-device", "virtio-serial-pci,disable-legacy=on,max_ports=2"),
            *("-device", "virtserialport,chardev=agent,name=atoll"),
            *self._network(),
            *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        ]

    def _network(self) -> list[str]:
        if self.link is None:
            return []
        device = "virtio-net-pci,disable-legacy=on,netdev=net,romfile="
        return ["-netdev", f"tap,id=net,fd={TAP_FD},vhost=off", "-device", device]

    def _kernel_line(self) -> str:
        spec = self.spec
        kept = 0 if spec.no_capabilities else sum(1 << _CAPABILITIES[name] for name in bundle.CAPABILITIES)
        words = [
            *("quiet loglevel=1 panic=-1 mitigations=off rdinit=/init", f"atoll.shm={spec.limits.shm_mb}"),
            *(f"atoll.hostname={spec.hostname}", f"atoll.pids={spec.limits.pids + SPARE_PIDS}", f"atoll.caps={kept:x}"),
        ]
        if spec.read_only_root:
            words.append("atoll.readonly=1")
        if self.link is not None:
            words.append(f"atoll.net={self.link['address']}/{self.link['prefix']},{self.link['gateway']}")
        return " ".join([*words, "-- vm"])


def _disk(name: str, path: str, how: str) -> list[str]:
    """A disk, found by its name inside. A full host is an I/O error there; the machine goes on."""
    errors = "" if "read-only" in how else ",werror=report,rerror=report,discard=on"
    return [
        *("-blockdev", f"driver=file,node-name={name},filename={path},locking=off,{how}"),
        *("-device", f"virtio-blk-pci,disable-legacy=on,drive={name},serial={name}{errors}"),
    ]
