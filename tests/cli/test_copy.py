"""`atoll cp` both ways, and a hostile sandbox copied out (FIL-10)."""

import os
from pathlib import Path

import pytest

from .conftest import Cli


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "sub/empty").mkdir(parents=True)
    (top / "sub/data.bin").write_bytes(os.urandom(400_000))
    (top / "run.sh").write_text("#!/bin/sh\necho ran\n")
    os.chmod(top / "run.sh", 0o755)
    os.symlink("sub/data.bin", top / "link")
    return top


def shape(top: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in top.rglob("*"):
        name = str(path.relative_to(top))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def test_files_go_in_and_out(cli: Cli, box: str, tree: Path, tmp_path: Path) -> None:
    assert cli("cp", str(tree / "run.sh"), f"{box}:/workspace/").code == 0
    assert cli("exec", box, "/workspace/run.sh").stdout == b"ran\n"  # the mode came along
    assert cli("cp", str(tree / "sub/data.bin"), f"{box}:/workspace/new/place.bin").code == 0
    assert cli("cp", f"{box}:/workspace/new/place.bin", str(tmp_path / "back")).code == 0
    assert (tmp_path / "back").read_bytes() == (tree / "sub/data.bin").read_bytes()
    assert cli("cp", f"{box}:/workspace/run.sh", str(tmp_path)).code == 0
    assert (tmp_path / "run.sh").stat().st_mode & 0o777 == 0o755


def test_trees_go_in_and_out(cli: Cli, box: str, tree: Path, tmp_path: Path) -> None:
    assert cli("cp", str(tree), f"{box}:/workspace/t1").code == 0
    assert cli("cp", str(tree), f"{box}:/workspace/t1").code == 0  # now a directory: into it
    assert cli("exec", box, "test", "-f", "/workspace/t1/tree/sub/data.bin").code == 0
    assert cli("exec", box, "rm", "-r", "/workspace/t1/tree").code == 0
    assert cli("cp", f"{box}:/workspace/t1", str(tmp_path / "out")).code == 0
    assert shape(tmp_path / "out") == shape(tree)
    assert cli("cp", f"{box}:/workspace/t1", str(tmp_path)).code == 0
    assert shape(tmp_path / "t1") == shape(tree)


def test_standard_input_and_output(cli: Cli, box: str) -> None:
    data = os.urandom(1_000_000)
    assert cli("cp", "-", f"{box}:/workspace/piped", stdin=data).code == 0
    assert cli("cp", f"{box}:/workspace/piped", "-").stdout == data


def test_a_hostile_tree_stays_in_its_place(cli: Cli, box: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    code = f"""
mkdir -p /workspace/evil/d && cd /workspace/evil
ln -s /etc/passwd abs; ln -s ../../canary up; ln -s {tmp_path} out; ln -s d/../../.. sly
mkfifo pipe; echo good > good; ln good hard; ln -s good fine; chmod 4755 good
"""
    cli.ok("sandbox", "run", code, "--session-id", box)
    target = tmp_path / "target"
    target.mkdir()
    planted = target / "evil"
    planted.mkdir()
    os.symlink(canary, planted / "good")  # what the person had lying there
    done = cli("cp", f"{box}:/workspace/evil", str(target))
    assert done.code == 1 and b"not copied" in done.stderr
    assert canary.read_text() == "untouched"
    for name in ("abs", "up", "out", "sly"):
        assert name.encode() in done.stderr and not os.path.lexists(planted / name)
    assert not os.path.lexists(planted / "pipe")
    assert os.readlink(planted / "good") == str(canary)  # refused, not replaced, not followed
    assert os.readlink(planted / "fine") == "good"
    clean = tmp_path / "clean"
    cli("cp", f"{box}:/workspace/evil", str(clean))
    assert (clean / "good").read_text() == "good\n" and (clean / "good").stat().st_mode & 0o7777 == 0o755
    assert (clean / "hard").stat().st_ino == (clean / "good").stat().st_ino


def test_a_planted_directory_link_is_not_entered(cli: Cli, box: str, tmp_path: Path) -> None:
    cli.ok("sandbox", "write", box, "/workspace/pl/sub/x", stdin=b"x")
    outside = tmp_path / "outside"
    outside.mkdir()
    target = tmp_path / "pl"
    target.mkdir()
    os.symlink(outside, target / "sub")
    assert cli("cp", f"{box}:/workspace/pl", str(tmp_path)).code == 1
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "target", "code"),
    [("a", "b", 2), ("{}:/a", "{}:/b", 2), ("{}:", "x", 2), ("/no/such/file", "{}:/workspace/x", 125),
     ("{}:/no/such", "x", 125), ("nobody:/x", "-", 125), ("/dev/null", "{}:/workspace/x", 125)],
)  # fmt: skip
def test_what_cannot_be_copied(cli: Cli, box: str, source: str, target: str, code: int) -> None:
    done = cli("cp", source.format(box), target.format(box))
    assert done.code == code and done.stderr.startswith(b"atoll: ") and not os.path.exists("x")


def test_everyday_29_file_verbs_with_the_rights_of_a_user(cli: Cli, box: str, tree: Path, tmp_path: Path) -> None:
    cli("exec", box, "sh", "-c", "mkdir -pm 777 /workspace/u29; umask 077; echo root > /workspace/u29/private")
    assert cli("cp", "--user", "nobody", str(tree), f"{box}:/workspace/u29/tree").code == 0
    for name in ("atoll", "agentkernel"):
        words = ("sandbox", "cp", "--user", "nobody", str(tree), f"{box}:/workspace/u29/{name}")
        assert cli(*words, name=name).code == 0 and cli("exec", box, "stat", "-c%u", f"u29/{name}").stdout == b"65534\n"
    assert cli("cp", "-u", "nobody", str(tree / "run.sh"), f"{box}:/workspace/u29/run.sh").code == 0
    assert cli("sandbox", "write", box, "/workspace/u29/note", "--user", "65534", stdin=b"n").code == 0
    owners = cli(
        "exec", box, "sh", "-c", "stat -c %u /workspace/u29/tree/sub/data.bin /workspace/u29/run.sh /workspace/u29/note"
    )
    assert owners.text.split() == ["65534"] * 3
    assert cli.ok("sandbox", "read", box, "/workspace/u29/note", "--user", "nobody")["content"] == "n"
    assert cli("cp", "-u", "nobody", f"{box}:/workspace/u29/tree", str(tmp_path / "out")).code == 0
    assert shape(tmp_path / "out") == shape(tree)
    listed = cli.ok("sandbox", "list", box, "--user", "nobody")["files"]
    assert "/workspace/u29/note" in [item["path"] for item in listed]
    for words in (
        ("cp", "-u", "nobody", f"{box}:/workspace/u29/private", "-"),
        ("sandbox", "read", box, "/workspace/u29/private", "--user", "nobody"),
        ("sandbox", "write", box, "/workspace/u29/private", "--user", "nobody"),
        ("sandbox", "read", box, "/workspace/u29/note", "--user", "no-such-user"),
        ("sandbox", "read", box, "/workspace/u29/note", "--user", "a b;c"),
        ("sandbox", "read", box, "/workspace/u29/note", "--user", "x" * 5000),
    ):
        done = cli(*words)
        assert done.code != 0 and b"root" not in done.stdout, words
    assert cli("sandbox", "read", box, "/workspace/u29/private", "--raw").stdout == b"root\n"
