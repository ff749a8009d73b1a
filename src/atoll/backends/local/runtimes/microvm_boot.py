"""Makes the one directory that a virtual machine is started from: QEMU, its libraries and firmware, the kernel and its first files.

It is all that QEMU sees of this machine. It is made once for each QEMU, kernel and agent, and replaced when one of them changes.
"""

import hashlib
import lzma
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from atoll.backends.local import binaries
from atoll.backends.local.runtimes.microvm_kernel import Kernel
from atoll.errors import Unsupported

KERNEL, START, FIRMWARE = "kernel", "start", "firmware"  # names in the directory
KEPT = 2  # directories of earlier QEMUs, kernels and agents: a sandbox of theirs may still run
_ROMS = ("bios-256k.bin", "kvmvapic.bin", "linuxboot_dma.bin")
_ROM_PLACES = ("/usr/share/seabios", "/usr/share/qemu", "/usr/share/qemu-kvm", "/usr/share/edk2")
_MODULES = ("accel-tcg-x86_64.so",)  # of a QEMU that is built in parts
_FILE, _DIRECTORY, _CONSOLE = 0o100755, 0o040755, 0o020600


def make_monitor(cache: Path, program: str, kernel: Kernel) -> Path:
    """Return the directory, made when it is not there."""
    parts = [f"{path}:{path.stat().st_mtime_ns}" for path in (Path(program), binaries.guest(), kernel.image)]
    parts += [str(path) for path in kernel.drivers]
    target = cache / f"monitor-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:32]}"
    if target.is_dir():
        os.utime(target)
        return target
    cache.mkdir(mode=0o711, parents=True, exist_ok=True)
    half = cache / f"half-{os.urandom(8).hex()}"
    try:
        _fill(half, program, kernel)
        half.rename(target)
    except FileExistsError:
        pass  # another one was faster
    finally:
        shutil.rmtree(half, ignore_errors=True)
    for old in sorted(cache.glob("monitor-*"), key=lambda path: path.stat().st_mtime, reverse=True)[1 + KEPT :]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _fill(top: Path, program: str, kernel: Kernel) -> None:
    for source in sorted({*needed_by(program), *_modules()}):
        _copy(source, top / source.lstrip("/"))
    for rom in _ROMS:
        place = next((place for place in _ROM_PLACES if os.path.isfile(f"{place}/{rom}")), None)
        if place is None:
            raise Unsupported(f"QEMU's firmware {rom} is not there", hint="install the package seabios")
        _copy(f"{place}/{rom}", top / FIRMWARE / rom)
    _copy(str(kernel.image), top / KERNEL)
    (top / START).write_bytes(make_archive(kernel))
    for directory, _, _ in os.walk(top):
        os.chmod(directory, 0o755)


def _modules() -> Iterator[str]:
    for place in ("/usr/lib/x86_64-linux-gnu/qemu", "/usr/lib64/qemu-kvm", "/usr/lib64/qemu", "/usr/lib/qemu"):
        for name in _MODULES:
            if os.path.isfile(module := f"{place}/{name}"):
                yield from needed_by(module)


def needed_by(program: str) -> list[str]:
    """Return the paths that a program is loaded from: itself, its libraries and their loader."""
    done = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise Unsupported(f"{program} cannot be loaded here: {done.stderr.strip()[:200]}")
    words = (word for line in done.stdout.splitlines() for word in line.split() if word.startswith("/"))
    return [program, *words]


def _copy(source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def make_archive(kernel: Kernel) -> bytes:
    """Return the archive that the kernel unpacks first: the agent and the drivers."""
    entries = [
        _entry(name, _DIRECTORY) for name in ("dev", "proc", "sys", "root", "image", "disk", "groups", "modules")
    ]
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
