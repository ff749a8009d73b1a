"""Fixtures: a real daemon, and `atoll` as people call it."""

import pytest
from lab.daemon import DaemonProcess
from lab.daemon_fixtures import box, daemon, own_daemon
from lab.terminal import Atoll

__all__ = ["atoll", "box", "daemon", "own_daemon"]


@pytest.fixture(scope="module")
def atoll(daemon: DaemonProcess) -> Atoll:
    return Atoll(daemon.home)
