"""A sandbox with an interpreter, by atoll's own SDK."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import interpreter
from lab.sandboxes import HELD, Lab

import atoll

ROOM = {"memory_mb": 768} if HELD else {}


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built layers of the interpreter's image."""
    return interpreter.share(tmp_path_factory)


@pytest.fixture(scope="module")
def notebook(lab: Lab, runtime: str, layers: Path) -> Iterator[atoll.Sandbox]:
    """A sandbox that the tests of a module share."""
    interpreter.give(lab, layers)
    made = atoll.Sandbox.create(home=lab.home, image="code-interpreter-v1", runtime=runtime, env={"FOO": "bar"}, **ROOM)
    yield made
    made.destroy()
    made.close()
