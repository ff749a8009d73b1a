"""A daemon with a home of its own for the CLI's tests, and `atoll` as people call it: a process."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from finished import Done

import atoll

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(atoll.__file__)))
WAIT = 180


class Cli:
    """Calls `atoll` with one home."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("ATOLL_", "K8E_"))}
        self.env.update(ATOLL_HOME=home, PYTHONPATH=SOURCE)
        self.env["ATOLL_RUNTIME"] = os.environ.get("ATOLL_RUNTIME", "container")  # behaviour tests cover every runtime

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "atoll", *words]

    def __call__(self, *words: str, stdin: bytes | None = None, env: dict[str, str] | None = None) -> Done:
        done = subprocess.run(
            self.command(*words), input=stdin if stdin is not None else b"", capture_output=True, timeout=WAIT,
            env={**self.env, **(env or {})},
        )  # fmt: skip
        assert b"Traceback" not in done.stderr + done.stdout, done
        return Done(done.returncode, done.stdout, done.stderr)

    def popen(self, *words: str, **options: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self.command(*words), env={**self.env, **options.pop("env", {})}, **options)

    def ok(self, *words: str, **options: Any) -> Any:
        done = self(*words, **options)
        assert done.code == 0, done
        return done.json


def bury(cli: Cli) -> None:
    cli("daemon", "stop", "--force")
    shutil.rmtree(cli.home, ignore_errors=True)


@pytest.fixture(scope="session")
def cli() -> Iterator[Cli]:
    made = Cli(tempfile.mkdtemp(prefix="atc-"))
    try:
        yield made
    finally:
        bury(made)


@pytest.fixture
def fresh() -> Iterator[Cli]:
    """A home nobody has used yet: no daemon, no state."""
    made = Cli(tempfile.mkdtemp(prefix="atf-"))
    try:
        yield made
    finally:
        bury(made)


@pytest.fixture(scope="module")
def box(cli: Cli) -> Iterator[str]:
    """The session id of a sandbox for one module."""
    session = cli.ok("sandbox", "create")["session_id"]
    yield session
    cli("sandbox", "destroy", session)


@pytest.fixture
def tenant(cli: Cli) -> Iterator[str]:
    """A tenant of the test's own, so that its automatic sandbox is too."""
    name = f"t-{os.urandom(5).hex()}"
    yield name
    cli("sandbox", "destroy", "--tenant", name)
