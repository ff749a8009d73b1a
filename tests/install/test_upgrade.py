"""From version 0.1.0 to this one, with sandboxes that run: they are adopted with their files and programs."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.command_line import Cli
from lab.sandboxes import RUNTIMES, SOURCE

OLD = "e266df32eb3f"  # 0.1.0
ROOT = Path(SOURCE).parent
pytestmark = pytest.mark.skipif(
    not os.environ.get("ATOLL_TEST_LONG")
    or subprocess.run(["git", "cat-file", "-e", f"{OLD}^{{commit}}"], cwd=ROOT, capture_output=True).returncode != 0,
    reason="sets up version 0.1.0 beside this one, from this repository's history: make test-long",
)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The command of version 0.1.0."""
    import sys

    sys.path.insert(0, str(ROOT))
    from bench.compare.revisions import Revision, prune

    revision = Revision("old", OLD, tmp_path_factory.mktemp("revisions"))
    try:
        revision.make()
        yield [revision.python, str(revision.tree / "scripts" / "atoll")]
    finally:
        revision.remove()
        prune()


@pytest.fixture
def cli() -> Iterator[Cli]:
    import shutil
    import tempfile

    home = tempfile.mkdtemp(prefix="atu-", dir="/tmp")
    made = Cli(home)
    yield made
    made("daemon", "stop", "--force")
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_new_daemon_takes_over_what_the_old_one_ran(old: list[str], cli: Cli, runtime: str) -> None:
    env = {key: value for key, value in cli.env.items() if key != "PYTHONPATH"}

    def before(*words: str) -> str:
        return subprocess.run([*old, *words], env=env, check=True, capture_output=True, text=True).stdout

    before("sandbox", "create", "--name", "kept", "--runtime", runtime)
    before("exec", "kept", "sh", "-c", "echo written > /workspace/f; sleep 4000 > /dev/null 2>&1 &")
    before("sandbox", "create", "--name", "stopped", "--runtime", runtime, "--persistent")
    before("exec", "stopped", "sh", "-c", "echo on disk > /workspace/f")
    before("stop", "stopped")
    pid = before("daemon", "status").partition("pid ")[2].partition(")")[0].split()[0]
    os.kill(int(pid), 9)

    assert cli("exec", "kept", "cat", "/workspace/f").text == "written\n"
    assert cli("exec", "kept", "sh", "-c", "ps ax | grep -c '[s]leep 4000'").text == "1\n"
    assert cli("sandbox", "run", "--session-id", "kept", "print(6 * 7)", "--lang", "python", "--raw").text == "42\n"
    assert cli("start", "stopped").code == 0
    assert cli("exec", "stopped", "cat", "/workspace/f").text == "on disk\n"
    for name in ("kept", "stopped"):
        assert cli("sandbox", "destroy", name).code == 0
