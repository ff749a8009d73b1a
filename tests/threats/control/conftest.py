"""A core on plain processes and its principals: what is decided here does not depend on how a sandbox is isolated."""

from collections.abc import AsyncIterator

import pytest
from lab.plain_backend import plain_core

from atoll.core import Core


@pytest.fixture
async def core() -> AsyncIterator[Core]:
    async with plain_core() as made:
        yield made
