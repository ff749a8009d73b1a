"""A real daemon with real sandboxes for the tests of snapshots."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

from daemon_lab import Box, DaemonProcess, running_daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon() as made:
        yield made


@pytest.fixture
def box(daemon: DaemonProcess) -> Iterator[Box]:
    made = daemon.create()
    yield made
    made.destroy()
