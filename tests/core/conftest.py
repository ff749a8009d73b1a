"""Fixtures of the core tests: a real daemon with real sandboxes, and a core on the plain backend for faults."""

import os
from collections.abc import AsyncIterator

import pytest
from lab.daemon import Box, DaemonProcess
from lab.daemon_fixtures import daemon, own_daemon
from lab.plain_backend import plain_core

from atoll.core import Core
from atoll.core.access.principals import Principal, local

__all__ = ["box", "daemon", "own_daemon", "plain", "who"]


@pytest.fixture(scope="module")
def box(daemon: DaemonProcess) -> Box:
    """One sandbox for all tests of a module that leave it as they found it."""
    return daemon.create()


@pytest.fixture
def who() -> Principal:
    return local(os.geteuid(), os.getegid())


@pytest.fixture
async def plain() -> AsyncIterator[Core]:
    """A core whose sandboxes are plain processes."""
    async with plain_core() as core:
        yield core
