"""A sandbox's disk: a sparse file with an ext4 file system of the wanted size.

A file system of its own bounds bytes and inodes alike, and gives the writer ENOSPC. Making one takes long, copying
the few blocks of an empty one does not: one template per size is made and copied. There is no journal: the disk does
not outlive its sandbox's usefulness after a power cut.
"""

import asyncio
import os
from pathlib import Path

from atoll.backends.local import binaries
from atoll.errors import DiskFull, Internal, InvalidArgument, Unsupported

MIN_MB = 16
MAX_MB = 1 << 24  # 16 TiB, where ext4 of this shape ends
BLOCK = 4096
RESERVE = 256 << 20  # the host keeps this much: a full host under a sparse file would be an I/O error inside
_FEATURES = "^has_journal,^resize_inode,extent,flex_bg,sparse_super2,^metadata_csum"


class Disks:
    """Makes and removes disk images below one directory of templates."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._making: dict[int, asyncio.Lock] = {}

    async def create(self, path: Path, size_mb: int) -> None:
        """A fresh, empty disk at `path`."""
        check_size(size_mb)
        self.check_free(size_mb)
        template = await self._template(size_mb)
        try:
            copy_sparse(template, path)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise DiskFull(f"cannot make a disk: {error.strerror}") from error

    def check_free(self, size_mb: int) -> None:
        stat = os.statvfs(self._directory)
        free = stat.f_bavail * stat.f_frsize
        if free < (size_mb << 20) + RESERVE:
            raise DiskFull(
                f"the host has {free >> 20} MB free, a disk of {size_mb} MB needs {size_mb + (RESERVE >> 20)}",
                hint="free space below ATOLL_HOME, or ask for a smaller --disk",
            )

    async def _template(self, size_mb: int) -> Path:
        path = self._directory / f"blank-{size_mb}.img"
        async with self._making.setdefault(size_mb, asyncio.Lock()):
            if not path.exists():
                await self._make(path, size_mb)
        return path

    async def _make(self, path: Path, size_mb: int) -> None:
        program = binaries.system("mkfs.ext4")
        if program is None:
            raise Unsupported("mkfs.ext4 is not there", hint="install the package e2fsprogs")
        half = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            _blank(half, size_mb)
            made = await asyncio.create_subprocess_exec(
                *(program, "-q", "-F", "-m", "0", "-O", _FEATURES, "-E", "nodiscard,lazy_itable_init=1", str(half)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            _, stderr = await made.communicate()
            if made.returncode != 0:
                raise Internal(f"mkfs.ext4 failed: {stderr.decode(errors='replace').strip()[-500:]}")
            thin = half.with_name(f"{half.name}.thin")
            copy_sparse(half, thin, zeros=False)
            os.rename(thin, path)
        finally:
            for left in (half, half.with_name(f"{half.name}.thin")):
                left.unlink(missing_ok=True)


def check_size(size_mb: int) -> None:
    if not MIN_MB <= size_mb <= MAX_MB:
        raise InvalidArgument(f"a disk has {MIN_MB} to {MAX_MB} MB, not {size_mb}")


def check_memory(size_mb: int, meminfo: str = "/proc/meminfo") -> None:
    """For a disk in memory, which is no limit if there is less memory than that."""
    check_size(size_mb)
    with open(meminfo, encoding="ascii") as file:
        free = next((int(line.split()[1]) >> 10 for line in file if line.startswith("MemAvailable:")), 0)
    if free < size_mb:
        raise DiskFull(
            f"{free} MB of memory are free, and an ordinary user's disk of {size_mb} MB is in memory",
            hint="ask for a smaller --disk, or for none: files are then in a directory without a limit",
        )


def _blank(path: Path, size_mb: int) -> None:
    with open(path, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        os.truncate(file.fileno(), size_mb << 20)


def copy_sparse(source: Path, target: Path, *, zeros: bool = True) -> None:
    """Copy what is really there; holes stay holes. Without `zeros`, blocks of nothing but zeros become holes: the tables of an
    empty file system are 64 MB of those for 4 GB, and every sandbox would carry them."""
    here = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(here).st_size
            os.truncate(there, size)
            offset = 0
            while offset < size:
                try:
                    start = os.lseek(here, offset, os.SEEK_DATA)
                except OSError:  # ENXIO: only a hole is left
                    break
                offset = os.lseek(here, start, os.SEEK_HOLE)
                _copy_range(here, there, start, offset, zeros)
        finally:
            os.close(there)
    finally:
        os.close(here)


def _copy_range(here: int, there: int, start: int, end: int, zeros: bool) -> None:
    size = 1 << 20 if zeros else BLOCK
    while start < end:
        piece = os.pread(here, min(end - start, size), start)
        if not piece:
            return
        if zeros or piece.strip(b"\0"):
            start += os.pwrite(there, piece, start)
        else:
            start += len(piece)


def attached(image: Path, device: int | None = None) -> list[str]:
    """Loop devices that serve this file; also after it was unlinked. Where its device is known, only that one is looked at."""
    found = []
    # The kernel says where the file really is, whatever links the home is reached by; where the home is on a file system
    # of its own only from that one's root on, because the device was opened in a mount namespace we are not in.
    name = os.path.realpath(image)
    for entry in Path("/sys/block").glob("loop*" if device is None else f"loop{device}"):
        try:
            backing = (entry / "loop" / "backing_file").read_text().rstrip("\n")
        except OSError:
            continue
        if backing and name.endswith(backing.removesuffix(" (deleted)")):
            found.append(entry.name)
    return found
