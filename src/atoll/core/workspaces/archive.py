"""Snapshots as tar: the stream a restore sends into a sandbox, and one file to carry away and bring back.

The file is K8E's layout in a tar: `<name>/metadata.json` and `<name>/workspace.tar.gz`. An archive that comes in is an
attacker's until proven otherwise: every name is checked, every size counted before it is read, links stay text, and only
files, directories and links are taken.
"""

import asyncio
import gzip
import hashlib
import io
import json
import tarfile
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, BinaryIO, TypedDict

from atoll import errors
from atoll import tar_reader as tar
from atoll.core.workspaces.chunks import CHUNK_BYTES, ChunkStore
from atoll.core.workspaces.index import DIRECTORY, FILE, GONE, HARDLINK, SYMLINK, Entry, Head, Origin

AHEAD = 4  # chunks read before they are needed
MAX_ENTRIES = 1_000_000
MAX_BYTES = 64 << 30
MAX_METADATA = 1 << 20
PIECE = 1 << 20
MAX_TRAILING = 16 << 20
RATIO = 256  # bytes that one packed byte may become; our own archives of nothing but zeros stay below it
FREE = 64 << 20  # bytes for which nobody counts
WHITEOUT = b".wh."  # begins the name of what a full snapshot's archive says is deleted
_TYPES = {FILE: tarfile.REGTYPE, DIRECTORY: tarfile.DIRTYPE, SYMLINK: tarfile.SYMTYPE, HARDLINK: tarfile.LNKTYPE}


class Metadata(TypedDict):
    """metadata.json of an archive, with K8E's names."""

    name: str
    created_at: str
    session_id: str
    tenant_id: str
    size_bytes: int
    file_count: int
    image: str
    full: bool
    workspace_sha256: str


def header(entry: Entry) -> bytes:
    if entry.kind == GONE:  # as image layers say it
        parent, slash, name = entry.path.rpartition(b"/")
        entry = entry._replace(path=parent + slash + WHITEOUT + name, kind=FILE)
    info = tarfile.TarInfo(entry.path.decode("utf-8", "surrogateescape"))
    info.type = _TYPES[entry.kind]
    info.mode, info.uid, info.gid, info.mtime = entry.mode, entry.uid, entry.gid, entry.mtime
    info.size = entry.size if entry.kind == FILE else 0
    info.linkname = entry.target.decode("utf-8", "surrogateescape")
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def content(chunks: ChunkStore, entry: Entry) -> Iterator[bytes]:
    """The verified content of one file."""
    left = entry.size
    for digest in entry.chunks:
        data = chunks.get(digest)
        left -= len(data)
        yield data
    if left:
        raise errors.Internal("a snapshot's list and content disagree", hint="delete it")


def pieces(chunks: ChunkStore, entries: Iterable[Entry]) -> Iterator[bytes]:
    """A tar of the entries in pieces of a megabyte or more. Blocking."""
    small = bytearray()
    for entry in entries:
        small += header(entry)
        if entry.kind == FILE:
            for data in content(chunks, entry):
                if len(data) < PIECE:
                    small += data
                    continue
                yield bytes(small)
                yield data
                small.clear()
            small += bytes(-entry.size % tar.BLOCK)
        if len(small) >= PIECE:
            yield bytes(small)
            small.clear()
    yield bytes(small) + bytes(2 * tar.BLOCK)


async def stream(chunks: ChunkStore, entries: list[Entry]) -> AsyncIterator[bytes]:
    """The same tar; the next pieces are read and verified by a thread while one is sent."""
    source = pieces(chunks, entries)
    with ThreadPoolExecutor(1, thread_name_prefix="restore") as pool:
        loop = asyncio.get_running_loop()
        ahead = deque(loop.run_in_executor(pool, next, source, None) for _ in range(AHEAD))
        try:
            while (piece := await ahead.popleft()) is not None:
                ahead.append(loop.run_in_executor(pool, next, source, None))
                yield piece
        finally:
            for left in ahead:
                left.cancel()


def export(chunks: ChunkStore, head: Head, entries: list[Entry], scratch: Path) -> None:
    """Write the archive to `scratch`. Blocking."""
    inner = scratch.with_suffix(".inner")
    try:
        with open(inner, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1, mtime=0) as packed:
            for piece in pieces(chunks, entries):
                packed.write(piece)
        metadata = json.dumps(_metadata(head, _sha256(inner))).encode()
        with tarfile.open(scratch, "w", format=tarfile.PAX_FORMAT) as outer:
            _add(outer, f"{head['name']}/metadata.json", io.BytesIO(metadata), len(metadata), head["created_at"])
            with open(inner, "rb") as file:
                _add(outer, f"{head['name']}/workspace.tar.gz", file, inner.stat().st_size, head["created_at"])
    finally:
        inner.unlink(missing_ok=True)


def _add(outer: tarfile.TarFile, name: str, data: IO[bytes], size: int, mtime: float) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, int(mtime), 0o600
    outer.addfile(info, data)


def _metadata(head: Head, digest: str) -> Metadata:
    return {
        "name": head["name"],
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(head["created_at"])),
        "session_id": head["sandbox_id"],
        "tenant_id": head["tenant"],
        "size_bytes": head["size_bytes"],
        "file_count": head["file_count"],
        "image": head["image"],
        "full": head["full"],
        "workspace_sha256": digest,
    }


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bring_in(chunks: ChunkStore, archive: Path) -> tuple[Origin, list[Entry]]:
    """Read an archive into the store; the caller makes it a snapshot. Blocking."""
    try:
        with open(archive, "rb") as file:
            return _bring_in(chunks, file, archive.with_suffix(".inner"))
    except (errors.ImageError, zlib.error, EOFError, gzip.BadGzipFile) as bad:
        raise errors.InvalidArgument(f"this is not a snapshot's archive: {bad}") from None


def _bring_in(chunks: ChunkStore, file: BinaryIO, inner: Path) -> tuple[Origin, list[Entry]]:
    metadata: Mapping[str, object] | None = None
    reader = tar.TarReader(file.read)
    try:
        for member in reader.entries():
            leaf = member.name.rpartition(b"/")[2]
            if member.kind != tar.REGULAR or leaf not in (b"metadata.json", b"workspace.tar.gz"):
                raise errors.InvalidArgument(f"an unexpected member {member.name[:80]!r} in a snapshot's archive")
            if leaf == b"metadata.json":
                if member.size > MAX_METADATA:
                    raise errors.TooLarge("the archive's metadata is too large")
                metadata = _read_metadata(b"".join(reader.chunks()))
                continue
            if member.size > MAX_BYTES:
                raise errors.TooLarge(f"an archive holds at most {MAX_BYTES >> 30} GiB")
            digest = hashlib.sha256()
            with open(inner, "wb") as out:
                for piece in reader.chunks():
                    digest.update(piece)
                    out.write(piece)
            claimed = (metadata or {}).get("workspace_sha256")
            if claimed is not None and claimed != digest.hexdigest():
                raise errors.InvalidArgument("the archive is damaged: its content has another digest than it says")
        if metadata is None or not inner.exists():
            raise errors.InvalidArgument("the archive lacks metadata.json or workspace.tar.gz")
        with open(inner, "rb") as raw, gzip.GzipFile(fileobj=raw) as packed:
            entries = read_members(chunks, _bounded(packed, raw), full=metadata.get("full") is True)
            _finish(packed)
            return _origin(metadata), entries
    finally:
        inner.unlink(missing_ok=True)


def _bounded(packed: gzip.GzipFile, raw: BinaryIO) -> Callable[[int], bytes]:
    """Reads from `packed`, and refuses to go on when much comes out of little."""
    total = 0

    def read(size: int) -> bytes:
        nonlocal total
        data = packed.read(size)
        total += len(data)
        if total > FREE + RATIO * raw.tell():
            raise errors.TooLarge(f"the archive becomes more than {RATIO} times as large when it is unpacked")
        return data

    return read


def _finish(packed: gzip.GzipFile) -> None:
    """Read on to the end, where gzip has its checksum: a cut or damaged stream is noticed only there."""
    for _ in range(MAX_TRAILING // PIECE):
        if not packed.read(PIECE):
            return
    raise errors.InvalidArgument("the archive goes on after its end")


def read_members(chunks: ChunkStore, read: Callable[[int], bytes], *, full: bool = False) -> list[Entry]:
    """The entries of an untrusted tar, their content in the store."""
    reader, total = tar.TarReader(read), 0
    found: list[Entry] = []
    files: set[bytes] = set()
    for member in reader.entries():
        if len(found) >= MAX_ENTRIES:
            raise errors.TooLarge(f"an archive holds at most {MAX_ENTRIES} entries")
        path = _clean(member.name)
        if path == b"":
            continue  # the top directory itself
        total += member.size
        if total > MAX_BYTES:
            raise errors.TooLarge(f"an archive holds at most {MAX_BYTES >> 30} GiB")
        base = Entry(path, FILE, member.mode & 0o1777, _id(member.uid), _id(member.gid), _sane(member.mtime), 0)
        if member.kind == tar.DIRECTORY:
            found.append(base._replace(kind=DIRECTORY))
        elif member.kind == tar.SYMLINK:
            if not 0 < len(member.link) <= 4096:
                raise errors.InvalidArgument("a link without a target in the archive")
            found.append(base._replace(kind=SYMLINK, target=member.link))
        elif member.kind == tar.HARDLINK:
            target = _clean(member.link)
            if target not in files:
                raise errors.InvalidArgument(
                    f"a hard link in the archive to {target[:80]!r}, which is no file before it"
                )
            found.append(base._replace(kind=HARDLINK, target=target))
        elif full and member.kind == tar.REGULAR and path.rpartition(b"/")[2].startswith(WHITEOUT):
            parent, slash, name = path.rpartition(b"/")
            if len(name) == len(WHITEOUT):
                raise errors.InvalidArgument("the archive says that something without a name is deleted")
            found.append(base._replace(path=_clean(parent + slash + name.removeprefix(WHITEOUT)), kind=GONE))
        elif member.kind == tar.REGULAR:
            files.add(path)
            found.append(base._replace(size=member.size, chunks=tuple(_store(chunks, reader))))
        else:
            raise errors.InvalidArgument(f"{path[:80]!r} in the archive is neither file, directory nor link")
    return found


def _store(chunks: ChunkStore, reader: tar.TarReader) -> Iterator[str]:
    buffer = bytearray()
    for piece in reader.chunks():
        buffer += piece
        while len(buffer) >= CHUNK_BYTES:
            yield chunks.put(buffer[:CHUNK_BYTES])[0]
            del buffer[:CHUNK_BYTES]
    if buffer:
        yield chunks.put(buffer)[0]


def _clean(name: bytes) -> bytes:
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if name.startswith(b"/") or b".." in parts or len(name) > 4096 or any(len(part) > 255 for part in parts):
        raise errors.InvalidArgument(f"the archive has a path that leads out of it, or is too long: {name[:80]!r}")
    return b"/".join(parts)


def _id(number: int) -> int:
    return number if 0 <= number < 65536 else 65534


def _sane(seconds: float) -> float:
    return seconds if 0 <= seconds < 1 << 40 else 0.0


def _read_metadata(data: bytes) -> Mapping[str, object]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise errors.InvalidArgument("the archive's metadata.json is not an object")
    return found


def _origin(metadata: Mapping[str, object]) -> Origin:
    """Only text for people is taken over; everything that decides anything is counted anew."""
    text = {key: str(metadata.get(key) or "")[:200] for key in ("session_id", "tenant_id", "image")}
    return {
        "created_at": time.time(),
        "sandbox_id": text["session_id"],
        "tenant": text["tenant_id"],
        "image": text["image"],
        "full": metadata.get("full") is True,
        "imported": True,
        "stored_bytes": 0,
        "skipped": [],
    }
