"""What the tests of virtual machines share: the runtime with an emulated processor, and an image that is quickly read by one."""

import os
import shutil
from pathlib import Path

from atoll.backends.local.layers import Rootfs
from atoll.backends.local.runtimes.microvm import TCG, Microvm
from atoll.backends.local.runtimes.microvm_boot import needed_by

_PROGRAMS = ("sh", "cat", "echo", "true", "sleep", "ls", "id", "rm", "dd", "kill", "head", "python3")
_LEFT_OUT = shutil.ignore_patterns(
    "test", "idlelib", "lib2to3", "ensurepip", "pydoc_data", "config-*", "tkinter", "distutils"
)


def emulated() -> Microvm:
    """The runtime as an operator with `accel = "tcg"` has it."""
    return Microvm(TCG)


def small_rootfs(top: Path) -> Rootfs:
    """An image with a shell, a few programs and Python, taken from this machine."""
    python = Path(os.path.realpath("/usr/bin/python3")).name
    programs = {name: os.path.realpath(f"/usr/bin/{name}") for name in _PROGRAMS}
    ctypes = next(Path(f"/usr/lib/{python}/lib-dynload").glob("_ctypes.*.so"))
    for source in {one for program in (*programs.values(), str(ctypes)) for one in needed_by(program)} - {str(ctypes)}:
        (target := top / source.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    for name, program in programs.items():
        if not (wanted := top / "usr" / "bin" / name).exists():
            wanted.symlink_to(program)
    shutil.copytree(f"/usr/lib/{python}", top / "usr" / "lib" / python, ignore=_LEFT_OUT, symlinks=True)
    if not (top / "bin").exists():
        (top / "bin").symlink_to("usr/bin")
    for name in ("root", "etc"):
        (top / name).mkdir(exist_ok=True)
    (top / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return Rootfs((str(top),))


def share_made(home: Path, directory: Path) -> None:
    """Have what is made once for an image, or for QEMU, made once for all homes of a run."""
    (common := directory / "microvm").mkdir(exist_ok=True)
    common.chmod(0o711)
    (home / "images").mkdir(mode=0o711, exist_ok=True)
    if not (link := home / "images" / "microvm").is_symlink():
        link.symlink_to(common)
