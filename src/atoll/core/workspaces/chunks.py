"""The chunk store: content kept once, by its hash, for all snapshots of one owner.

A chunk is at most 4 MiB. It lies under `chunks/<first two hex>/<sha256 of the plain bytes>`, zstd-compressed unless that
would gain nothing. New ones are written to `staging/`, and `commit` moves them once the disk has them: a chunk that can be
found by its name is whole, whatever crashes. Reading verifies: a flipped bit is an error, never data. Names are keyed by
nothing a caller chose, so no name can leave the directory.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import zstandard

from atoll.errors import DiskFull, Internal, NotFound

CHUNK_BYTES = 4 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ZSTD = b"\x28\xb5\x2f\xfd"  # how every compressed chunk begins
_PROBE = 64 << 10  # so much is tried before all of a chunk is compressed
_STEP = 8 << 20  # the disk is asked for room in steps of this
_FEW = 16  # chunks that are flushed one by one; more are cheaper as one flush of the file system


class ChunkStore:
    """Blocking; safe to use from several threads. `put` of known bytes only hashes."""

    def __init__(
        self, root: Path, *, reserve_bytes: int = 64 << 20, check: Callable[[int, str], None] | None = None
    ) -> None:
        self._check = check  # raises when so many bytes are promised to others
        self._chunks = root / "chunks"
        self._staging = root / "staging"
        self._reserve = reserve_bytes
        self._local = threading.local()
        self._lock = threading.Lock()
        self._staged: dict[str, str] = {}
        self._room = 0  # bytes that may be written before the disk is asked again
        for directory in (self._chunks, self._staging):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._staging.iterdir():  # of a crash: nothing names them
            left.unlink()

    def put(self, data: bytes | bytearray | memoryview) -> tuple[str, int]:
        """Keep these bytes; returns their digest and how many bytes of disk that newly took. `commit` makes it last."""
        if len(data) > CHUNK_BYTES:
            raise Internal(f"a chunk has at most {CHUNK_BYTES} bytes, not {len(data)}")
        digest = hashlib.sha256(data).hexdigest()
        if self.has(digest):
            return digest, 0
        packed = self._packed(data)
        self._reserve_space(len(packed))
        fresh = f"{self._staging}/{secrets.token_hex(16)}"
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                left = memoryview(packed)
                while left:
                    left = left[os.write(fd, left) :]
                if len(packed) >= _PROBE:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the disk starts now: `commit` waits less
            finally:
                os.close(fd)
        except OSError as e:
            _unlink(fresh)
            raise DiskFull(f"could not write a chunk: {e.strerror}") from e
        with self._lock:
            if self._staged.setdefault(digest, fresh) is not fresh:  # somebody else had the same bytes at the same time
                _unlink(fresh)
                return digest, 0
        return digest, len(packed)

    def commit(self) -> None:
        """All that was put lasts from here on, and is found by its name. Before a snapshot that needs it is."""
        with self._lock:
            if not self._staged:
                return
            places = {digest: self._path(digest) for digest in self._staged}
            shelves = {os.path.dirname(place) for place in places.values()}
            for shelf in shelves:
                os.makedirs(shelf, mode=0o700, exist_ok=True)
            self._flush(list(self._staged.values()))
            for digest, place in places.items():
                os.rename(self._staged[digest], place)
                del self._staged[digest]
            self._flush([*shelves, str(self._chunks)])

    def _flush(self, paths: list[str]) -> None:
        try:
            if len(paths) > _FEW:
                return _sync_file_system(self._staging)
            for path in paths:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
        except OSError as e:
            raise DiskFull(f"the disk did not take a snapshot's content: {e.strerror}") from e

    def _packed(self, data: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
        """Return the bytes that go to disk. Content that does not shrink stays as it is, unless it would look compressed."""
        compressor = self._compressor()
        plain = bytes(data[:4]) != _ZSTD
        if plain and len(data) > 2 * _PROBE:
            middle = len(data) // 2
            sample = bytes(data[middle : middle + _PROBE])
            if len(compressor.compress(sample)) > _PROBE * 0.97:
                return data
        packed = compressor.compress(data)
        return data if plain and len(packed) >= len(data) else packed

    def _compressor(self) -> zstandard.ZstdCompressor:
        """One for each thread: making one costs more than compressing a small file."""
        made: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if made is None:
            made = self._local.compressor = zstandard.ZstdCompressor(level=1)
        return made

    def check_space(self, size: int) -> None:
        """DiskFull when so many more bytes would leave the host with next to nothing."""
        if self._check is not None:
            self._check(size, "this snapshot")
        free = os.statvfs(self._staging)
        if free.f_bavail * free.f_frsize < size + self._reserve:
            raise DiskFull("the host has no room for this snapshot", hint="delete snapshots or free disk space")

    def get(self, digest: str) -> bytes:
        """The bytes of a digest, verified."""
        data = None
        for path in (self._staged.get(digest), self._path(digest)):  # one that is being committed moves meanwhile
            try:
                data = data if path is None or data is not None else _read(path)
            except FileNotFoundError:
                continue
        if data is None:
            raise NotFound(f"chunk {digest[:12]} is missing", hint="the snapshot is damaged; delete it")
        if data[:4] == _ZSTD:
            try:
                data = zstandard.ZstdDecompressor().decompress(data, max_output_size=CHUNK_BYTES)
            except zstandard.ZstdError:
                data = b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise Internal(f"chunk {digest[:12]} is damaged on disk", hint="the snapshot cannot be restored; delete it")
        return data

    def has(self, digest: str) -> bool:
        return digest in self._staged or os.path.exists(self._path(digest))

    def sweep(self, referenced: Iterable[str]) -> int:
        """Delete every chunk that no snapshot names; returns the bytes freed. Nobody may be putting anything."""
        keep, freed = set(referenced), 0
        with self._lock:
            for staged in self._staged.values():
                _unlink(staged)
            self._staged.clear()
        for shelf in self._chunks.iterdir():
            for path in shelf.iterdir():
                if path.name not in keep:
                    freed += path.stat().st_size
                    path.unlink()
        return freed

    def _path(self, digest: str) -> str:
        if not _DIGEST.fullmatch(digest):
            raise Internal("not a chunk digest")
        return f"{self._chunks}/{digest[:2]}/{digest}"

    def _reserve_space(self, size: int) -> None:
        """`check_space`, but not for every small file."""
        with self._lock:
            self._room -= size
            if self._room < 0:
                self.check_space(size + _STEP)
                self._room = _STEP


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _sync_file_system(directory: Path) -> None:
    """syncfs(2), which Python does not have."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)
