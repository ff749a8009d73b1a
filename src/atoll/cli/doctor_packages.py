"""Which package manager a machine has, what a package of Debian is called there, and the one command that installs several."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .doctor_machine import Machine

# Program, and how it is told to install without asking. The first that is there is used.
MANAGERS = {
    "apt-get": "apt-get install -y",
    "dnf": "dnf install -y",
    "zypper": "zypper --non-interactive install",
    "pacman": "pacman -S --noconfirm --needed",
    "apk": "apk add",
}
# Names that differ from Debian's. An empty one: that distribution has no such package.
NAMES = {
    "uidmap": {"dnf": "shadow-utils", "zypper": "shadow", "pacman": "shadow", "apk": "shadow-uidmap"},
    "runsc": {"dnf": "", "zypper": "", "pacman": "", "apk": ""},
    "qemu-system-x86": {"dnf": "qemu-system-x86-core", "pacman": "qemu-system-x86", "apk": "qemu-system-x86_64"},
}


def manager(machine: Machine) -> str:
    """Return the package manager of a machine; Debian's where none is known."""
    return next((name for name in MANAGERS if machine.program(name)), "apt-get")


def install(machine: Machine, packages: Sequence[str]) -> str:
    """Return the command that installs these packages, as this user has to type it; empty where there are none of them."""
    tool = manager(machine)
    named = dict.fromkeys(NAMES.get(package, {}).get(tool, package) for package in packages)
    wanted = " ".join(name for name in named if name)
    return machine.sudo(f"{MANAGERS[tool]} {wanted}") if wanted else ""
