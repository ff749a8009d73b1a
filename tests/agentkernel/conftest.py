"""A daemon with a home of its own, `atoll` as people call it, and projects in fresh directories."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import command_line
from lab.command_line import WAIT, Done
from lab.waiting import until

__all__ = ["WAIT", "Cli", "until"]


class Cli(command_line.Cli):
    """Calls by any of the names, from a project's directory."""

    def at(self, directory: str | Path) -> "Cli":
        return Cli(self.home, str(directory), self.name)

    def called(self, name: str) -> "Cli":
        return Cli(self.home, self.directory, name)

    def ok(self, *words: str, **options: Any) -> Done:
        done = self(*words, **options)
        assert done.code == 0, done
        return done

    def names(self) -> list[str]:
        found = self.ok("list", "--json").json["sandboxes"]
        return [row.get("name") or row["session_id"] for row in found]


@pytest.fixture(scope="session")
def home() -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = tempfile.mkdtemp(prefix="atk-")
    yield made
    Cli(made, "/")("daemon", "stop", "--force")
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """An empty project directory that the sandboxes of other users could reach."""
    made = tmp_path / "project"
    made.mkdir()
    return made


@pytest.fixture
def cli(home: str, project: Path) -> Cli:
    return Cli(home, str(project))


@pytest.fixture
def name(cli: Cli) -> Iterator[str]:
    """The name of a sandbox that a test makes."""
    made = f"t{os.urandom(5).hex()}"
    yield made
    cli("remove", made)
