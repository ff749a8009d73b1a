"""A real ordinary user, made for these tests and removed after them, with and without subordinate ids."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rootless_lab import SOURCE, User, manage, until


@pytest.fixture(scope="session")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """An interpreter and a PYTHONPATH that anybody may read: the checkout's own, or copies of them."""
    packages = Path(sysconfig.get_paths()["purelib"])
    anybody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "test", "-r"]
    readable = [
        subprocess.run([*anybody, path]).returncode == 0 for path in (SOURCE / "atoll", packages, sys.executable)
    ]
    if all(readable):
        yield sys.executable, str(SOURCE)
        return
    with tempfile.TemporaryDirectory(prefix="atoll-code-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        shutil.copytree(SOURCE / "atoll", Path(directory) / "atoll", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(packages, Path(directory) / "packages", ignore=shutil.ignore_patterns("__pycache__"))
        yield os.path.realpath(sys.executable), f"{directory}:{directory}/packages"


@pytest.fixture(scope="module", params=["many ids", "one id"])
def user(request: pytest.FixtureRequest, code: tuple[str, str]) -> Iterator[User]:
    if os.geteuid() != 0 or not all(shutil.which(name, path="/usr/sbin:/usr/bin") for name in ("useradd", "newuidmap")):
        pytest.skip("needs root to make a user, and newuidmap")
    with tempfile.TemporaryDirectory(prefix="atr-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        name = f"atl{os.urandom(4).hex()}"
        manage("/usr/sbin/useradd", "--home-dir", f"{directory}/h", "--create-home", "--shell", "/bin/sh", name)
        try:
            home = Path(directory) / "h"
            if request.param == "one id":
                manage("/usr/sbin/usermod", "--del-subuids", "1-4294967294", "--del-subgids", "1-4294967294", name)
            made = User(name, home.stat().st_uid, home, *code)
            yield made
            made.atoll("daemon", "stop", "--force")
            until(lambda: not made.processes(), "nothing of the user runs")
        finally:
            for process in made.processes():
                subprocess.run(["kill", "-9", process.split()[0]], capture_output=True)
            manage("/usr/sbin/userdel", name)
