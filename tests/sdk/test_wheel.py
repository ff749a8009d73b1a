"""The wheel as a user installs it: built from the tree, installed into an environment of its own."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = """
import atoll, sandbox_client
from sandbox_client import SandboxClient, sandbox_session
print(sandbox_client.__file__)
print(atoll.__file__)
print(atoll.SandboxClient is SandboxClient)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, and the dependencies of this one."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(place)]
    subprocess.run([*build, str(ROOT)], check=True, env={**os.environ, "ATOLL_SKIP_CARGO": "1"})
    (wheel,) = place.glob("atoll-*.whl")
    venv.create(place / "env", with_pip=True)
    python = place / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (site,) = (place / "env" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    return python


def test_everyday_8_sandbox_client_is_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run([installed, "-c", EXAMPLE], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    module, package, same = ran.stdout.splitlines()
    environment = str(installed.parent.parent)
    assert module.startswith(environment) and package.startswith(environment) and same == "True"
