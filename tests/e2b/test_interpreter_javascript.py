"""The stock JavaScript code interpreter SDK, as it is on npm."""

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

VERSION = "2.8.0"


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = npm.install(tmp_path_factory.mktemp("npm"), f"@e2b/code-interpreter@{VERSION}")
    shutil.copy(Path(__file__).with_name("use_interpreter.mjs"), place)
    return place


@pytest.mark.parametrize("runtime", ONE_RUNTIME, indirect=True, scope="module")
def test_every_method(code_door: Door, package: Path) -> None:
    env = {**os.environ, **code_door.env}
    command = ["node", "use_interpreter.mjs"]
    done = subprocess.run(command, cwd=package, env=env, capture_output=True, timeout=10 * PATIENCE)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == {
        "python": ["bar", ["out\n"], ["out\n", "bar"], True], "told": "ZeroDivisionError",
        "error": ["ZeroDivisionError", "division by zero"], "chart": ["bar", True], "js": "2", "envs": "x",
        "context": ["python", "/tmp", "/tmp"], "listed": True, "gone": "NotFoundError", "slow": "TimeoutError", "after": "2",
    }  # fmt: skip
