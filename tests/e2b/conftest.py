"""A door of E2B's interface on each runtime, and sandboxes made by the stock SDK."""

import os
from collections.abc import Iterator
from typing import Any

import e2b
import pytest
from lab.e2b import Door, new_key, opened
from lab.sandboxes import Lab


@pytest.fixture(scope="module")
def door(lab: Lab, runtime: str) -> Iterator[Door]:
    if os.geteuid() != 0:
        pytest.skip("needs root: the SDK's usual user is another than root")
    with opened(lab, runtime) as port:
        yield Door(lab, port, new_key(lab), runtime)


@pytest.fixture(scope="module")
def box(door: Door) -> Iterator[Any]:
    """A sandbox for all tests of a module that leave it running."""
    made = e2b.Sandbox.create(timeout=600, envs={"FOO": "bar"}, metadata={"who": "tests"}, **door.options)
    yield made
    made.kill()
