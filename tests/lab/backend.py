"""What the backend tests share: a sandbox with a driver for its agent, and a census of everything a sandbox could leave."""

import asyncio
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.backends.contract import BoxSpec, Image, Limits
from atoll.backends.local import LocalBackend
from atoll.backends.local.box import LocalBox
from atoll.backends.local.kernel.ids import FIRST
from atoll.backends.local.layers import Layers, Rootfs
from atoll.backends.local.paths import new_id
from atoll.guest.process import Exit, Process
from atoll.images.layers.tree import overlay_flavour
from atoll.images.sources.host import build_host_image
from lab.waiting import PATIENCE

SMALL = Limits(cpus=1.0, memory_mb=256, pids=128, files=1024, disk_mb=64)


chosen_runtime = ["container"]  # the last one is what sandboxes are made with; the fixture `runtime` sets it


@dataclass(frozen=True)
class Result:
    exit: Exit
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.exit.code == 0


class Sandbox:
    """A box and a client for its agent."""

    def __init__(self, backend: LocalBackend, box: LocalBox) -> None:
        self.backend = backend
        self.box = box
        self.client = box.client
        self._numbers = itertools.count(int(time.monotonic() * 1000))

    @property
    def id(self) -> str:
        return self.box.id

    async def run(self, *argv: str, **fields: Any) -> Result:
        """Run a command to its end."""
        async with asyncio.timeout(PATIENCE):
            process = await Process.start(self.client, f"t{next(self._numbers)}", {"argv": list(argv), **fields})
            streams = {1: bytearray(), 2: bytearray()}
            async for channel, data in process:
                streams[channel] += data
        assert process.exit is not None
        return Result(process.exit, streams[1].decode(errors="replace"), streams[2].decode(errors="replace"))

    async def sh(self, script: str, **fields: Any) -> Result:
        return await self.run("/bin/sh", "-c", script, **fields)

    async def python(self, code: str, **fields: Any) -> Result:
        return await self.run("/usr/bin/python3", "-c", code, **fields)

    async def destroy(self, *, keep_disk: bool = False) -> None:
        await self.client.close()
        await self.backend.destroy(self.box.record, keep_disk=keep_disk)


def host_rootfs(cache: Path) -> Rootfs:
    cache.mkdir(parents=True, exist_ok=True)
    image = build_host_image(cache, overlay_flavour(cache))
    return Rootfs(tuple(map(str, image.lowers)), tuple(map(str, image.usr_lowers)))


GIVEN: dict[str, Rootfs] = {}  # images that tests have put together from directories, by name


def image_of(rootfs: Rootfs) -> Image:
    """The reference of an image made of these directories, for `local_backend`."""
    name = f"given {rootfs}"
    GIVEN[name] = rootfs
    return Image(name)


def local_backend(home: Path, **options: Any) -> LocalBackend:
    """A backend that knows the images of `image_of` beside those of its store."""
    stored = Layers(home / "images")

    async def layers(image: Image) -> Rootfs:
        return GIVEN[image.name] if image.name in GIVEN else await stored(image)

    return LocalBackend(home, layers=layers, **options)


def spec_for(rootfs: Rootfs, **fields: Any) -> BoxSpec:
    given = {"id": new_id(), "image": image_of(rootfs), "limits": SMALL, "runtime": chosen_runtime[-1]}
    return BoxSpec(**{**given, **fields})


async def nothing_left(backend: LocalBackend) -> None:
    """Wait until the census is empty; says what is not."""
    deadline = time.monotonic() + PATIENCE
    while (found := census(backend)) != NOTHING:
        assert time.monotonic() < deadline, f"still there: {found}"
        await asyncio.sleep(0.01)


def namespaces(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("user", "net", "mnt", "pid", "ipc", "uts", "cgroup")}


def census(backend: LocalBackend) -> dict[str, list[str]]:
    """Everything on this machine that bears the mark of this backend's home."""
    home, mark = str(backend.paths.home), backend.paths.mark
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if home in line]
    loops = [
        str(backing)
        for backing in Path("/sys/block").glob("loop*/loop/backing_file")
        if " ".join(_words(backing)).startswith(home)
    ]
    directories = [str(path) for top in (backend.paths.runs, backend.paths.boxes) for path in top.iterdir()]
    directories += [str(path) for engine in backend.paths.engine.iterdir() for path in engine.iterdir()]
    return {
        "processes": _processes(mark),
        "mounts": mounts,
        "loops": loops,
        "directories": directories,
        "groups": sorted(backend.groups.names()),
        "ids": sorted(backend.ids.holders()),
        "children": _zombies(),
    }


NOTHING: dict[str, list[str]] = {
    "processes": [],
    "mounts": [],
    "loops": [],
    "directories": [],
    "groups": [],
    "ids": [],
    "children": [],
}


def _processes(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"/atoll/{mark}/" in (entry / "cgroup").read_text():
                    found.append(entry.name)
            except OSError:
                continue
    return found


inherited: set[str] = set()  # children from before the backend was made: orphans of whatever other tests ran


def children() -> set[str]:
    tasks = Path("/proc/self/task").glob("*/children")  # of which one may end meanwhile
    return {pid for path in tasks for pid in _words(path)}


def _zombies() -> list[str]:
    """Children of this process with ids of sandboxes, dead or alive."""
    found = []
    for pid in children() - inherited:
        try:
            if os.stat(f"/proc/{pid}").st_uid >= FIRST:
                found.append(Path(f"/proc/{pid}/stat").read_text())
        except OSError:
            continue
    return found


def holders_of(spaces: set[str]) -> list[str]:
    """What this process or a descendant of it is in, or holds open, of these namespaces. Others are not looked at: the
    kernel uses the numbers of namespaces again."""
    found, waiting = [], [os.getpid()]
    while waiting:
        entry = Path(f"/proc/{waiting.pop()}")
        for children in entry.glob("task/*/children"):
            waiting += [int(pid) for pid in _words(children)]
        for link in [*entry.glob("ns/*"), *entry.glob("fd/*")]:
            try:
                if os.readlink(link) in spaces:
                    found.append(str(link))
            except OSError:
                continue
    return found


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
