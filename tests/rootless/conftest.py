"""The code where an ordinary user can read it, and that user, with and without subordinate ids."""

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.orphans import PR_SET_CHILD_SUBREAPER
from lab.rootless import SOURCE, User, ordinary_user


@pytest.fixture(autouse=True)
def no_subreaper() -> None:
    """Give up the orphans that tests of the backend have claimed for this process: it would keep the users' dead daemons."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


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
        shutil.copytree(SOURCE / "atoll", Path(directory) / "atoll")  # with what is compiled: nobody can add that later
        shutil.copytree(packages, Path(directory) / "packages")
        yield os.path.realpath(sys.executable), f"{directory}:{directory}/packages"


@pytest.fixture(scope="session", params=["many ids", "one id"])
def user(request: pytest.FixtureRequest, code: tuple[str, str]) -> Iterator[User]:
    with ordinary_user(code, many_ids=request.param == "many ids") as made:
        yield made
