"""A core on plain processes and its principals: what is decided here does not depend on how a sandbox is isolated."""

import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

from plain_backend import PlainBackend, PlainImages

from atoll.config import Config
from atoll.core import Core


@pytest.fixture
async def core() -> AsyncIterator[Core]:
    with tempfile.TemporaryDirectory(prefix="atl-", dir="/tmp") as directory:
        home = Path(directory)
        made = Core(home, PlainBackend(home / "boxes"), PlainImages(), Config())
        await made.start()
        yield made
        for row in made.store.living():
            await made.sandboxes.end(row["id"], "destroyed", "", "test")
        await made.close()
