"""The stock command line `@e2b/cli`, as it is on npm: templates from Dockerfiles, and sandboxes of them."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from lab import npm
from lab.e2b import Door
from lab.sandboxes import ONE_RUNTIME
from lab.waiting import PATIENCE

VERSION = "2.19.0"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return npm.install(tmp_path_factory.mktemp("npm-cli"), f"@e2b/cli@{VERSION}") / "node_modules/.bin/e2b"


@pytest.mark.parametrize("runtime", ONE_RUNTIME, indirect=True, scope="module")
def test_templates_and_sandboxes(door: Door, program: Path, tmp_path: Path) -> None:
    env = {**os.environ, **door.env, "HOME": str(tmp_path), "NO_COLOR": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [program, *words],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=4 * PATIENCE,
        )
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
        return done.stdout.decode()

    name = f"cli-{os.urandom(4).hex()}"
    (tmp_path / "note").write_text("from the context\n")
    (tmp_path / "e2b.Dockerfile").write_text(
        "FROM e2bdev/base\nENV COLOUR=blue\nCOPY note /home/user/note\nRUN echo $COLOUR > /home/user/made\n"
    )
    assert f"template {name} finished" in run("template", "create", name, "--memory-mb", "256", "--cpu-count", "1")
    assert name in run("template", "list")
    made = run("sandbox", "create", "--detach", name)
    found = re.search(r"[a-z2-7]{20}", made)
    assert found, made
    assert found[0] in run("sandbox", "list")
    assert run("sandbox", "exec", found[0], "cat", "/home/user/note", "/home/user/made") == "from the context\nblue\n"
    run("sandbox", "kill", found[0])
    assert found[0] not in run("sandbox", "list")
    run("template", "delete", "--yes", name)
    assert name not in run("template", "list")
