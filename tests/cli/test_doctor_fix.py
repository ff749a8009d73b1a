"""`atoll doctor --fix`: one line a cause, the most useful first; what it does, what it leaves, and what it asks."""

import shutil
import sys
from pathlib import Path

import pytest

from atoll.cli.doctor_causes import causes, public
from atoll.cli.doctor_machine import Machine, check, lacking

from .conftest import Cli

INSTALLER = """#!/bin/sh
echo "$@" >> {place}/asked
[ ! -e {place}/broken ] || exit 100
ln -s {runc} {place}/bin/runc
"""


@pytest.fixture
def without_runc(fresh: Cli, tmp_path: Path) -> Cli:
    """A machine whose PATH has no runc, and an `apt-get` that brings it."""
    runc = shutil.which("runc", path="/usr/bin:/usr/sbin:/usr/local/bin")
    if runc is None:
        pytest.skip("needs runc on this machine")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "ln", "cat", "runsc"):
        if found := shutil.which(name, path="/bin:/usr/bin:/usr/local/bin:" + str(Path.home() / ".local/bin")):
            (programs / name).symlink_to(found)
    (programs / "python3").symlink_to(sys.executable)
    installer = programs / "apt-get"
    installer.write_text(INSTALLER.format(place=tmp_path, runc=runc))
    installer.chmod(0o755)
    fresh.env["PATH"] = str(programs)
    return fresh


def test_it_asks_does_and_looks_again(without_runc: Cli, tmp_path: Path) -> None:
    """Nothing is done unasked; a command that fails is left and told; one that works is counted."""
    found = without_runc("doctor", "--json").json
    first = found["causes"][0]
    assert "container engine" in first["names"] and first["needed"] and "apt-get install -y runc" in first["fix"], found
    unasked = without_runc("doctor", "--fix")
    assert b"--yes" in unasked.stderr and not (tmp_path / "asked").exists(), unasked
    assert unasked.stdout.startswith(b"FAIL  container engine"), unasked

    (tmp_path / "broken").touch()
    failed = without_runc("doctor", "--fix", "--yes", "--json")
    assert failed.code == 1 and failed.json["fixed"] == 0, failed
    assert {"command": first["fix"], "ok": False} in failed.json["done"]
    assert first["names"] in [one["names"] for one in failed.json["causes"]], "it is left, and told"

    (tmp_path / "broken").unlink()
    mended = without_runc("doctor", "--fix", "--yes", "--json")
    assert mended.json["fixed"] == 1 and {"command": first["fix"], "ok": True} in mended.json["done"], mended
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "install -y runc"
    rows = {row["name"]: row for row in mended.json["checks"]}
    assert rows["container engine"]["ok"] and not any(key.startswith("_") for row in rows.values() for key in row)


def test_what_is_mended_by_one_command_is_one_line(tmp_path: Path) -> None:
    """Packages of several checks are one command of this machine's package manager; problems come before notes."""
    for manager, command in (
        ("apt-get", "apt-get install -y nftables uidmap"),
        ("dnf", "dnf install -y nftables shadow-utils"),
    ):
        root = tmp_path / manager
        (root / "usr/bin").mkdir(parents=True)
        (root / "usr/bin" / manager).touch()
        machine = Machine(str(root), 1000, "somebody")
        rows = [
            check("swap", False, "not encrypted", "swapoff -a", optional=True),
            lacking(machine, "nftables", False, "nft is missing", "nftables"),
            lacking(machine, "id ranges", False, "newuidmap not found", "uidmap"),
            check("kernel", False, "Linux 4.19", "use a kernel of 5.12 or newer"),
            check("disk", True, "plenty"),
        ]
        found = causes(rows, machine)
        assert [cause.names for cause in found] == [["kernel"], ["nftables", "id ranges"], ["swap"]]
        assert found[1].fix == found[1].run == f"sudo {command}"
        assert not found[0].run and not found[2].run, "a choice of the person's, and what no command can do"
        assert all(set(row) <= {"name", "ok", "detail", "fix", "optional"} for row in public(rows))
