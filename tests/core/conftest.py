"""Fixtures of the core tests: a real daemon with real sandboxes, and a core on the plain backend for faults."""

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from daemon_lab import Box, DaemonProcess
from plain_backend import PlainBackend, PlainImages

from atoll.config import Config
from atoll.core import Core
from atoll.core.access import Principal, local


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = DaemonProcess()
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def box(daemon: DaemonProcess) -> Box:
    """One sandbox for all tests of a module that leave it as they found it."""
    return daemon.create()


@pytest.fixture
def own_daemon() -> Iterator[DaemonProcess]:
    """A daemon that a test may kill."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = DaemonProcess()
    made.start()
    yield made
    made.close()


@pytest.fixture
def who() -> Principal:
    return local(os.geteuid(), os.getegid())


@pytest.fixture
async def plain() -> AsyncIterator[Core]:
    """A core whose sandboxes are plain processes."""
    with tempfile.TemporaryDirectory(prefix="atl-", dir="/tmp") as directory:
        home = Path(directory)
        core = Core(home, PlainBackend(home / "boxes"), PlainImages(), Config())
        await core.start()
        yield core
        for row in core.store.living():
            await core.sandboxes.end(row["id"], "destroyed", "", "test")
        await core.close()
