"""Files a virtual machine is started from: a kernel of the distribution, and a small archive with the agent and its drivers."""

import hashlib
import lzma
import os
from dataclasses import dataclass
from pathlib import Path

from atoll.backends.local import binaries

# In the order in which they need each other. What a kernel has built in is not there, and not missed.
_DRIVERS = (
    "virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", "virtio_console",
    "fuse", "virtiofs", "qemu_fw_cfg",
)  # fmt: skip
_FILE, _DIRECTORY, _CONSOLE = 0o100755, 0o040755, 0o020600


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel and its drivers."""

    image: Path
    drivers: tuple[Path, ...]


def find_kernel(boot: Path, modules: Path) -> Kernel | None:
    """The newest kernel with all that a sandbox needs; None when there is none."""
    for image in sorted(boot.glob("vmlinuz-*"), key=lambda path: path.stat().st_mtime, reverse=True):
        top = modules / image.name.removeprefix("vmlinuz-") / "kernel"
        found = {path.name.partition(".")[0]: path for path in top.rglob("*.ko*")}
        if "virtiofs" in found:
            return Kernel(image, tuple(found[name] for name in _DRIVERS if name in found))
    return None


def make_archive(cache: Path, kernel: Kernel) -> Path:
    """The archive that the kernel unpacks first; made once for each agent and kernel."""
    parts = [f"{path}:{path.stat().st_mtime_ns}" for path in (binaries.guest(), kernel.image, *kernel.drivers)]
    target = cache / f"start-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:32]}"
    if target.is_file():
        return target
    cache.mkdir(mode=0o711, parents=True, exist_ok=True)
    half = cache / f"half-{os.urandom(8).hex()}"
    half.write_bytes(_archive(kernel))
    half.chmod(0o644)
    half.rename(target)
    return target


def _archive(kernel: Kernel) -> bytes:
    entries = [_entry(name, _DIRECTORY) for name in ("dev", "proc", "sys", "root", "modules")]
    entries += [_entry("dev/console", _CONSOLE, device=(5, 1)), _entry("init", _FILE, binaries.guest().read_bytes())]
    names = []
    for path in kernel.drivers:
        data = path.read_bytes()
        names.append(path.name.partition(".")[0])
        entries.append(_entry(f"modules/{names[-1]}", _FILE, lzma.decompress(data) if path.suffix == ".xz" else data))
    entries.append(_entry("modules/order", _FILE, "\n".join(names).encode()))
    return b"".join([*entries, _entry("TRAILER!!!", 0)])


def _entry(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    """One member of a cpio archive in the format `newc`."""
    label = name.encode() + b"\0"
    numbers = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(label), 0)
    head = b"070701" + b"".join(b"%08x" % number for number in numbers) + label
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
