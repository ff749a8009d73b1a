"""A daemon with a home of its own for the CLI's tests, and `atoll` as people call it: a process."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from lab.command_line import WAIT, Cli, Done

__all__ = ["WAIT", "Cli", "Done"]


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
