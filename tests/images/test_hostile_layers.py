"""FIL-06 and ESC-04: layers that try to reach outside, leave devices behind, or fill the disk."""

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab.images import Member, digest_of, directory, make_tar

from atoll.errors import AtollError, ImageError
from atoll.images import Limits
from atoll.images.layers.layers import Layer, LayerStore


@pytest.fixture
def layers(tmp_path: Path) -> LayerStore:
    return make_layers(tmp_path)


def make_layers(root: Path, **limits: int) -> LayerStore:
    for name in ("layers", "tmp"):
        (root / name).mkdir(exist_ok=True)
    return LayerStore(root / "layers", root / "tmp", Limits(**limits))


def unpack(layers: LayerStore, *members: Member) -> Layer:
    return unpack_raw(layers, make_tar(*members))


def unpack_raw(layers: LayerStore, raw: bytes) -> Layer:
    return layers.add(io.BytesIO(raw), digest_of(raw), lambda _count: None)


def tree(path: Path) -> dict[str, os.stat_result]:
    """Everything below a directory, links not followed."""
    found = {}
    for top, names, files in os.walk(path):
        for name in (*names, *files):
            full = os.path.join(top, name)
            found[os.path.relpath(full, path)] = os.lstat(full)
    return found


SYMLINK, HARDLINK = tarfile.SYMTYPE, tarfile.LNKTYPE

ESCAPES = {
    "parent": [Member("../canary/x", b"!")],
    "parent inside": [Member("a/../../canary/x", b"!")],
    "harmless parent": [directory("a"), Member("a/../b", b"!")],
    "absolute": [Member("/etc/passwd", b"!")],
    "link then write": [Member("a", kind=SYMLINK, link="../../canary"), Member("a/x", b"!")],
    "absolute link then write": [Member("a", kind=SYMLINK, link="{canary}"), Member("a/x", b"!")],
    "link inside then write": [directory("b"), Member("a", kind=SYMLINK, link="b"), Member("a/x", b"!")],
    "link as parent of a directory": [Member("a", kind=SYMLINK, link="{canary}"), directory("a/b")],
    "link as parent of a link": [Member("a", kind=SYMLINK, link="{canary}"), Member("a/b", kind=SYMLINK, link="x")],
    "link then deletion": [Member("a", kind=SYMLINK, link="{canary}"), Member("a/.wh.secret")],
    "link then opaque": [Member("a", kind=SYMLINK, link="{canary}"), Member("a/.wh..wh..opq")],
    "hard link out": [Member("a", kind=HARDLINK, link="../../canary/secret")],
    "absolute hard link out": [Member("a", kind=HARDLINK, link="{canary}/secret")],
    "hard link through a link": [
        Member("a", kind=SYMLINK, link="{canary}"),
        Member("b", kind=HARDLINK, link="a/secret"),
    ],
    "hard link to a directory": [directory("d"), Member("b", kind=HARDLINK, link="d")],
    "hard link to a deletion": [Member(".wh.d"), Member("b", kind=HARDLINK, link="d")],
    "hard link to itself": [Member("b", kind=HARDLINK, link="./b")],
    "deletion of the parent": [Member("a/.wh...")],
    "deletion of nothing": [Member("a/.wh.")],
    "below a deletion": [Member(".wh.a/x", b"!")],
    "file below a file": [Member("a", b"x"), Member("a/b", b"!")],
    "directory replaced by a link": [directory("a"), Member("a", kind=SYMLINK, link="{canary}"), Member("a/x", b"!")],
    "root as a link": [Member("./", kind=SYMLINK, link="{canary}")],
    "long name": [Member("/".join(["a" * 200] * 30), b"x")],
    "deep name": [Member("/".join(["a"] * 200), b"x")],
    "component too long": [Member("a" * 300, b"x")],
    "dev as a link": [Member("dev", kind=SYMLINK, link="{canary}")],
    "dev as a relative link": [Member("./dev", kind=SYMLINK, link="../../canary")],
    "proc as a link": [Member("proc", kind=SYMLINK, link="/")],
    "sys as a file": [Member("sys", b"x")],
    "dev as a fifo": [Member("dev", kind=tarfile.FIFOTYPE)],
    "dev replaced later": [directory("dev"), Member("dev", kind=SYMLINK, link="{canary}")],
    "dev as a hard link": [Member("x", b"x"), Member("dev", kind=HARDLINK, link="x")],
    "sparse": [Member("a", b"x" * 10, pax={"GNU.sparse.map": "0,1", "GNU.sparse.size": "1099511627776"})],
    "nul in a name": [Member("a", b"x", pax={"path": "a\0/../../canary/x"})],
    "huge size": [Member("a", b"x", pax={"size": "9" * 30})],
    "negative size": [Member("a", b"x", pax={"size": "-1"})],
}


@pytest.mark.parametrize("name", ESCAPES)
def test_refuses_and_leaves_no_trace(name: str, layers: LayerStore, tmp_path: Path) -> None:
    """Refuse the whole layer; nothing outside is touched and nothing of it stays."""
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "secret").write_text("untouched")
    members = [Member(m.name, m.data, m.kind, m.link.format(canary=canary), m.mode, pax=m.pax) for m in ESCAPES[name]]
    with pytest.raises(ImageError):
        unpack(layers, *members)
    assert os.listdir(canary) == ["secret"] and (canary / "secret").read_text() == "untouched"
    assert (canary / "secret").stat().st_nlink == 1
    assert os.listdir(tmp_path / "layers") == [] and os.listdir(tmp_path / "tmp") == []


def test_leaves_out_devices_and_set_id_bits(layers: LayerStore) -> None:
    """Device nodes and fifos are never made, set-id bits are cleared, and the report says so."""
    layer = unpack(
        layers,
        Member("disk", kind=tarfile.BLKTYPE),
        Member("tty", kind=tarfile.CHRTYPE),
        Member("pipe", kind=tarfile.FIFOTYPE),
        Member("su", b"x", mode=0o4755),
        Member("wall", b"x", mode=0o2755),
        directory("mail", mode=0o2775),
        directory("tmp", mode=0o1777),
        directory("dev"),
        Member("dev/null", kind=tarfile.CHRTYPE),
        Member("dev/pts", kind=SYMLINK, link="/etc"),
    )
    found = tree(layer.path)
    assert set(found) == {"su", "wall", "mail", "tmp", "dev"}
    assert {name: oct(stat.S_IMODE(info.st_mode)) for name, info in found.items()} == {
        "su": "0o755", "wall": "0o755", "mail": "0o775", "tmp": "0o1777", "dev": "0o755",
    }  # fmt: skip
    assert layer.notes["set-id bits cleared"] == 3 and layer.notes["device nodes and fifos left out"] == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="owners can be given only by root")
def test_keeps_owners_a_sandbox_can_have(layers: LayerStore) -> None:
    """Owners up to 65535 are kept; higher ones, which no sandbox has, become nobody."""
    layer = unpack(
        layers, Member("a", b"", uid=1000, gid=50), Member("b", uid=70_000, gid=2**31), directory("d", uid=33)
    )
    found = tree(layer.path)
    assert (found["a"].st_uid, found["a"].st_gid) == (1000, 50)
    assert (found["b"].st_uid, found["b"].st_gid) == (65534, 65534)
    assert found["d"].st_uid == 33


def test_drops_extended_attributes(layers: LayerStore) -> None:
    """A layer cannot plant attributes, least of all those overlayfs itself reads."""
    planted = {"SCHILY.xattr.trusted.overlay.redirect": "/", "SCHILY.xattr.user.overlay.opaque": "y"}
    layer = unpack(layers, Member("a", b"x", pax=planted), directory("d", pax=planted))
    assert os.listxattr(layer.path / "a") == [] and os.listxattr(layer.path / "d") == []


def test_last_of_several_entries_wins(layers: LayerStore) -> None:
    """A name that appears twice has the later content; a link is replaced, never written through."""
    layer = unpack(
        layers,
        Member("a", b"one"),
        Member("b", kind=SYMLINK, link="a"),
        Member("b", b"two"),
        Member("c", b"three"),
        directory("c"),
        Member("c/d", b"four"),
    )
    assert (layer.path / "a").read_bytes() == b"one" and (layer.path / "b").read_bytes() == b"two"
    assert not (layer.path / "b").is_symlink() and (layer.path / "c/d").read_bytes() == b"four"


def test_keeps_links_as_they_are(layers: LayerStore) -> None:
    """Symbolic links keep their target, wherever it points: they are resolved inside the sandbox only."""
    layer = unpack(layers, Member("bin", kind=SYMLINK, link="usr/bin"), Member("out", kind=SYMLINK, link="/etc/shadow"))
    assert os.readlink(layer.path / "bin") == "usr/bin" and os.readlink(layer.path / "out") == "/etc/shadow"
    layer = unpack(layers, Member("x", b"data"), Member("deep/y", kind=HARDLINK, link="x"))
    assert (layer.path / "deep/y").stat().st_ino == (layer.path / "x").stat().st_ino


def test_stops_bombs(tmp_path: Path) -> None:
    """Too many entries, too many bytes and too great a ratio end with an error, and the disk is as before."""
    many = make_layers(tmp_path, entries=100)
    with pytest.raises(ImageError, match="entries"):
        unpack(many, *[Member(f"f{number}") for number in range(101)])
    zeros = make_tar(Member("zeros", bytes(8 << 20)))
    big = make_layers(tmp_path, unpacked_bytes=1 << 20)
    for compress in (gzip.compress, zstandard.compress, bytes):
        with pytest.raises(ImageError, match="unpacks to more"):
            unpack_raw_as(big, compress(zeros), digest_of(zeros))
    dense = make_layers(tmp_path, ratio=100, ratio_from=1 << 20)
    with pytest.raises(ImageError, match="times its size"):
        unpack_raw_as(dense, zstandard.compress(zeros), digest_of(zeros))
    assert os.listdir(tmp_path / "layers") == [] and os.listdir(tmp_path / "tmp") == []


def unpack_raw_as(layers: LayerStore, blob: bytes, digest: str) -> Layer:
    return layers.add(io.BytesIO(blob), digest, lambda _count: None)


def test_limits_the_size_of_headers(layers: LayerStore) -> None:
    """A header that claims to be gigabytes long is refused before it is read."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = b"L", 3 << 30
    with pytest.raises(ImageError, match="header"):
        unpack_raw(layers, info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    record = tarfile.TarInfo("x")
    record.type, record.size = b"x", 12
    block = record.tobuf(tarfile.USTAR_FORMAT) + b"12 comment=\n".ljust(512, b"\0")
    with pytest.raises(ImageError, match="extended headers"):
        unpack_raw(layers, block * 50)


def test_refuses_other_content_than_announced(layers: LayerStore, tmp_path: Path) -> None:
    """A layer whose content has another digest than the image says does not stay."""
    with pytest.raises(ImageError, match="digest"):
        unpack_raw_as(layers, make_tar(Member("a", b"x")), "sha256:" + "1" * 64)
    assert os.listdir(tmp_path / "layers") == []
    raw = make_tar(Member("a", b"x"))
    with pytest.raises(ImageError, match="digest"):  # bytes after the archive's end count too
        unpack_raw_as(layers, raw + b"tail", digest_of(raw))


@pytest.mark.parametrize("cut", [1, 100, 600, 1300])
def test_refuses_what_is_cut_off(layers: LayerStore, cut: int) -> None:
    raw = make_tar(Member("a", b"x" * 1000))
    with pytest.raises(ImageError):
        unpack_raw_as(layers, raw[:cut], digest_of(raw))
    with pytest.raises(ImageError):
        unpack_raw_as(layers, gzip.compress(raw)[:-9], digest_of(raw))


PARTS = st.sampled_from(["a", "b", "c", "..", ".", "", "dev", ".wh.a", ".wh..wh..opq", "é", "x" * 20])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
KINDS = st.sampled_from([tarfile.REGTYPE, SYMLINK, HARDLINK, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
MEMBERS = st.builds(
    Member,
    name=PATHS,
    data=st.just(b""),
    kind=KINDS,
    link=st.one_of(PATHS, st.sampled_from(["/", "{canary}", "../../canary", "../canary/secret"])),
    mode=st.integers(0, 0o7777),
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(members=st.lists(MEMBERS, max_size=8))
def test_no_archive_reaches_outside(members: list[Member], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever the entries, in whatever order: unpacked or refused, and nothing outside has changed."""
    root = tmp_path_factory.mktemp("any")
    canary = root / "canary"
    canary.mkdir()
    (canary / "secret").write_text("untouched")
    before = tree(canary)
    for member in members:
        member.link = member.link.format(canary=canary)
    try:
        layer = unpack(make_layers(root), *members)
    except ImageError:
        layer = None
    after = tree(canary)
    assert {k: (v.st_mode, v.st_nlink, v.st_size) for k, v in after.items()} == {
        k: (v.st_mode, v.st_nlink, v.st_size) for k, v in before.items()
    }
    assert set(os.listdir(root)) == {"canary", "layers", "tmp"} and os.listdir(root / "tmp") == []
    if layer is None:
        assert os.listdir(root / "layers") == []
        return
    for info in tree(layer.path).values():
        kind = stat.S_IFMT(info.st_mode)
        assert kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK) or (kind == stat.S_IFCHR and info.st_rdev == 0)
        assert not info.st_mode & 0o6000


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_bytes_break_the_reader(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An archive with flipped bytes is unpacked or refused with our own error, never anything else."""
    raw = bytearray(make_tar(Member("a/b", b"x" * 600), Member("n" * 150, kind=SYMLINK, link="m" * 150)))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    root = tmp_path_factory.mktemp("flip")
    try:
        unpack_raw(make_layers(root), bytes(raw))
    except AtollError:
        assert os.listdir(root / "layers") == []


@pytest.fixture(autouse=True)
def _removable(tmp_path: Path) -> Iterator[None]:
    yield
    for path in tmp_path.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
