"""The chunk store keeps content once, verifies it, and survives crashes."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.chunks import CHUNK_BYTES, ChunkStore
from atoll.errors import DiskFull, Internal, NotFound


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=5000))
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    store = ChunkStore(tmp_path_factory.mktemp("c"))
    digest, _ = store.put(data)
    assert store.get(digest) == data
    assert store.put(data) == (digest, 0)


def test_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    digest, _ = store.put(os.urandom(1000))
    path = tmp_path / "chunks" / digest[:2] / digest
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Internal):
        store.get(digest)


def test_names_cannot_leave_the_store(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    for name in ("../../etc/passwd", "a" * 63, "A" * 64, "", "/etc/passwd"):
        with pytest.raises(Internal):
            store.get(name)
    with pytest.raises(NotFound):
        store.get("0" * 64)


def test_sweep_removes_what_nobody_names(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    kept, _ = store.put(b"kept")
    gone, size = store.put(b"gone")
    assert store.sweep([kept]) == size
    assert store.has(kept) and not store.has(gone)


def test_limits(tmp_path: Path) -> None:
    with pytest.raises(Internal):
        ChunkStore(tmp_path).put(bytes(CHUNK_BYTES + 1))
    with pytest.raises(DiskFull):
        ChunkStore(tmp_path, reserve_bytes=1 << 60).put(b"x")


def test_half_written_chunks_of_a_crash_are_removed(tmp_path: Path) -> None:
    ChunkStore(tmp_path)
    (tmp_path / "staging" / "left").write_bytes(b"half")
    ChunkStore(tmp_path)
    assert not list((tmp_path / "staging").iterdir())
