"""The code where an ordinary user can read it, and that user, with and without subordinate ids."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.rootless import SOURCE, User, ordinary_user


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


@pytest.fixture(scope="session", params=["many ids", "one id"])
def user(request: pytest.FixtureRequest, code: tuple[str, str]) -> Iterator[User]:
    with ordinary_user(code, many_ids=request.param == "many ids") as made:
        yield made
