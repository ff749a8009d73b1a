"""Fixtures of the egress tests: one world for the session, one sandbox for each test that asks."""

from collections.abc import Iterator

import pytest
from lab.internet import World, can_make_networks


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    if not can_make_networks():
        pytest.skip("needs root to make network namespaces")
    made = World()
    yield made
    made.close()
