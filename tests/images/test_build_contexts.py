"""Contexts of builds that an attacker wrote: nothing leaves its directory, nothing grows without being counted."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from lab.images import Member, directory, make_tar

from atoll.errors import AtollError, Exhausted, InvalidArgument
from atoll.images.build.context import Context
from atoll.images.build.copying import Copier, Copy
from atoll.images.build.tree import Tree
from atoll.images.layers.limits import Limits


def context(tmp_path: Path, *members: Member) -> Context:
    place = tmp_path / "files"
    place.mkdir()
    made = Context(place, Limits())
    made.read(io.BytesIO(make_tar(*members)))
    return made


def link(name: str, target: str) -> Member:
    return Member(name, kind=tarfile.SYMTYPE, link=target)


def copied(made: Context, tmp_path: Path, *sources: str, target: str = "/x/") -> list[str]:
    empty = tmp_path / "empty"
    empty.mkdir(exist_ok=True)
    copier = Copier(Copy(sources, target, "/"), made, Tree([empty]), Limits())
    return [node.path for node in copier.entries()]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "a/../b"])
def test_a_path_that_climbs_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument):
        context(tmp_path, Member(name, b"x"))


@pytest.mark.parametrize("target", ["/etc/passwd", "../../etc/passwd", "b"])
def test_a_link_out_of_the_context_or_in_a_circle_is_refused(tmp_path: Path, target: str) -> None:
    made = context(tmp_path, link("a", target), link("b", "a"))
    with pytest.raises(InvalidArgument, match="out of the context"):
        copied(made, tmp_path, "a")


def test_links_below_a_directory_are_copied_as_links(tmp_path: Path) -> None:
    made = context(tmp_path, directory("d"), link("d/l", "/etc/passwd"), Member("d/f", b"x"))
    assert copied(made, tmp_path, "d") == ["x", "x/f", "x/l"]


def test_nothing_is_copied_over_what_sandboxes_have_of_their_own(tmp_path: Path) -> None:
    made = context(tmp_path, Member("f", b"x"), Member("d/.wh.x", b""))
    for target in ("/proc/f", "/dev/f", "/workspace/f"):
        with pytest.raises(InvalidArgument, match="cannot hold"):
            copied(made, tmp_path, "f", target=target)
    with pytest.raises(InvalidArgument, match="cannot hold"):
        copied(made, tmp_path, "d")


def test_an_archive_that_inflates_ends_at_the_owners_cap(tmp_path: Path) -> None:
    place = tmp_path / "files"
    place.mkdir()
    held = 0

    def grow(size: int) -> None:
        nonlocal held
        held += size
        if held > 8 << 20:
            raise Exhausted("this owner may hold 8 MB of disk")

    small = gzip.compress(make_tar(Member("zeros", bytes(64 << 20))), 9)
    assert len(small) < 1 << 20
    with pytest.raises(Exhausted):
        Context(place, Limits(), grow).read(io.BytesIO(small))
    assert sum(file.stat().st_size for file in place.iterdir()) <= 8 << 20


def test_a_cut_archive_and_too_many_files_are_errors(tmp_path: Path) -> None:
    whole = make_tar(*(Member(f"f{n}", b"x" * 600) for n in range(20)))
    place = tmp_path / "files"
    place.mkdir()
    with pytest.raises(AtollError):
        Context(place, Limits()).read(io.BytesIO(whole[:700]))
    with pytest.raises(AtollError, match="at most 10 files"):
        Context(place, Limits(entries=10)).read(io.BytesIO(whole))


def test_ignored_files_are_not_copied(tmp_path: Path) -> None:
    ignored = Member(".dockerignore", b"*.log\nd\n!d/keep\n")
    made = context(tmp_path, ignored, Member("a.log"), Member("b"), Member("d/keep"), Member("d/no"))
    assert copied(made, tmp_path, ".") == ["x", "x/.dockerignore", "x/b", "x/d", "x/d/keep"]
    with pytest.raises(InvalidArgument, match="not there"):
        copied(made, tmp_path, "a.log")


def test_links_of_an_image_lead_nowhere_on_this_machine(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "other").symlink_to("/etc")
    (layer / "up").symlink_to("../../../..")
    image = Tree([layer])
    assert image.text("other/passwd") == ""
    assert image.resolve("up/etc/passwd") is None


def test_a_pattern_that_takes_too_long_to_match_is_refused(tmp_path: Path) -> None:
    """Each character of a long name is compared with each of a long class: the whole step has a bound."""
    made = context(tmp_path, *(Member(f"{number:04}{'a' * 90}", b"") for number in range(200)))
    assert len(copied(made, tmp_path, "*[a-c]*")) > 200
    with pytest.raises(InvalidArgument, match="too long to match"):
        copied(made, tmp_path, f"*[{'b' * 4000}]b")
