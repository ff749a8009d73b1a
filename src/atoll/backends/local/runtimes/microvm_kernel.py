"""The kernel of virtual machines: one of the distribution, with the drivers it needs, found or unpacked from its package."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# In the order in which they need each other. What a kernel has built in is not there, and not missed.
DRIVERS = (
    "virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", "virtio_blk", "virtio_console",
    "failover", "net_failover", "virtio_net", "qemu_fw_cfg", "libcrc32c", "netfs", "erofs", "overlay",
)  # fmt: skip
NEEDED = frozenset(["virtio_blk", "virtio_console", "virtio_net", "erofs", "overlay"])
# Where `scripts/install-kernel.sh` unpacks the distribution's package; after it, a kernel that the machine itself may start.
PLACES = (Path("/usr/local/lib/atoll/kernel"), Path("/"))


@dataclass(frozen=True)
class Kernel:
    """A kernel and its drivers."""

    image: Path
    drivers: tuple[Path, ...]

    @property
    def version(self) -> str:
        return self.image.name.removeprefix("vmlinuz-")

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of its image."""
        return hashlib.sha256(self.image.read_bytes()).hexdigest()


def find(places: tuple[Path, ...] = PLACES) -> Kernel | None:
    """Return the newest kernel of the first place that has one with all that a sandbox needs; None when there is none."""
    for place in places:
        images = sorted((place / "boot").glob("vmlinuz-*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for image in images:
            top = place / "lib" / "modules" / image.name.removeprefix("vmlinuz-")
            found = {path.name.partition(".")[0]: path for path in (top / "kernel").rglob("*.ko*")}
            if found.keys() | _built_in(top) >= NEEDED:
                return Kernel(image, tuple(found[name] for name in DRIVERS if name in found))
    return None


def _built_in(top: Path) -> set[str]:
    try:
        return {Path(line).name.partition(".")[0] for line in (top / "modules.builtin").read_text().splitlines()}
    except OSError:
        return set()
