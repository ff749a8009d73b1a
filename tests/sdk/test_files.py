"""`files.*` on real sandboxes, both faces."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import AtollError, FileExists, FileNotFound, IsADirectory, NotEmpty


@pytest.fixture
def place(sandbox: Any) -> str:
    """An empty directory of the test's own inside the sandbox."""
    path = f"/workspace/{os.urandom(6).hex()}"
    sandbox.files.mkdir(path)
    return path


def test_write_and_read(sandbox: Any, place: str) -> None:
    files, data = sandbox.files, os.urandom(2_000_000)
    assert files.write(f"{place}/new/deep/file", data).size == len(data)
    assert files.read(f"{place}/new/deep/file") == data
    assert files.read(f"{place}/new/deep/file", offset=10, limit=5) == data[10:15]
    assert b"".join(files.read_stream(f"{place}/new/deep/file")) == data
    files.write(f"{place}/t", "grüße\n", mode=0o600)
    files.write(f"{place}/t", "more", append=True)
    assert files.read_text(f"{place}/t") == "grüße\nmore"
    assert files.stat(f"{place}/t").mode & 0o777 == 0o600
    files.write(f"{place}/t", b"XY", offset=1)
    assert files.read(f"{place}/t")[:3] == b"gXY"
    with pytest.raises(FileExists):
        files.write(f"{place}/t", b"", create="new")
    with pytest.raises(FileNotFound):
        files.write(f"{place}/none", b"", create="existing")


def test_streams_as_content(sandbox: Any, place: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(700_000))
    with open(tmp_path / "f", "rb") as file:
        sandbox.files.write(f"{place}/f", file)
    assert sandbox.files.read(f"{place}/f") == (tmp_path / "f").read_bytes()
    sandbox.files.write(f"{place}/g", (bytes([n]) * 1000 for n in range(5)))
    assert sandbox.files.stat(f"{place}/g").size == 5000


def test_list_stat_and_exists(sandbox: Any, place: str) -> None:
    files = sandbox.files
    files.write(f"{place}/a", "1")
    files.write(f"{place}/d/b", "22")
    files.symlink("a", f"{place}/l")
    found = {item.name: item for item in files.list(place)}
    assert {name: item.type for name, item in found.items()} == {"a": "file", "d": "directory", "l": "symlink"}
    assert found["l"].target == "a"
    assert {item.path for item in files.list(place, recursive=True, files_only=True)} >= {f"{place}/a", f"{place}/d/b"}
    assert len(files.list(place, limit=1)) == 1
    assert files.list(place, recursive=True, since=files.stat(f"{place}/a").mtime + 10_000) == []
    assert files.stat(f"{place}/l").type == "file" and files.stat(f"{place}/l", follow=False).type == "symlink"
    assert files.exists(f"{place}/a") and not files.exists(f"{place}/z")


def test_change(sandbox: Any, place: str) -> None:
    files = sandbox.files
    files.write(f"{place}/a", "1")
    files.move(f"{place}/a", f"{place}/b")
    files.copy(f"{place}/b", f"{place}/c")
    files.chmod(f"{place}/c", 0o711)
    assert files.stat(f"{place}/c").mode & 0o777 == 0o711 and not files.exists(f"{place}/a")
    with pytest.raises(FileExists):
        files.move(f"{place}/b", f"{place}/c")
    files.move(f"{place}/b", f"{place}/c", overwrite=True)
    files.mkdir(f"{place}/d/e/f")
    with pytest.raises(FileExists):
        files.mkdir(f"{place}/d")
    files.mkdir(f"{place}/d", exist_ok=True)
    files.copy(f"{place}/d", f"{place}/d2", recursive=True)
    with pytest.raises(NotEmpty):
        files.remove(f"{place}/d")
    assert files.remove(f"{place}/d", recursive=True) >= 1
    files.remove(f"{place}/d", missing_ok=True)
    with pytest.raises(FileNotFound):
        files.remove(f"{place}/d")
    with pytest.raises(IsADirectory):
        files.read(place)
    assert files.du(place)["inodes"] >= 1


def test_names_of_any_bytes(sandbox: Any, place: str) -> None:
    name = place.encode() + b"/b\xff\xfe \n?"
    sandbox.files.write(name, b"x")
    assert sandbox.files.read(name) == b"x" and sandbox.files.exists(name)
    sandbox.files.copy(name, name + b"2")
    assert sandbox.files.stat(os.fsdecode(name + b"2")).size == 1
    sandbox.files.remove(name)
    assert not sandbox.files.exists(name)


def test_grep_and_sed(sandbox: Any, place: str) -> None:
    files = sandbox.files
    files.write(f"{place}/a.txt", "one\ntwo one\n")
    files.write(f"{place}/b.md", "One\n")
    assert [(m.path, m.line, m.content) for m in files.grep("^two", place)] == [(f"{place}/a.txt", 2, "two one")]
    assert len(files.grep("one", place, ignore_case=True)) == 3
    assert len(files.grep("one", place, ignore_case=True, include=["*.md"])) == 1
    assert len(files.grep("one", place, max_matches=1)) == 1
    with pytest.raises(AtollError):
        files.grep("(", place)
    changed = files.sed("one", "1", place, include=["*.txt"])
    assert [(item["path"], item["replacements"]) for item in changed] == [(f"{place}/a.txt", 2)]
    assert files.read_text(f"{place}/a.txt") == "1\ntwo 1\n"


def test_watch(sandbox: Any, place: str) -> None:
    changes = sandbox.files.watch(place)
    sandbox.files.write(f"{place}/seen", "1")
    for change in changes:
        if change.path == f"{place}/seen":
            assert change.kind in ("create", "write", "rename")
            break
    changes.close()
    with pytest.raises(FileNotFound):
        next(sandbox.files.watch(f"{place}/none"))


def test_trees_up_and_down(sandbox: Any, place: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub/f").write_bytes(os.urandom(500_000))
    (source / "x.sh").write_text("#!/bin/sh\necho ran\n")
    os.chmod(source / "x.sh", 0o755)
    sandbox.files.upload(source, f"{place}/tree")
    assert sandbox.exec([f"{place}/tree/x.sh"]).stdout == "ran\n"
    assert sandbox.files.download(f"{place}/tree", tmp_path / "back") == []
    assert (tmp_path / "back/sub/f").read_bytes() == (source / "sub/f").read_bytes()
    sandbox.files.upload(source / "sub/f", f"{place}/single")
    sandbox.files.download(f"{place}/single", tmp_path / "single")
    assert (tmp_path / "single").read_bytes() == (source / "sub/f").read_bytes()
    sandbox.files.symlink("/etc/passwd", f"{place}/tree/evil")
    refused = sandbox.files.download(f"{place}/tree", tmp_path / "again")
    assert len(refused) == 1 and re.search("evil", refused[0]) and not os.path.lexists(tmp_path / "again/evil")
    with pytest.raises(FileNotFoundError):
        sandbox.files.upload(tmp_path / "none", f"{place}/x")
