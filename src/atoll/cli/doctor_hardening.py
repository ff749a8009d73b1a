"""Checks of `atoll doctor` for leaks between sandboxes through memory and processor, and about versions with known holes.

None of it keeps atoll from working, so none of it fails the doctor: each is a note with the command that mends it.
"""

from __future__ import annotations

from .doctor_machine import Machine, check, version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .doctor_machine import Check

_CPU = "/sys/devices/system/cpu"
_MONITORS = (
    "firecracker",
    "libkrun",
)  # engines that other parts of atoll's world may bring; judged when they are there


def hardening_checks(machine: Machine) -> list[Check]:
    checks = [merging(machine), swap(machine), threads(machine), mitigations(machine)]
    return checks + [found for found in (kernel_floor(machine), *monitor_floors(machine)) if found]


def merging(machine: Machine) -> Check:
    """Check KSM: a write to a merged page is slower, which tells one sandbox that another has the same page."""
    running = machine.read("/sys/kernel/mm/ksm/run") == "1"
    detail = "equal memory of different sandboxes may be merged (KSM), and merging can be timed" if running else "off"
    fix = "echo 2 > /sys/kernel/mm/ksm/run" if machine.uid == 0 else "echo 2 | sudo tee /sys/kernel/mm/ksm/run"
    return check("memory merging", not running, detail, fix, optional=True)


def swap(machine: Machine) -> Check:
    """Check swap: a sandbox's memory may stay on a disk after its end, unless swap is encrypted or in memory."""
    plain = []
    for line in (machine.read("/proc/swaps") or "").splitlines()[1:]:
        name = line.split()[0] if line.split() else ""
        if name and not _keeps_secrets(machine, name):
            plain.append(name)
    detail = f"not encrypted: {', '.join(plain)}; memory of sandboxes without a memory limit may be written there"
    fix = machine.sudo("swapoff -a") + ", or put it on an encrypted device"
    return check("swap", not plain, detail if plain else "none, or encrypted", fix, optional=True)


def _keeps_secrets(machine: Machine, device: str) -> bool:
    name = device.rpartition("/")[2]
    if device.startswith("/dev/mapper/"):
        known = {machine.read(f"/sys/block/{block}/dm/name"): block for block in machine.names("/sys/block")}
        name = known.get(name, name)
    return name.startswith("zram") or (machine.read(f"/sys/block/{name}/dm/uuid") or "").startswith("CRYPT-")


def threads(machine: Machine) -> Check:
    active = machine.read(f"{_CPU}/smt/active") == "1"
    detail = "two sandboxes may run on the two threads of one core and watch each other (SMT)" if active else "off"
    fix = f"echo off > {_CPU}/smt/control" if machine.uid == 0 else f"echo off | sudo tee {_CPU}/smt/control"
    return check("core sharing", not active, detail, fix, optional=True)


def mitigations(machine: Machine) -> Check:
    """The kernel's own opinion of the processor."""
    words = (machine.read("/proc/cmdline") or "").split()
    name, place = "processor", f"{_CPU}/vulnerabilities"
    if "mitigations=off" in words:
        fix = "take mitigations=off out of the kernel's command line and boot again"
        return check(name, False, "mitigations of processor leaks are switched off", fix, optional=True)
    known = {item: machine.read(f"{place}/{item}") or "" for item in machine.names(place)}
    if not known:
        return check(name, False, "this kernel does not say which leaks of the processor it closes", optional=True)
    still = [item for item, said in known.items() if said.startswith("Vulnerable")]
    half = [item for item, said in known.items() if "SMT vulnerable" in said]
    parts = [f"open: {', '.join(still)}"] * bool(still) + [f"open while cores are shared: {', '.join(half)}"] * bool(
        half
    )
    fix = "install the processor's microcode (intel-microcode, amd64-microcode) and a current kernel"
    if half and not still:
        fix = f"{machine.sudo('sh -c')} 'echo off > {_CPU}/smt/control'"
    detail = "; ".join(parts) or "known leaks are closed or do not concern it"
    return check(name, not parts, detail, fix, optional=True)


def kernel_floor(machine: Machine) -> Check | None:
    return _floor("linux", machine.release)


def monitor_floors(machine: Machine) -> list[Check | None]:
    return [_floor(name, version(name)) for name in _MONITORS if machine.root == "/"]


def _floor(program: str, found: str) -> Check | None:
    from ..backends.local.runtimes.version_floor import judge

    below = judge(program, found)
    return check("version floor", False, below.warning, below.fix, optional=True) if below else None
