"""The chunk store keeps content once, verifies it, and survives crashes."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.workspaces import chunks
from atoll.core.workspaces.chunks import CHUNK_BYTES, ChunkStore
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
    store.commit()
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
    store.commit()
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


@pytest.mark.parametrize("count", [3, 40])
def test_a_chunk_has_its_name_only_when_the_disk_has_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """In this order: content flushed, then renamed, then the directories flushed."""
    steps: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        steps.append("flush " + ("directory" if Path(f"/proc/self/fd/{fd}").is_dir() else "file"))
        real_fsync(fd)

    def rename(source: str, target: str) -> None:
        steps.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    real_sync = chunks._sync_file_system
    monkeypatch.setattr(
        chunks, "_sync_file_system", lambda directory: (steps.append("flush all"), real_sync(directory))
    )
    store = ChunkStore(tmp_path)
    digests = [store.put(f"content {number}".encode())[0] for number in range(count)]
    assert not any((tmp_path / "chunks").rglob("*")) and all(map(store.has, digests)), "nothing is visible yet"
    assert store.get(digests[0]) == b"content 0"
    store.commit()
    renames = [place for place, step in enumerate(steps) if step == "rename"]
    before, after = steps[: renames[0]], steps[renames[-1] + 1 :]
    assert len(renames) == count
    assert before == (["flush file"] * count if count == 3 else ["flush all"])
    assert after and set(after) <= {"flush directory", "flush all"}
    assert not any((tmp_path / "staging").iterdir())
    assert ChunkStore(tmp_path).get(digests[-1]) == f"content {count - 1}".encode()


def test_what_was_not_committed_is_gone_after_a_crash(tmp_path: Path) -> None:
    digest, _ = ChunkStore(tmp_path).put(b"half of a snapshot")
    again = ChunkStore(tmp_path)
    assert not again.has(digest) and not any((tmp_path / "staging").iterdir())


@pytest.mark.parametrize("size", [10, 100_000, CHUNK_BYTES])
def test_what_does_not_shrink_is_kept_plain_and_what_does_is_not(tmp_path: Path, size: int) -> None:
    store = ChunkStore(tmp_path)
    noise, zeros = os.urandom(size), bytes(size)
    looks_packed = b"\x28\xb5\x2f\xfd" + noise[4:]
    sizes = {}
    for name, data in (("noise", noise), ("zeros", zeros), ("looks_packed", looks_packed)):
        digest, sizes[name] = store.put(data)
        store.commit()
        assert ChunkStore(tmp_path).get(digest) == data
    assert sizes["noise"] == size
    assert size < 100 or sizes["zeros"] < size / 10
