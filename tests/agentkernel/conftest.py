"""A daemon with a home of its own, `atoll` as people call it, and projects in fresh directories."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from finished import Done

import atoll

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(atoll.__file__)))
WAIT = 240
MAIN = "import sys; sys.argv[0] = {name!r}; from atoll.cli import main; sys.exit(main())"


class Cli:
    """Calls `atoll`, or the same program by another name, with one home and one working directory."""

    def __init__(self, home: str, directory: str, name: str = "atoll") -> None:
        self.home = home
        self.directory = directory
        self.name = name
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("ATOLL_", "K8E_", "AGENTKERNEL_"))}
        self.env.update(ATOLL_HOME=home, PYTHONPATH=SOURCE, ATOLL_RUNTIME=os.environ.get("ATOLL_RUNTIME", "container"))

    def at(self, directory: str | Path) -> "Cli":
        return Cli(self.home, str(directory), self.name)

    def called(self, name: str) -> "Cli":
        return Cli(self.home, self.directory, name)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-c", MAIN.format(name=f"/usr/bin/{self.name}"), *words]

    def __call__(self, *words: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Done:
        done = subprocess.run(
            self.command(*words), input=stdin, capture_output=True, timeout=WAIT, cwd=self.directory,
            env={**self.env, **(env or {})},
        )  # fmt: skip
        assert b"Traceback" not in done.stderr, done
        return Done(done.returncode, done.stdout, done.stderr)

    def ok(self, *words: str, **options: Any) -> Done:
        done = self(*words, **options)
        assert done.code == 0, done
        return done

    def popen(self, *words: str, **options: Any) -> "subprocess.Popen[bytes]":
        env = {**self.env, **options.pop("env", {})}
        return subprocess.Popen(self.command(*words), env=env, cwd=self.directory, **options)

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


def until(check: Callable[[], Any], seconds: float = 90) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found
