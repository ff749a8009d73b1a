"""The chunk store: content kept once, by its hash, for all snapshots of this machine.

A chunk is at most 4 MiB of a file. It lies zstd-compressed under `chunks/<first two hex>/<sha256 of the plain bytes>`,
written to `staging/` first and renamed, so that a chunk that exists is whole. Reading verifies: a flipped bit is an error,
never data. Names are keyed by nothing a caller chose, so no name can leave the directory.
"""

import hashlib
import os
import re
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path

import zstandard

from atoll.errors import DiskFull, Internal, NotFound

CHUNK_BYTES = 4 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ChunkStore:
    """Blocking; safe to use from several threads. `put` of known bytes only hashes."""

    def __init__(self, root: Path, *, reserve_bytes: int = 64 << 20) -> None:
        self._chunks = root / "chunks"
        self._staging = root / "staging"
        self._reserve = reserve_bytes
        self._local = threading.local()
        for directory in (self._chunks, self._staging):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._staging.iterdir():  # half-written ones of a crash
            left.unlink()

    def put(self, data: bytes | bytearray | memoryview) -> tuple[str, int]:
        """Keep these bytes; returns their digest and how many bytes of disk that newly took."""
        if len(data) > CHUNK_BYTES:
            raise Internal(f"a chunk has at most {CHUNK_BYTES} bytes, not {len(data)}")
        digest = hashlib.sha256(data).hexdigest()
        path = self._path(digest)
        if path.exists():
            return digest, 0
        packed = self._compressor().compress(data)
        self.check_space(len(packed))
        fresh = self._staging / secrets.token_hex(16)
        try:
            fresh.write_bytes(packed)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            fresh.rename(path)
        except OSError as e:
            fresh.unlink(missing_ok=True)
            raise DiskFull(f"could not write a chunk: {e.strerror}") from e
        return digest, len(packed)

    def _compressor(self) -> zstandard.ZstdCompressor:
        """One for each thread: making one costs more than compressing a small file."""
        made: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if made is None:
            made = self._local.compressor = zstandard.ZstdCompressor(level=1)
        return made

    def check_space(self, size: int) -> None:
        """DiskFull when so many more bytes would leave the host with next to nothing."""
        free = os.statvfs(self._staging)
        if free.f_bavail * free.f_frsize < size + self._reserve:
            raise DiskFull("the host has no room for this snapshot", hint="delete snapshots or free disk space")

    def get(self, digest: str) -> bytes:
        """The bytes of a digest, verified."""
        try:
            packed = self._path(digest).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"chunk {digest[:12]} is missing", hint="the snapshot is damaged; delete it") from None
        try:
            data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=CHUNK_BYTES)
        except zstandard.ZstdError:
            data = b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise Internal(f"chunk {digest[:12]} is damaged on disk", hint="the snapshot cannot be restored; delete it")
        return data

    def has(self, digest: str) -> bool:
        return self._path(digest).exists()

    def sweep(self, referenced: Iterable[str]) -> int:
        """Delete every chunk that no snapshot names; returns the bytes freed."""
        keep, freed = set(referenced), 0
        for shelf in self._chunks.iterdir():
            for path in shelf.iterdir():
                if path.name not in keep:
                    freed += path.stat().st_size
                    path.unlink()
        return freed

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise Internal("not a chunk digest")
        return self._chunks / digest[:2] / digest
