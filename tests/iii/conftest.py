"""One daemon for the function tests, with the operator's settings in its home, and a sandbox for a module."""

import os
from collections.abc import Iterator

import pytest
from lab.functions import FunctionLab


@pytest.fixture(scope="session")
def fn() -> Iterator[FunctionLab]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = FunctionLab()
    yield made
    made.close()


@pytest.fixture
def own_fn() -> Iterator[FunctionLab]:
    """A daemon whose settings a test writes."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = FunctionLab()
    yield made
    made.close()


@pytest.fixture(scope="module")
def box(fn: FunctionLab) -> Iterator[str]:
    """The id of a sandbox for all tests of a module."""
    made = str(fn.create()["sandbox_id"])
    yield made
    fn("sandbox::stop", sandbox_id=made)
