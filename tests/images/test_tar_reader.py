"""The tar reader against Python's `tarfile` and GNU tar: what they write, it reads, and as they mean it."""

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab.images import Member, make_tar

from atoll.errors import ImageError
from atoll.tar_reader import DIRECTORY, HARDLINK, REGULAR, SYMLINK, Entry, TarReader

KINDS = {
    tarfile.REGTYPE: REGULAR,
    tarfile.DIRTYPE: DIRECTORY,
    tarfile.SYMTYPE: SYMLINK,
    tarfile.LNKTYPE: HARDLINK,
    tarfile.CHRTYPE: b"3",
    tarfile.BLKTYPE: b"4",
    tarfile.FIFOTYPE: b"6",
}
FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}


def read_all(raw: bytes) -> list[tuple[Entry, bytes]]:
    reader = TarReader(io.BytesIO(raw).read)
    return [(entry, b"".join(reader.chunks())) for entry in reader.entries()]


def facts(raw: bytes) -> list[tuple[object, ...]]:
    """What this reader says of each member, with a directory's trailing slash left out."""
    return [(e.name.rstrip(b"/"), e.kind, e.mode, e.uid, e.gid, e.size, e.link, body) for e, body in read_all(raw)]


def facts_of_tarfile(raw: bytes) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        for member in archive:
            body = archive.extractfile(member) if member.isreg() else None
            data = body.read() if body is not None else b""
            name, link = (os.fsencode(text).rstrip(b"/") for text in (member.name, member.linkname))
            kind, mode = KINDS[member.type], member.mode & 0o7777
            size = member.size if member.isreg() else 0
            found.append((name, kind, mode, member.uid, member.gid, size, link, data))
    return found


def test_everyday_4_a_long_name_cut_at_a_slash_is_a_file() -> None:
    """GNU keeps the first 100 bytes of a long name in the header; here they end in a slash."""
    name = "usr/" + "d" * 95 + "/file.rb"
    assert name[99] == "/"
    raw = make_tar(Member(name, b"puts 1\n"), format=tarfile.GNU_FORMAT)
    ((entry, body),) = read_all(raw)
    assert (entry.name, entry.kind, body) == (name.encode(), REGULAR, b"puts 1\n")


def test_everyday_4_an_old_archive_marks_directories_by_the_slash() -> None:
    member = tarfile.TarInfo("old/")
    member.type = tarfile.AREGTYPE
    raw = member.tobuf(tarfile.USTAR_FORMAT).replace(b"ustar\x0000", bytes(8))
    header = bytearray(raw[:512])
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    ((entry, _),) = read_all(bytes(header) + bytes(1024))
    assert (entry.name, entry.kind) == (b"old/", DIRECTORY)


NAMES = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1)
    .filter(lambda word: word not in (".", ".."))
    | st.sampled_from(["d" * 95, "d" * 99, "e" * 100, "f" * 120, "é" * 50]),
    min_size=1, max_size=5,
).map("/".join)  # fmt: skip


@st.composite
def members(draw: st.DrawFn) -> tarfile.TarInfo:
    member = tarfile.TarInfo(draw(NAMES))
    member.type = draw(st.sampled_from(list(KINDS)))
    member.mode = draw(st.integers(0, 0o7777))
    member.uid, member.gid = draw(st.integers(0, 1 << 40)), draw(st.integers(0, 1 << 21))
    member.mtime = draw(st.integers(0, 1 << 33))
    if member.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        member.linkname = draw(NAMES)
    return member


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(members(), st.binary(max_size=1500)), max_size=6))
def test_everyday_4_it_reads_what_tarfile_writes(form: str, wanted: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=FORMATS[form], encoding="utf-8") as archive:
        for member, body in wanted:
            member.size = len(body) if member.isreg() else 0
            try:
                archive.addfile(member, io.BytesIO(body))
            except ValueError:  # ustar cannot say it
                return
    assert facts(buffer.getvalue()) == facts_of_tarfile(buffer.getvalue())


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_everyday_4_a_damaged_archive_is_an_error_or_read_alike(data: st.DataObject) -> None:
    """One byte changed anywhere: an error, or an answer that the two readers share where both give one."""
    raw = bytearray(make_tar(Member("d" * 99 + "/f", b"x" * 700), Member("g", b"y"), format=tarfile.GNU_FORMAT))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        mine = facts(bytes(raw))
    except ImageError:
        return
    try:
        theirs = facts_of_tarfile(bytes(raw))
    except (tarfile.TarError, KeyError, ValueError):
        return
    assert mine[: len(theirs)] == theirs[: len(mine)]


@pytest.mark.parametrize("form", ["gnu", "oldgnu", "pax", "posix", "ustar"])
def test_everyday_4_it_reads_what_gnu_tar_writes(form: str, tmp_path: Path) -> None:
    top = tmp_path / "tree"
    names = ["short", "d" * 95 + "/f", "a/" * 60 + "deep"]
    if form != "ustar":  # it cannot split these
        names += ["d" * 97 + "/file.rb", "d" * 100 + "/x", "e" * 200, "a/" * 49 + "b/" + "n" * 120]
    for name in names:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(1000))
    (top / "link").symlink_to("d" * 95 + "/f")
    os.link(top / "short", top / "twin")
    archive = tmp_path / "a.tar"
    subprocess.run(["tar", "-C", top, f"--format={form}", "-cf", archive, "."], check=True)
    found = {e.name.removeprefix(b"./").rstrip(b"/"): (e, body) for e, body in read_all(archive.read_bytes())}
    linked = {b"short", b"twin"}
    for name in names:
        entry, body = found[name.encode()]
        if entry.kind == HARDLINK:
            assert {entry.name.removeprefix(b"./"), entry.link.removeprefix(b"./")} == linked
            continue
        assert (entry.kind, body) == (REGULAR, (top / name).read_bytes()), name
    assert found[b"link"][0].link == b"d" * 95 + b"/f"
    for directory, _, _ in os.walk(top):
        relative = os.fsencode(os.path.relpath(directory, top))
        assert relative == b"." or found[relative][0].kind == DIRECTORY
