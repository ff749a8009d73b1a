"""A door of E2B's interface on each runtime, and sandboxes made by the stock SDK."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import e2b
import e2b_code_interpreter
import pytest
from lab import interpreter
from lab.e2b import Door, new_key, opened
from lab.sandboxes import Lab

SLOW = {"request_timeout": 300}  # a machine that does other things too takes its time


@pytest.fixture(scope="session")
def ports(lab: Lab) -> Iterator[Callable[[str], int]]:
    """The port of a runtime's door, which is opened once for all modules."""
    with ExitStack() as open_doors:
        yield cache(lambda runtime: open_doors.enter_context(opened(lab, runtime)))


@pytest.fixture(scope="module")
def door(lab: Lab, runtime: str, ports: Callable[[str], int]) -> Door:
    """A key for each module, so that none sees the sandboxes of another."""
    if os.geteuid() != 0:
        pytest.skip("needs root: the SDK's usual user is another than root")
    return Door(lab, ports(runtime), new_key(lab), runtime)


@pytest.fixture(scope="module")
def box(door: Door) -> Iterator[Any]:
    """A sandbox for all tests of a module that leave it running."""
    made = e2b.Sandbox.create(timeout=600, envs={"FOO": "bar"}, metadata={"who": "tests"}, **door.options)
    yield made
    made.kill()


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built layers of the interpreter's image."""
    return interpreter.share(tmp_path_factory)


@pytest.fixture(scope="module")
def code_door(door: Door, layers: Path) -> Door:
    """The same door, of a daemon that has the interpreter's image."""
    interpreter.give(door.lab, layers)
    return door


@pytest.fixture(scope="module")
def code_box(code_door: Door) -> Iterator[Any]:
    """A sandbox with an interpreter, for all tests of a module that leave it running."""
    made = e2b_code_interpreter.Sandbox.create(timeout=1200, envs={"FOO": "bar"}, **code_door.options, **SLOW)
    yield made
    made.kill()
