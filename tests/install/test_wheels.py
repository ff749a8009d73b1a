"""What the wheels hold: programs that need nothing of the machine, or the client alone; the same bytes each time."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from .conftest import build


def test_the_wheel_holds_static_programs_and_names_its_platform(wheel: Path, tmp_path: Path) -> None:
    machine = os.uname().machine
    assert wheel.name.endswith(f"-py3-none-manylinux2014_{machine}.musllinux_1_1_{machine}.whl")
    assert wheel.stat().st_size < 100e6
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for program in ("atoll-guest", "atoll-launch"):
            archive.extract(f"atoll/_bin/{program}", tmp_path)
            head = subprocess.run(
                ["readelf", "-lW", tmp_path / "atoll/_bin" / program], capture_output=True, text=True
            ).stdout
            assert "LOAD" in head and "INTERP" not in head, f"{program} asks for a dynamic linker"
        assert "atoll/setup/install-runsc.sh" in names and "sandbox_client.py" in names
        scripts = [name for name in names if name.endswith(".data/scripts/atoll")]
        assert len(scripts) == 1 and archive.getinfo(scripts[0]).external_attr >> 16 & 0o111
        assert archive.getinfo("atoll/_bin/atoll-guest").external_attr >> 16 & 0o111


def test_the_clients_wheel_is_pure_and_the_client_alone(client_wheel: Path, tmp_path: Path) -> None:
    assert client_wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(client_wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    parts = {name.split("/")[1] for name in names if name.startswith("atoll/") and name.count("/") > 1}
    assert {"cli", "client"} <= parts and not parts & {
        "_bin",
        "core",
        "server",
        "backends",
        "egress",
        "guest",
        "images",
    }
    assert any(name.endswith("entry_points.txt") for name in names)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
    call = [
        sys.executable,
        "-S",
        "-c",
        "import sys; sys.argv[0] = 'atoll'; from atoll.cli import main; sys.exit(main())",
    ]
    help_text = subprocess.run([*call, "--help"], env=env, capture_output=True, text=True)
    assert help_text.returncode == 0 and "sandbox" in help_text.stdout, help_text.stderr


def test_two_builds_give_the_same_bytes(wheel: Path, client_wheel: Path, tmp_path: Path) -> None:
    assert build(tmp_path / "again").read_bytes() == wheel.read_bytes()
    assert build(tmp_path / "client", client=True).read_bytes() == client_wheel.read_bytes()
