"""A core on plain processes and its principals: what is decided here does not depend on how a sandbox is isolated."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

from plain_backend import plain_core

from atoll.core import Core


@pytest.fixture
async def core() -> AsyncIterator[Core]:
    async with plain_core() as made:
        yield made
