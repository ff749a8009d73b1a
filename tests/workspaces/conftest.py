"""Fixtures: a real daemon, and `atoll` as people call it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from daemon_fixtures import box, daemon, own_daemon
from daemon_lab import DaemonProcess
from workspace_lab import Atoll

__all__ = ["atoll", "box", "daemon", "own_daemon"]


@pytest.fixture(scope="module")
def atoll(daemon: DaemonProcess) -> Atoll:
    return Atoll(daemon.home)
