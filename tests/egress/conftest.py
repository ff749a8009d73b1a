"""Fixtures of the egress tests: one world for the session, one sandbox for each test that asks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from egress_world import World, can_make_networks


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    if not can_make_networks():
        pytest.skip("needs root to make network namespaces")
    made = World()
    yield made
    made.close()
