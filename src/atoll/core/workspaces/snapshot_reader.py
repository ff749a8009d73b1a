"""Reading the files of a sandbox for a snapshot. All that the agent says is checked: it may be anybody by now.

Large files are read one by one, small ones many at a time as a tar: a round trip for each would cost more than its content.
"""

import asyncio
import io
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from atoll import errors
from atoll import tar_reader as tar
from atoll.core.workspaces.chunks import CHUNK_BYTES, ChunkStore
from atoll.core.workspaces.index import DIRECTORY, FILE, GONE, HARDLINK, SYMLINK, Entry
from atoll.guest import Download, GuestClient
from atoll.guest.wire import Message

AT_ONCE = 8  # files read at a time
PIECES = 8  # chunks on their way to the store
THREADS = 3  # that hash and write them
SMALL = 256 << 10
BATCH_FILES, BATCH_BYTES, BATCH_NAMES = 500, 8 << 20, 256 << 10
MAX_FILES = 1_000_000
MAX_BYTES = 64 << 30
RACY = 0.1  # a change this close to the listing may share its timestamps with one after it
SLACK = 2.0
LIST_TIMEOUT = 3600.0
SHOWN_SKIPPED = 100
ELSEWHERE = frozenset((b"proc", b"sys", b"dev", b"run", b"tmp", b".atoll"))  # never part of a file system's content


class Stamp(NamedTuple):
    """The properties that change when a file does."""

    ino: int
    size: int
    mtime: float
    ctime: float


class Known(NamedTuple):
    stamp: Stamp
    size: int
    chunks: tuple[str, ...]


Seen = dict[bytes, Known]
Twin = Callable[[], AbstractAsyncContextManager[GuestClient]]
Work = tuple[int, bytes, Stamp]  # where the entry is, its path, and how it was listed


class Capture:
    """One save: `entries` for the snapshot, `seen` for the next save of the same sandbox."""

    def __init__(self, client: GuestClient, chunks: ChunkStore, seen: Seen) -> None:
        self.entries: list[Entry] = []
        self.seen: Seen = {}
        self.stored = 0
        self.skipped: list[str] = []
        self._client = client
        self._chunks = chunks
        self._before = seen
        self._pieces = asyncio.Semaphore(PIECES)
        self._bytes = 0

    async def workspace(self) -> None:
        started = time.time()
        found = await self._list(b"/workspace")
        await self._take(b"/workspace", found, started)

    async def system(self, created: float, mounts: list[str], twin: Twin) -> None:
        """Everything that was changed since the sandbox was made. `twin` opens a fresh sandbox of the same image, which is
        asked what was there: what is not there any more was deleted."""
        top = await self._list(b"/", recursive=False)
        outside = [target.encode("utf-8", "surrogateescape").strip(b"/") for target in mounts]
        found: list[Message] = []
        for item in top:
            path = _relative(item, b"/")
            if path in ELSEWHERE or _below(path, outside):
                continue
            if item.get("type") == "directory":
                since = None if path == b"workspace" else created - SLACK
                found += [item, *await self._list(b"/" + path, changed_since=since)]
            elif _time(item, "ctime") >= created - SLACK:
                found.append(item)
        found = [item for item in found if not _below(_relative(item, b"/"), outside)]
        await self._take(b"/", found, time.time())
        changed = [_relative(item, b"/") for item in found if item.get("type") == "directory"]
        changed = [path for path in changed if not _below(path, [b"workspace"])]
        try:
            async with twin() as fresh:
                await self._deleted(fresh, [b"", *sorted(changed)], outside)
        except (errors.Exhausted, errors.RateLimited, errors.NotFound, errors.Unsupported, errors.ImageError) as why:
            self.skipped.append(f"(what was deleted outside /workspace is not known: {why.message})"[:300])

    async def _deleted(self, fresh: GuestClient, changed: list[bytes], outside: list[bytes]) -> None:
        """A deletion changes the directory it was in, so only those are compared; what is new has no match and costs nothing."""
        had: dict[bytes, dict[bytes, Any]] = {}
        for path in changed:
            parent, _, name = path.rpartition(b"/")
            if path and parent in had and had[parent].get(name) != "directory":
                continue  # it is new
            try:
                had[path] = await _names(fresh, path)
                has = await _names(self._client, path)
            except (errors.NotFound, errors.FileError):
                continue
            for name, kind in had[path].items():
                gone = b"/".join(filter(None, (path, name)))
                if has.get(name) == kind or gone in ELSEWHERE or gone == b"workspace" or _below(gone, outside):
                    continue
                if name not in has or "directory" in (kind, has[name]):  # a file over a file is just another file
                    self.entries.append(Entry(gone, GONE, 0, 0, 0, 0.0, 0))
                if len(self.entries) > MAX_FILES:
                    raise errors.TooLarge(f"a snapshot holds at most {MAX_FILES} files")

    async def _list(self, root: bytes, **options: Any) -> list[Message]:
        fields = {"recursive": True, "limit": MAX_FILES + 1, **options}
        result, events = await self._client.collect("list", timeout=LIST_TIMEOUT, path=as_path(root), **fields)
        if result.get("truncated") is not False:
            raise errors.Exhausted(f"a snapshot holds at most {MAX_FILES} files")
        batches = [event["entries"] for event in events if isinstance(event.get("entries"), list)]
        return [item for batch in batches for item in batch if isinstance(item, dict)]

    async def _take(self, root: bytes, found: list[Message], started: float) -> None:
        """Make entries of a listing; the content of files is read, several at a time, unless it is known."""
        if len(found) > MAX_FILES:
            raise errors.Exhausted(f"a snapshot holds at most {MAX_FILES} files")
        first: dict[tuple[Any, ...], bytes] = {}
        work: list[Work] = []
        for item in found:
            path = _relative(item, root)
            entry = _entry(path, item)
            if entry is None:
                self._skip(path)
                continue
            stamp = Stamp(_number(item, "ino"), entry.size, entry.mtime, _time(item, "ctime"))
            if entry.kind == FILE:
                if _number(item, "nlink") > 1 and (twin := first.setdefault((*stamp, entry.mode), path)) != path:
                    entry = entry._replace(kind=HARDLINK, size=0, target=twin)
                else:
                    work.append((len(self.entries), path, stamp))
            self.entries.append(entry)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="snapshot") as pool:
            await self._read_all(root, work, started, pool)
        lost = {path for place, path, _ in work if self.entries[place].size < 0}
        self.entries = [e for e in self.entries if e.size >= 0 and not (e.kind == HARDLINK and e.target in lost)]

    async def _read_all(self, root: bytes, work: list[Work], started: float, pool: ThreadPoolExecutor) -> None:
        left = []
        for place, path, stamp in work:
            known = self._before.get(path)
            if known is not None and known.stamp == stamp and all(map(self._chunks.has, known.chunks)):
                self._found(place, path, known, started)
            else:
                left.append((place, path, stamp))
        batches = iter(_batches(left))

        async def reader() -> None:
            for batch in batches:
                many = await self._read_many(root, batch, pool) if len(batch) > 1 else {}
                for place, path, stamp in batch:
                    known = many.get(path) or await self._read(root, path, stamp, pool)
                    self._found(place, path, known, started)

        try:
            async with asyncio.TaskGroup() as readers:
                for _ in range(min(AT_ONCE, len(left))):
                    readers.create_task(reader())
        except ExceptionGroup as several:  # the first is the reason, and what callers are told
            raise several.exceptions[0] from None

    def _found(self, place: int, path: bytes, known: Known | None, started: float) -> None:
        if known is None:
            self._skip(path)
            self.entries[place] = self.entries[place]._replace(size=-1)
            return
        self.entries[place] = self.entries[place]._replace(size=known.size, chunks=known.chunks)
        if 0 < known.stamp.ctime < started - RACY:
            self.seen[path] = known

    async def _read_many(self, root: bytes, batch: list[Work], pool: ThreadPoolExecutor) -> dict[bytes, Known]:
        """The content of small files; those that are not in the answer are read by themselves."""
        most = sum(stamp.size + len(path) * 2 + 8 * tar.BLOCK for _, path, stamp in batch) + BATCH_BYTES
        data = bytearray()
        try:
            names = [as_path(path) for _, path, _ in batch]
            async with await self._client.download("tar_out", path=as_path(root), paths=names) as download:
                async for piece in download:
                    data += piece
                    if len(data) > most:
                        return {}  # they have grown since
        except (errors.NotFound, errors.FileError):
            return {}  # one of them is gone
        stamps = {path: stamp for _, path, stamp in batch}
        found, stored = await asyncio.get_running_loop().run_in_executor(pool, self._unpack, data, stamps)
        self.stored += stored
        return found

    def _unpack(self, data: bytearray, stamps: dict[bytes, Stamp]) -> tuple[dict[bytes, Known], int]:
        found: dict[bytes, Known] = {}
        stored = 0
        reader = tar.TarReader(io.BytesIO(data).read)
        try:
            for entry in reader.entries():
                stamp = stamps.get(entry.name)
                if stamp is None or entry.kind != tar.REGULAR or entry.size > stamp.size:
                    continue
                content = b"".join(reader.chunks())
                if not content:
                    found[entry.name] = Known(stamp, 0, ())
                    continue
                digest, new = self._chunks.put(content)
                stored += new
                found[entry.name] = Known(stamp, len(content), (digest,))
        except errors.ImageError as bad:
            raise errors.Internal(f"the guest sent a broken archive: {bad.message}") from None
        return found, stored

    async def _read(self, root: bytes, path: bytes, stamp: Stamp, pool: ThreadPoolExecutor) -> Known | None:
        """The content as long as it was when it was listed; None when there is no such file any more."""
        if not stamp.size:
            return Known(stamp, 0, ())
        self._bytes += stamp.size
        if self._bytes > MAX_BYTES:
            raise errors.Exhausted(f"a snapshot holds at most {MAX_BYTES >> 30} GiB")
        full = root.rstrip(b"/") + b"/" + path
        puts: list[asyncio.Future[tuple[str, int]]] = []
        try:
            async with await self._client.download("read", path=as_path(full), limit=stamp.size, nofollow=True) as data:
                size = await self._store(data, stamp.size, puts, pool)
        except (errors.NotFound, errors.FileError):
            await asyncio.gather(*puts, return_exceptions=True)
            return None
        done = await asyncio.gather(*puts)
        self.stored += sum(new for _, new in done)
        return Known(stamp, size, tuple(digest for digest, _ in done))

    async def _store(
        self, data: Download, most: int, puts: "list[asyncio.Future[tuple[str, int]]]", pool: ThreadPoolExecutor
    ) -> int:
        buffer, size = bytearray(), 0
        async for piece in data:
            size += len(piece)
            if size > most:
                raise errors.Internal("the guest sent more of a file than was asked for")
            buffer += piece
            if len(buffer) >= CHUNK_BYTES:
                rest = buffer[CHUNK_BYTES:]
                del buffer[CHUNK_BYTES:]
                await self._put(buffer, puts, pool)
                buffer = rest
        if buffer:
            await self._put(buffer, puts, pool)
        return size

    async def _put(
        self, data: bytearray, puts: "list[asyncio.Future[tuple[str, int]]]", pool: ThreadPoolExecutor
    ) -> None:
        await self._pieces.acquire()
        future = asyncio.get_running_loop().run_in_executor(pool, self._chunks.put, data)
        future.add_done_callback(lambda _: self._pieces.release())
        puts.append(future)

    def _skip(self, path: bytes) -> None:
        if len(self.skipped) < SHOWN_SKIPPED:
            self.skipped.append(path.decode("utf-8", "replace")[:200])


async def _names(client: GuestClient, path: bytes) -> dict[bytes, Any]:
    """Return the entries of a directory with their kinds."""
    root = b"/" + path
    fields = {"recursive": False, "limit": MAX_FILES + 1}
    _, events = await client.collect("list", timeout=LIST_TIMEOUT, path=as_path(root), **fields)
    batches = [event["entries"] for event in events if isinstance(event.get("entries"), list)]
    items = [item for batch in batches for item in batch if isinstance(item, dict)]
    return {_relative(item, root).rpartition(b"/")[2]: item.get("type") for item in items}


def _batches(work: list[Work]) -> Iterator[list[Work]]:
    """Small files together, each large one alone."""
    batch: list[Work] = []
    size = names = 0
    for item in work:
        _, path, stamp = item
        if stamp.size > SMALL:
            yield [item]
            continue
        full = len(batch) >= BATCH_FILES or size + stamp.size > BATCH_BYTES or names + len(path) > BATCH_NAMES
        if batch and full:
            yield batch
            batch, size, names = [], 0, 0
        batch.append(item)
        size, names = size + stamp.size, names + len(path)
    if batch:
        yield batch


def _entry(path: bytes, item: Message) -> Entry | None:
    """A checked entry; None for what is not kept: sockets, pipes, devices."""
    kind = {"file": FILE, "directory": DIRECTORY, "symlink": SYMLINK}.get(str(item.get("type")))
    if kind is None:
        return None
    target = _bytes(item.get("target")) if kind == SYMLINK else b""
    if kind == SYMLINK and not 0 < len(target) <= 4096:
        return None
    return Entry(
        path, kind, _number(item, "mode") & 0o7777, _number(item, "uid") & 0xFFFFFFFF, _number(item, "gid") & 0xFFFFFFFF,
        _time(item, "mtime"), _number(item, "size") if kind == FILE else 0, (), target,
    )  # fmt: skip


def _relative(item: Message, root: bytes) -> bytes:
    """The path below the root, in the one form that names one file."""
    path = _bytes(item.get("path"))
    start = root.rstrip(b"/") + b"/"
    parts = path[len(start) :].split(b"/")
    if not path.startswith(start) or len(path) > 4096 or any(p in (b"", b".", b"..") or b"\0" in p for p in parts):
        raise errors.Internal("the guest listed a file outside of what was asked for")
    return path[len(start) :]


def _below(path: bytes, roots: list[bytes]) -> bool:
    return any(path == root or path.startswith(root + b"/") for root in roots)


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return value if isinstance(value, bytes) else b""


def as_path(path: bytes) -> str | bytes:
    try:
        return path.decode()
    except UnicodeDecodeError:
        return path


def _number(item: Message, key: str) -> int:
    value = item.get(key)
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else 0


def _time(item: Message, key: str) -> float:
    value = item.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and abs(value) < 1 << 40 else 0.0
