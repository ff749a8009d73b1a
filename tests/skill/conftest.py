"""A home and a project of their own, and `atoll skill` as people call it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import atoll

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(atoll.__file__)))


class Place:
    """Where a call happens, and what it printed."""

    def __init__(self, root: Path) -> None:
        self.home = root / "home"
        self.project = root / "project"
        self.home.mkdir()
        self.project.mkdir()
        self.code = 0
        self.out = ""

    def __call__(self, *words: str, **env: str) -> list[str]:
        """The lines of stdout after the first, which names the directory."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ATOLL_", "K8E_", "AGENTKERNEL_", "DSH_"))}
        done = subprocess.run(
            [sys.executable, "-m", "atoll", *words], capture_output=True, text=True, timeout=120, cwd=self.project,
            env={**kept, "HOME": str(self.home), "PYTHONPATH": SOURCE, **env},
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        self.code, self.out = done.returncode, done.stdout + done.stderr
        return done.stdout.splitlines()[1:]

    def snapshot(self) -> dict[str, bytes]:
        root = self.home.parent
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def write(place: Place) -> Callable[[str, str], Path]:
    def make(name: str, text: str) -> Path:
        path = place.home.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return make
