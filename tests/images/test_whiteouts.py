"""Deletions between layers, judged by the kernel: the layers are really mounted with overlayfs and looked at."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab.images import Member, digest_of, directory, make_tar

from atoll.images import Limits
from atoll.images.layers.layers import LayerStore

LISTER = """
import json, os, subprocess, sys
lowers, point = sys.argv[1], sys.argv[2]
options = f"ro,lowerdir={lowers}" + (",userxattr" if sys.argv[3] == "user" else "")
subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, point], check=True)
found = {}
for top, names, files in os.walk(point):
    for name in names:
        found[os.path.relpath(os.path.join(top, name), point)] = "dir"
    for name in files:
        with open(os.path.join(top, name)) as file:
            found[os.path.relpath(os.path.join(top, name), point)] = file.read()
print(json.dumps(found))
"""


def merged(tmp_path: Path, *archives: bytes) -> dict[str, str]:
    """What a process sees that runs on these layers, bottom first."""
    for name in ("layers", "tmp", "point"):
        (tmp_path / name).mkdir(exist_ok=True)
    layers = LayerStore(tmp_path / "layers", tmp_path / "tmp", Limits())
    added = [layers.add(io.BytesIO(raw), digest_of(raw), lambda _count: None).path for raw in archives]
    lowers = ":".join(str(path) for path in dict.fromkeys(reversed([*added, empty(tmp_path)])))
    namespace = ["unshare", "--mount", "--propagation", "private"]
    if os.geteuid() != 0:
        namespace += ["--user", "--map-root-user"]
    command = [*namespace, sys.executable, "-c", LISTER, lowers, str(tmp_path / "point"), layers.flavour.prefix]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0 and os.geteuid() != 0:
        pytest.skip(f"no overlayfs for this user: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    seen: dict[str, str] = json.loads(done.stdout)
    return seen


def empty(tmp_path: Path) -> Path:
    path = tmp_path / "bottom"
    path.mkdir(exist_ok=True)
    return path


LOWER = make_tar(directory("d"), Member("d/old", b"1"), Member("d/kept", b"2"), Member("f", b"3"))


def test_a_deleted_file_is_gone(tmp_path: Path) -> None:
    """A deletion mark hides one name and leaves its neighbours."""
    seen = merged(tmp_path, LOWER, make_tar(Member("d/.wh.old"), Member(".wh.f")))
    assert seen == {"d": "dir", "d/kept": "2"}


def test_a_deleted_directory_is_gone(tmp_path: Path) -> None:
    assert merged(tmp_path, LOWER, make_tar(Member(".wh.d"))) == {"f": "3"}


@pytest.mark.parametrize("first", [True, False])
def test_an_opaque_directory_hides_all_below(tmp_path: Path, first: bool) -> None:
    """An opaque mark hides what lower layers have in the directory, wherever in the layer the mark stands."""
    mark, file = Member("d/.wh..wh..opq"), Member("d/new", b"n")
    seen = merged(tmp_path, LOWER, make_tar(directory("d"), *([mark, file] if first else [file, mark])))
    assert seen == {"d": "dir", "d/new": "n", "f": "3"}


@pytest.mark.parametrize("first", [True, False])
def test_a_directory_deleted_and_made_again_is_new(tmp_path: Path, first: bool) -> None:
    """A directory that one layer deletes and brings again shows nothing of the old one."""
    mark, again = Member(".wh.d"), [directory("d"), Member("d/new", b"n")]
    seen = merged(tmp_path, LOWER, make_tar(*([mark, *again] if first else [*again, mark])))
    assert seen == {"d": "dir", "d/new": "n", "f": "3"}


@pytest.mark.parametrize("first", [True, False])
def test_a_file_deleted_and_made_again_is_new(tmp_path: Path, first: bool) -> None:
    pair = [Member(".wh.f"), Member("f", b"new")]
    assert merged(tmp_path, LOWER, make_tar(*(pair if first else pair[::-1])))["f"] == "new"


def test_a_file_may_come_back_in_a_third_layer(tmp_path: Path) -> None:
    seen = merged(tmp_path, LOWER, make_tar(Member(".wh.d")), make_tar(directory("d"), Member("d/x", b"x")))
    assert seen == {"d": "dir", "d/x": "x", "f": "3"}


def test_a_file_replaces_a_directory_of_a_lower_layer(tmp_path: Path) -> None:
    assert merged(tmp_path, LOWER, make_tar(Member("d", b"now a file"))) == {"d": "now a file", "f": "3"}


def test_leftovers_of_old_storage_drivers_are_ignored(tmp_path: Path) -> None:
    seen = merged(
        tmp_path, LOWER, make_tar(directory(".wh..wh.plnk"), Member(".wh..wh.plnk/1.2", b"x"), Member(".wh..wh.aufs"))
    )
    assert seen == {"d": "dir", "d/old": "1", "d/kept": "2", "f": "3"}
