"""The programs for arm64 really run: the agent keeps the backend contract under QEMU's user emulation."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

NEEDS = ("aarch64-linux-gnu-gcc", "qemu-aarch64-static")
MISSING = [name for name in NEEDS if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING) or not os.environ.get("ATOLL_TEST_LONG"),
    reason="compiles for another machine: make test-long, with gcc-aarch64-linux-gnu and qemu-user-static",
)


@pytest.fixture(scope="module")
def programs() -> Path:
    call = "import sys; sys.path.insert(0, 'scripts'); import build_release; print(build_release.build_programs('aarch64'))"
    done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def emulated(*words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    script = str(Path(__file__).with_name("emulated.sh"))
    argv = ["unshare", "--user", "--map-root-user", "--mount", "sh", script, *words]
    return subprocess.run(argv, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True)


def test_both_programs_start(programs: Path) -> None:
    assert emulated(str(programs / "atoll-guest"), "version").stdout.strip()
    told = emulated(str(programs / "atoll-launch"))
    assert told.returncode not in (126, 127) and "Exec format" not in told.stderr, told


def test_the_agent_keeps_the_contract(programs: Path) -> None:
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract", "-k", "plain")
    done = emulated(*words, ATOLL_TEST_AGENT=str(programs / "atoll-guest"))
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
