"""What a stopped sandbox has changed in its image's files, read from its disk, as the tar of an image layer.

A disk image is mounted read-only in a mount namespace of the calling thread's own, which nobody else ever enters; no link
in it is followed and no program of it runs. An ordinary user's disk is a directory and is read as it is.
"""

import ctypes
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from atoll.errors import Internal, Unsupported
from atoll.tar_writer import TarWriter, TreePacker

# Made for every sandbox, or its own: not the image's.
_NOT_OF_IMAGES = ("proc", "dev", "sys", ".atoll", "workspace")
_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x4000, 0x40000, 2
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LO_READ_ONLY, _LO_AUTOCLEAR = 1, 4
_CONFIG = struct.Struct("=II 5Q 4I 64s 64s 32s 2Q 64s")  # struct loop_config of linux/loop.h
_ATTEMPTS = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


def write_changes(disk: Path, base: int, stage: str, out: BinaryIO) -> None:
    """Write the layer. Call it in a thread of its own: the thread's mounts are no longer the process's afterwards."""
    with _opened(disk, stage) as root:
        writer = TarWriter(out)
        packer = TreePacker(writer, base=base, leave_out=_NOT_OF_IMAGES)
        uppers = [name for name in ("upper-root", "upper-usr") if name in os.listdir(root)]
        if "upper-root" not in uppers:
            raise Unsupported(
                "this runtime keeps a sandbox's files in a form that makes no layer", hint="use --runtime container"
            )
        for name in uppers:
            upper = os.open(name, _DIRECTORY, dir_fd=root)
            try:
                packer.add(upper, "usr" if name == "upper-usr" else "")
            finally:
                os.close(upper)
        writer.close()


@contextmanager
def _opened(disk: Path, stage: str) -> Iterator[int]:
    if disk.is_dir():
        root = os.open(disk, _DIRECTORY)
        try:
            yield root
        finally:
            os.close(root)
        return
    _check(_libc.unshare(_CLONE_NEWNS), "a mount namespace")
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("atoll", stage, "tmpfs", _MS_NOSUID | _MS_NOEXEC, "mode=0700,size=1m")
    try:
        place = os.path.join(stage, "disk")
        os.mkdir(place, 0o700)
        node, device = _attach(disk, stage)
        try:
            _mount(node, place, "ext4", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        finally:
            os.close(device)  # from here the mount keeps it
        try:
            root = os.open(place, _DIRECTORY)
            try:
                yield root
            finally:
                os.close(root)
        finally:
            _libc.umount2(os.fsencode(place), _MNT_DETACH)
    finally:
        _libc.umount2(os.fsencode(stage), _MNT_DETACH)


def _attach(disk: Path, stage: str) -> tuple[str, int]:
    """Return the node of a loop device over the disk, and a descriptor that keeps it until it is mounted."""
    image = os.open(disk, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_ATTEMPTS):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            node = os.path.join(stage, f"loop{number}")
            with suppress(FileExistsError):
                os.mknod(node, stat.S_IFBLK | 0o600, os.makedev(7, number))
            device = os.open(node, os.O_RDONLY | os.O_CLOEXEC)
            flags = _LO_READ_ONLY | _LO_AUTOCLEAR
            config = _CONFIG.pack(image, 0, *(0,) * 5, 0, 0, 0, flags, b"", b"", b"", 0, 0, b"")
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, config)
            except OSError:  # somebody took that number first
                os.close(device)
                continue
            return node, device
        raise Internal("no free loop device")
    finally:
        os.close(control)
        os.close(image)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    done = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        flags,
        options.encode() or None,
    )
    _check(done, f"{kind or 'private mounts'} on {target}")


def _check(done: int, what: str) -> None:
    if done != 0:
        raise Internal(f"cannot make {what}: {os.strerror(ctypes.get_errno())}")
