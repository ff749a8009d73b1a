"""A real daemon with real sandboxes for the tests of snapshots."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

from daemon_lab import Box, DaemonProcess


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = DaemonProcess()
    made.start()
    yield made
    made.close()


@pytest.fixture
def box(daemon: DaemonProcess) -> Iterator[Box]:
    made = daemon.create()
    yield made
    made.destroy()
