"""Fixtures: a real daemon, and `atoll` as people call it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from daemon_lab import Box, DaemonProcess, running_daemon
from workspace_lab import Atoll


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon() as made:
        yield made


@pytest.fixture
def own_daemon() -> Iterator[DaemonProcess]:
    """A daemon that a test may kill."""
    with running_daemon() as made:
        yield made


@pytest.fixture
def box(daemon: DaemonProcess) -> Iterator[Box]:
    made = daemon.create()
    yield made
    made.destroy()


@pytest.fixture(scope="module")
def atoll(daemon: DaemonProcess) -> Atoll:
    return Atoll(daemon.home)
