"""The stock JavaScript SDK, as it is on npm."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from lab import npm
from lab.e2b import Door
from lab.sandboxes import ONE_RUNTIME
from lab.waiting import PATIENCE

VERSION = "2.51.0"


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = npm.install(tmp_path_factory.mktemp("npm"), f"e2b@{VERSION}")
    shutil.copy(Path(__file__).with_name("use.mjs"), place)
    return place


@pytest.mark.parametrize("runtime", ONE_RUNTIME, indirect=True, scope="module")
def test_every_method(door: Door, package: Path) -> None:
    env = {**os.environ, **door.env, "MARK": os.urandom(8).hex()}
    done = subprocess.run(["node", "use.mjs"], cwd=package, env=env, capture_output=True, timeout=4 * PATIENCE)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert found.pop("info") == ["base", True, "running"]
    assert found == {
        "running": True, "metrics": True, "host": True, "list": [True], "connect": "bar\n", "fork": "SandboxError",
        "snapshot": "SandboxError", "snapshots": 0, "run": ["out\n", "err\n", 0, "out\n"], "exit": ["CommandExitError", 5],
        "timeout": "TimeoutError", "cwd": "InvalidArgumentError", "user": "root\n", "listed": True,
        "stdin": ["typed\n", "typed\n"], "kill": [True, False], "pty": True, "ptyKill": True, "write": "/home/user/js/a file",
        "read": ["grüße", 7], "blob": "grüße", "stream": 7, "many": ["b", "c"], "dir": [True, False],
        "names": [["a file", "file"], ["b", "file"], ["c", "file"], ["dir", "dir"]], "stat": 1, "rename": "/home/user/js/dir/d",
        "exists": [True, False], "missing": "FileNotFoundError",
        "events": ["create new", "chmod new", "write new", "remove new"], "signed": "grüße", "sent": 200, "up": "sent",
        "pause": [True, False, False], "again": "sent", "end": [True, False, False], "gone": "SandboxNotFoundError",
    }  # fmt: skip
