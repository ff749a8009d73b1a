"""Saves the memory of a sandbox together with its disk, as one moment.

A runtime says how its sandbox is held still and how its state is written (`LocalBox.still`, `write_state`); the order is here.
"""

import asyncio
import ctypes
import errno
import os
import stat
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, NotRequired, TypedDict, cast

from atoll.backends.contract import Memory, Record
from atoll.backends.local.kernel import disks
from atoll.backends.local.memory import files, fit, seal
from atoll.errors import DiskFull, Internal

if TYPE_CHECKING:
    from atoll.backends.local.box import LocalBox

_libc = ctypes.CDLL(None, use_errno=True)


class Secrets(TypedDict):
    """By which an agent and the daemon know each other."""

    agent_secret: str
    host_secret: str


def new_secrets() -> Secrets:
    return {"agent_secret": token_hex(16), "host_secret": token_hex(16)}


class MemoryRecord(TypedDict):
    """What the store keeps of a saved memory."""

    name: str
    runtime: str
    fit: dict[str, str]
    base: int  # the ids of the files on its disk
    agent_secret: str  # of the save alone
    host_secret: str
    networked: bool
    sealed: bool
    disk: bool  # whether the disk is with it; else it is the sandbox's own
    of: NotRequired[str]  # that sandbox


def ours(memory: Memory) -> MemoryRecord:
    """Return the record of a saved memory of this backend's, which alone knows what is in it."""
    return cast("MemoryRecord", memory.record)


async def save(box: "LocalBox", memories: files.Memories, name: str, key: bytes, *, end: bool) -> Record:
    """Save a running sandbox under this name and answer the record. On failure nothing is kept and the sandbox goes on."""
    work = asyncio.get_running_loop().create_task(_save(box, memories, name, key, end=end))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])  # what was begun is ended: the sandbox must not be left still
        if not work.cancelled() and work.exception() is None:
            await asyncio.to_thread(memories.forget, name)
        raise


async def _save(box: "LocalBox", memories: files.Memories, name: str, key: bytes, *, end: bool) -> Record:
    half = await asyncio.to_thread(memories.begin, name)
    try:
        secrets = await _of_one_moment(box, half, end=end)
        if key:
            await asyncio.to_thread(_seal, half, key, name)
        await asyncio.to_thread(memories.finish, half)
    except OSError as error:
        await asyncio.to_thread(memories.forget, name)
        if error.errno == 28:
            raise DiskFull("the host has no room for this memory", hint="free space below ATOLL_HOME") from error
        raise Internal(f"the memory could not be saved: {error}") from error
    except BaseException:
        await asyncio.to_thread(memories.forget, name)
        raise
    record = box.record
    here = await asyncio.to_thread(fit.of_engine, record["engine"], record["program"])
    made: MemoryRecord = {
        "name": name,
        "runtime": record["runtime"],
        "fit": {**record["fit"], **here},
        "base": record.get("disk_base", record["base"]),
        "agent_secret": secrets["agent_secret"],
        "host_secret": secrets["host_secret"],
        "networked": record["networked"],
        "sealed": bool(key),
        "disk": not end,
    }
    if end:
        made["of"] = box.id
    return cast("Record", made)


async def _of_one_moment(box: "LocalBox", half: Path, *, end: bool) -> Secrets:
    async with box.hushed() as secrets, box.still():
        await box.write_state(half / files.STATE)
        await asyncio.to_thread(sync_disk, box)
        if end:
            await box.kill()
        else:
            await asyncio.to_thread(disks.copy_sparse, box.disk_image, half / files.DISK)
    await asyncio.to_thread(_keep_for_root, half / files.STATE)
    return secrets


def _keep_for_root(directory: Path) -> None:
    for path in (directory, *directory.iterdir()):
        if path != directory and not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.EPERM, f"the engine left something that is no plain file: {path.name}")
        os.chown(path, 0, 0, follow_symlinks=False)
        path.chmod(0o700 if path == directory else 0o600)


def contents(directory: Path, disk: Path | None = None) -> dict[str, Path]:
    """The places of a saved memory's files by the names they have in the sealed one: the runtime's below `directory`."""
    names = ("checkpoint.img", "pages_meta.img", "pages.img", "memory", "device")
    places = {f"{files.STATE}/{name}": directory / name for name in names}
    return places if disk is None else {**places, files.DISK: disk}


def _seal(half: Path, key: bytes, name: str) -> None:
    plain = {known: path for known, path in contents(half / files.STATE, half / files.DISK).items() if path.exists()}
    seal.seal(plain, half / files.SEALED, key, name)
    for path in plain.values():
        path.unlink()
    (half / files.STATE).rmdir()


def sync_disk(box: "LocalBox") -> None:
    """Write everything of the sandbox's file system to its image. Nothing of it runs meanwhile."""
    fd = os.open(box.disk_root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)
