"""Copying out of a sandbox writes beneath the target and nowhere else, whatever the archive says (FIL-10)."""

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.client import archive
from atoll.errors import FileError, TooLarge


def tar_of(*entries: tuple[str, bytes | str | None, int]) -> bytes:
    """(name, content | link target | None for a directory, tar type)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content, kind in entries:
            info = tarfile.TarInfo(name)
            info.type = bytes([kind])
            info.mode = 0o6755
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.linkname = content or ""
                tar.addfile(info)
    return buffer.getvalue()


FILE, LINK, SYM, DIR, FIFO = (kind[0] for kind in (b"0", b"1", b"2", b"5", b"6"))


def in_pieces(data: bytes, size: int = 1000) -> Iterator[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "canary").write_text("untouched")
    (tmp_path / "outside").mkdir()
    (tmp_path / "target").mkdir()
    return tmp_path


def outside(place: Path) -> dict[str, str]:
    found = {"canary": (place / "canary").read_text()}
    found.update({p.name: p.read_text() for p in (place / "outside").iterdir()})
    found["top"] = ",".join(sorted(p.name for p in place.iterdir()))
    return found


@pytest.mark.parametrize(
    "entries",
    [
        [("../canary", b"x", FILE)],
        [("a/../../canary", b"x", FILE)],
        [("/tmp/atoll-evil-canary", b"x", FILE)],
        [("l", "../outside", SYM), ("l/x", b"x", FILE)],
        [("l", "/etc", SYM), ("l/x", b"x", FILE)],
        [("c", "../canary", SYM), ("c", b"x", FILE)],
        [("h", "../canary", LINK)],
        [("a/b/c", None, DIR), ("a/b/c/up", "../../..", SYM), ("x", "a/b/c/up/../../outside", SYM)],
        [("a/b/f", b"x", FILE), ("a/b/f", "../../..", SYM), ("a/b/f", "../..", SYM), ("g", "a/b/f", LINK)],
        [("a/f", b"x", FILE), ("a/h", "a/f", LINK), ("a/h", "..", SYM), ("h", "a/h", LINK), ("z", "a/h", LINK)],
        [("f", None, FIFO)],
        [("..", None, DIR)],
    ],
)
def test_nothing_outside_changes(place: Path, entries: list[tuple[str, bytes | str | None, int]]) -> None:
    before = outside(place)
    done = archive.unpack(in_pieces(tar_of(*entries)), os.fspath(place / "target"))
    assert outside(place) == before
    assert not os.path.exists("/tmp/atoll-evil-canary")
    assert done.refused
    for root, directories, names in os.walk(place / "target"):  # a link to a directory is among the directories
        for name in (*directories, *names):
            assert os.path.realpath(os.path.join(root, name)).startswith(os.path.realpath(place / "target"))


def test_links_that_lie_in_the_target_are_not_followed(place: Path) -> None:
    os.symlink(place / "outside", place / "target" / "d")
    os.symlink(place / "canary", place / "target" / "f")
    before = outside(place)
    done = archive.unpack(in_pieces(tar_of(("d/x", b"x", FILE), ("f", b"x", FILE))), os.fspath(place / "target"))
    assert outside(place) == before
    assert len(done.refused) == 2


def test_a_good_tree_arrives(place: Path) -> None:
    content = os.urandom(300_000)
    files = [
        ("d/f", content, FILE),
        ("d/l", "../g", SYM),
        ("g", b"", FILE),
        ("./e/deep", b"1", FILE),
        ("h", "d/f", LINK),
    ]
    data = tar_of(("d", None, DIR), *files)
    done = archive.unpack(in_pieces(data, 777), os.fspath(place / "target"))
    assert done.refused == [] and done.files == 5
    assert (place / "target/h").stat().st_ino == (place / "target/d/f").stat().st_ino
    assert (place / "target/d/f").read_bytes() == content
    assert os.readlink(place / "target/d/l") == "../g"
    assert (place / "target/d/f").stat().st_mode & 0o7777 == 0o755  # setuid is gone
    assert not [p for p in (place / "target").rglob(".atoll-*")]


def test_a_cut_or_broken_archive_is_an_error(place: Path) -> None:
    data = tar_of(("f", b"x" * 5000, FILE))
    for part in (data[:2000], b"\x01" * 2048):
        with pytest.raises(FileError):
            archive.unpack(in_pieces(part), os.fspath(place / "target"))
    assert list((place / "target").iterdir()) == []


def test_limits_hold(place: Path) -> None:
    with pytest.raises(TooLarge):
        archive.unpack(in_pieces(tar_of(("f", b"x" * 5000, FILE))), os.fspath(place / "target"), max_bytes=100)
    with pytest.raises(TooLarge):
        many = tar_of(*[(f"f{i}", b"", FILE) for i in range(5)])
        archive.unpack(in_pieces(many), os.fspath(place / "target"), max_entries=3)


def test_pack_and_unpack_agree(place: Path) -> None:
    source = place / "source"
    (source / "sub/empty").mkdir(parents=True)
    (source / "sub/file.txt").write_bytes(os.urandom(70_000))
    (source / "run.sh").write_text("#!/bin/sh\n")
    os.chmod(source / "run.sh", 0o750)
    os.symlink("sub/file.txt", source / "link")
    (source / os.fsdecode(b"b\xff\xfe")).write_text("odd name")
    (source / ("n" * 200)).write_text("long name")
    done = archive.unpack(archive.pack(os.fspath(source)), os.fspath(place / "target"))
    assert done.refused == []
    assert sorted(os.walk(source))[0][2] is not None
    names = lambda top: sorted(os.fsencode(p.relative_to(top)) for p in top.rglob("*"))  # noqa: E731
    assert names(place / "target") == names(source)
    assert (place / "target/sub/file.txt").read_bytes() == (source / "sub/file.txt").read_bytes()
    assert (place / "target/run.sh").stat().st_mode & 0o777 == 0o750
