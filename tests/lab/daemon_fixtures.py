"""Fixtures on a real daemon; a conftest that wants them imports them by name."""

from collections.abc import Iterator

import pytest

from lab.daemon import Box, DaemonProcess, running_daemon


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
