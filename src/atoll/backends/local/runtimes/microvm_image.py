"""An image as one read-only, compressed block device (EROFS), made once and kept.

It is made by mkfs.erofs without privileges: in namespaces and with user ids of its own, below a control group, from a read-only view of
the image's layers, into one file that may not outgrow its bound. Of a full disk, or a failure, nothing is kept. A device in use may be
removed at any time: the machine that uses it holds the file.
"""

import asyncio
import hashlib
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.backends.contract import Limits
from atoll.backends.local import binaries, bundle
from atoll.backends.local.kernel import children
from atoll.backends.local.kernel.children import Status
from atoll.backends.local.kernel.disks import RESERVE
from atoll.backends.local.launch import Launcher, Order, Overlay, boot_log
from atoll.backends.local.layers import Rootfs
from atoll.backends.local.paths import new_id
from atoll.errors import DiskFull, Internal, Unsupported

if TYPE_CHECKING:
    from atoll.backends.local.backend import LocalBackend

PROGRAM = "mkfs.erofs"
FIX = "install the package erofs-utils"
MOST_MB = 16_384  # of one image
KEPT = 8  # the ones used last
PACK_TIMEOUT = 1800.0
_LIMITS = Limits(cpus=2.0, memory_mb=1024, pids=64)
_OUT = ".atoll/out"  # in the tree that is packed, and left out of it
_WATCH = 0.25
# What changes when packages of this machine do. A file that is changed by hand deep below /usr is seen after the next package.
_MACHINE = ("/var/lib/dpkg/status", "/usr", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/local/bin", "/usr/local/lib")


class BlockImages:
    """The block devices of one home."""

    def __init__(self) -> None:
        self._making: dict[str, asyncio.Lock] = {}

    async def get(self, backend: "LocalBackend", rootfs: Rootfs) -> Path:
        """Return the block device of an image, made when it is not there."""
        cache = backend.paths.home / "images" / "microvm"
        target = cache / f"{_key(rootfs)}.erofs"
        async with self._making.setdefault(target.name, asyncio.Lock()):
            if not target.exists():
                cache.mkdir(mode=0o711, parents=True, exist_ok=True)
                await _make(backend, rootfs, target)
                _forget_oldest(cache)
            os.utime(target)
        return target


def _key(rootfs: Rootfs) -> str:
    """The layers and when they were last changed; a stored layer's name is the digest of its content."""
    parts = [str(rootfs)]
    for path in (*rootfs.lowers, *rootfs.usr, *(_MACHINE if rootfs.usr else ())):
        with suppress(OSError):
            parts.append(f"{path}:{os.stat(path).st_mtime_ns}")
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


def _forget_oldest(cache: Path) -> None:
    for old in sorted(cache.glob("*.erofs"), key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
        old.unlink(missing_ok=True)


async def _make(backend: "LocalBackend", rootfs: Rootfs, target: Path) -> None:
    program = binaries.system(PROGRAM)
    if program is None:
        raise Unsupported(f"{PROGRAM} is not there", hint=FIX)
    box = new_id()  # what is left of one that is killed is found and swept as a sandbox's
    half, log = target.with_suffix(f".{box}"), target.with_suffix(f".{box}.log")
    group = backend.groups.create(box)
    try:
        await _pack(backend, rootfs, box, program, half, log)
        half.chmod(0o644)
        half.rename(target)
    finally:
        for left in (half, log):
            left.unlink(missing_ok=True)
        await group.kill()
        await group.remove()
        backend.ids.release(box, None)


async def _pack(backend: "LocalBackend", rootfs: Rootfs, box: str, program: str, half: Path, log: Path) -> None:
    group, base = backend.groups.open(box), backend.ids.take(box)
    group.apply(_LIMITS)
    launcher = await Launcher.prepare(base, backend.id_count)
    try:
        bound = MOST_MB << 20
        resource.prlimit(launcher.pid, resource.RLIMIT_FSIZE, (bound, bound))
        new = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        out, said, given = os.open(half, new, 0o600), os.open(log, new | os.O_APPEND, 0o600), os.memfd_create("pid")
        stage = backend.paths.stage()
        overlays: list[Overlay] = [{"target": "", "lowers": list(rootfs.lowers), "name": "root"}]
        if rootfs.usr:
            overlays.append({"target": "usr", "lowers": list(rootfs.usr), "name": "usr"})
        order: Order = {
            "stage": stage,
            "disk": {"tmpfs": 1 << 20},
            "shift": True,
            "overlays": overlays,
            "binds": [{"source": {"fd": 3}, "target": _OUT, "read_only": False, "idmap": True}],
            "mountpoints": [*bundle.MOUNTPOINTS, "workspace", "tmp"],
            "read_only_root": False,
            "groups": group.doors(),
            "inside": "",
            "argv": [
                program,
                "-d0",
                "-zlz4",
                "-x-1",
                f"--exclude-path={_OUT}",
                f"{stage}/root/{_OUT}",
                f"{stage}/root",
            ],
            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
        }
        try:
            packing = asyncio.create_task(launcher.start(order, [given, said, given, out], PACK_TIMEOUT))
            status = await _watched(packing, half)
        finally:
            for fd in (out, said, given):
                os.close(fd)
    finally:
        await launcher.close()
        await children.reap_orphans(children.in_session(launcher.pid))  # its keeper
    if status.code != 0:
        _check_room(half)
        raise Internal(f"the image could not be made a block device: {boot_log(log) or status}")


async def _watched(packing: asyncio.Task[Status], half: Path) -> Status:
    """The task's result; ended as soon as the disk is nearly full."""
    try:
        while True:
            done, _ = await asyncio.wait([packing], timeout=_WATCH)
            if done:
                return packing.result()
            _check_room(half)
    finally:
        packing.cancel()
        await asyncio.wait([packing])


def _check_room(half: Path) -> None:
    stat = os.statvfs(half.parent)
    if stat.f_bavail * stat.f_frsize < RESERVE:
        raise DiskFull(
            "the host has no room for the image's block device",
            hint="free space below ATOLL_HOME, or take a smaller image",
        )
    if half.stat().st_size >= MOST_MB << 20:
        raise DiskFull(f"the image is larger than {MOST_MB} MB", hint="take a smaller image")
