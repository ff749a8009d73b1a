"""One row from end to end, as `make bench` runs it: figures, files, and nothing left on the machine."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path: sockets live below it."""
    made = Path(tempfile.mkdtemp(prefix="atbt-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_a_row_is_measured_and_nothing_is_left(place: Path) -> None:
    env = {**os.environ, "TMPDIR": str(place)}
    argv = [sys.executable, "-m", "bench", "--quick", "--only", "exec-true", "--out", str(place / "out")]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = json.loads((place / "out" / "results.json").read_text())["rows"]
    assert [row["id"] for row in rows] == ["exec-true"]
    for figure in rows[0]["figures"]:
        assert figure["p50"] > 0 and not figure["failures"], figure
    assert {figure["name"] for figure in rows[0]["figures"]} > {"bare subprocess"}
    assert sorted(path.name for path in place.iterdir()) == ["out"]
    assert str(place) not in Path("/proc/self/mountinfo").read_text()
