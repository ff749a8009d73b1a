"""Fixtures of the network tests: one lab for the session, its sandboxes once for each runtime that works here."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lab.network import Box, Lab


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = Lab()
    made.start()
    yield made
    made.close()


@pytest.fixture
def own_lab() -> Iterator[Lab]:
    """A lab whose daemon a test may kill."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = Lab()
    made.start()
    yield made
    made.close()


@pytest.fixture(params=["container", "gvisor"])
def runtime(request: pytest.FixtureRequest, lab: Lab) -> str:
    if not lab.works(request.param):
        pytest.skip(f"{request.param} does not work here")
    return str(request.param)


@pytest.fixture
def make(lab: Lab, runtime: str) -> Iterator[Callable[..., Box]]:
    """Makes sandboxes that are gone after the test."""
    made: list[Box] = []

    def create(**fields: Any) -> Box:
        box = lab.create(**{"runtime": runtime, **fields})
        made.append(box)
        return box

    yield create
    for box in made:
        box.destroy()
