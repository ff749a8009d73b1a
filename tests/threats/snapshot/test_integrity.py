"""SNP-06: a flipped bit, a forged or foreign snapshot and a hostile archive are refused, and leave nothing."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.daemon import Box, DaemonProcess, Failed

from atoll import errors
from atoll.core.workspaces.archive import bring_in
from atoll.core.workspaces.chunks import ChunkStore
from atoll.core.workspaces.index import Entry, Shelf


def save(box: Box, name: str) -> None:
    box.daemon.post(f"{box.path}/snapshots", {"name": name, "force": True})


def refused(daemon: DaemonProcess, name: str) -> str:
    before = {one["id"] for one in daemon.get("/v1/sandboxes")["sandboxes"]}
    with pytest.raises(Failed) as caught:
        daemon.post(f"/v1/snapshots/{name}/restore")
    assert {one["id"] for one in daemon.get("/v1/sandboxes")["sandboxes"]} == before, "no half-filled sandbox stays"
    return str(caught.value.code)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_flipped_bits_are_refused(daemon: DaemonProcess, box: Box) -> None:
    box.run("open('/workspace/a','w').write('content ' * 1000)")
    save(box, "bits")
    root = daemon.home / "snapshots"
    (chunk,) = [path for path in (root / "chunks").rglob("*") if path.is_file()]
    good = chunk.read_bytes()
    flip(chunk)
    assert refused(daemon, "bits") == "internal"
    chunk.unlink()
    assert refused(daemon, "bits") == "internal"
    chunk.write_bytes(good)
    (listed,) = (root / "list").glob("*.snap")
    whole = listed.read_bytes()
    for place in (10, 80, len(whole) // 2, len(whole) - 5):
        data = bytearray(whole)
        data[place] ^= 1
        listed.write_bytes(data)
        assert refused(daemon, "bits") == "internal"
    listed.write_bytes(whole)
    other = daemon.post("/v1/snapshots/bits/restore")["id"]
    daemon.delete(f"/v1/sandboxes/{other}")
    flip(listed)
    assert daemon.delete("/v1/snapshots/bits")["ok"], "a damaged one can still be deleted"


def test_a_snapshot_put_there_by_hand_or_belonging_to_another_is_refused(tmp_path: Path) -> None:
    ours, theirs = Shelf(tmp_path / "a" / "list"), Shelf(tmp_path / "b" / "list")
    head = {"owner": "uid:1", "name": "n", "full": False}
    theirs.save(head, [Entry(b"x", "f", 0o644, 0, 0, 0.0, 0)])
    (made,) = (tmp_path / "b" / "list").iterdir()
    (tmp_path / "a" / "list" / made.name).write_bytes(made.read_bytes())  # another machine's key
    with pytest.raises(errors.Internal):
        ours.entries("uid:1", "n")
    ours.save({**head, "owner": "uid:2"}, [])
    (made,) = [path for path in (tmp_path / "a" / "list").iterdir() if path.name != made.name]
    ours.save(head, [])
    mine = next(path for path in (tmp_path / "a" / "list").iterdir() if path.name != made.name)
    mine.write_bytes(made.read_bytes())  # validly signed, but somebody else's
    with pytest.raises(errors.Internal):
        ours.entries("uid:1", "n")


Change = Callable[[tarfile.TarInfo], Any]


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes], **metadata: Any) -> Path:
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz", format=tarfile.PAX_FORMAT) as packed:
        for info, data in members:
            info.size = len(data) if info.isreg() else 0
            packed.addfile(info, io.BytesIO(data))
    return outer(path, inner.getvalue(), metadata)


def outer(path: Path, inner: bytes, metadata: Any, *more: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as made:
        for name, data in (("n/metadata.json", json.dumps(metadata).encode()), ("n/workspace.tar.gz", inner), *more):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    for key, value in fields.items():
        setattr(info, key, value)
    return info, b"data" if kind == tarfile.REGTYPE else b""


HOSTILE = {
    "parent": [member("../escape")],
    "parent inside": [member("a/../../escape")],
    "absolute": [member("/etc/passwd")],
    "device": [member("dev", tarfile.CHRTYPE, devmajor=1, devminor=1)],
    "block device": [member("dev", tarfile.BLKTYPE, devmajor=1, devminor=1)],
    "fifo": [member("pipe", tarfile.FIFOTYPE)],
    "hard link out": [member("link", tarfile.LNKTYPE, "../../etc/shadow")],
    "hard link to nothing": [member("link", tarfile.LNKTYPE, "missing")],
    "hard link to a link": [member("s", tarfile.SYMTYPE, "/etc/shadow"), member("h", tarfile.LNKTYPE, "s")],
    "long name": [member("/".join(["x" * 200] * 30))],
    "long part": [member("y" * 256)],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_members_of_an_archive_are_refused(case: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", *HOSTILE[case])
    with pytest.raises(errors.InvalidArgument):
        bring_in(ChunkStore(tmp_path / "store"), path)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.tar", "store"]


def test_what_an_archive_says_of_itself_decides_nothing(tmp_path: Path) -> None:
    setuid = member("tool", mode=0o6755, uid=0, gid=2**31)
    path = archive(tmp_path / "a.tar", setuid, size_bytes=-1, file_count=10**9, owner="uid:0", image="evil.example/x")
    head, (entry,) = bring_in(ChunkStore(tmp_path / "store"), path)
    assert entry.mode == 0o755 and entry.gid == 65534 and entry.size == 4
    assert "owner" not in head and "size_bytes" not in head


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store")
    good = archive(tmp_path / "a.tar", member("x"))
    with tarfile.open(good) as opened:
        inner = opened.extractfile("n/workspace.tar.gz").read()  # type: ignore[union-attr]
    cases = {
        "wrong digest": outer(tmp_path / "1", inner, {"workspace_sha256": hashlib.sha256(b"other").hexdigest()}),
        "not gzip": outer(tmp_path / "2", b"plain", {}),
        "cut gzip": outer(tmp_path / "3", inner[:-9], {}),
        "gzip of no tar": outer(tmp_path / "4", gzip.compress(b"x" * 700), {}),
        "metadata no object": outer(tmp_path / "5", inner, [1]),
        "more members": outer(tmp_path / "6", inner, {}, ("n/../../evil", b"x")),
        "another member": outer(tmp_path / "7", inner, {}, ("n/run.sh", b"x")),
    }
    (tmp_path / "8").write_bytes(good.read_bytes()[:700])
    (tmp_path / "9").write_bytes(b"")
    for path in [*cases.values(), tmp_path / "8", tmp_path / "9"]:
        with pytest.raises(errors.InvalidArgument):
            bring_in(store, path)


def test_a_refused_archive_leaves_no_snapshot(daemon: DaemonProcess, tmp_path: Path) -> None:
    body = archive(tmp_path / "a.tar", member("ok"), member("../escape")).read_bytes()
    with pytest.raises(Failed) as caught:
        daemon.ask("PUT", "/v1/snapshots/bad/archive", body)
    assert caught.value.code == "invalid_argument"
    assert daemon.get("/v1/snapshots")["snapshots"] == []
    assert not list((daemon.home / "snapshots" / "staging").iterdir())
