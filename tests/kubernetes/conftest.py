"""Gateways of the test cluster, one for each runtime. Every test here starts with nothing but the pools, and ends so."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lab.contract import PlaceInCluster
from lab.kubernetes import TestCluster
from lab.waiting import eventually

from atoll.backends.local.layers import Rootfs


async def opened(name: str, cluster: TestCluster, directory: Path) -> AsyncIterator[PlaceInCluster]:
    place = PlaceInCluster(directory, name, Rootfs(()), directory, cluster=cluster)
    await place.open()
    try:
        yield place
    finally:
        await place.clear()
    await eventually(place.nothing_left, "nothing is left")
    await place.backend.close()


@pytest.fixture(params=["kubernetes", "kubernetes-gvisor"])
async def place(
    request: pytest.FixtureRequest, test_cluster: TestCluster, tmp_path: Path
) -> AsyncIterator[PlaceInCluster]:
    async for found in opened(request.param, test_cluster, tmp_path):
        yield found


@pytest.fixture
async def runc(test_cluster: TestCluster, tmp_path: Path) -> AsyncIterator[PlaceInCluster]:
    """For what does not depend on the runtime."""
    async for found in opened("kubernetes", test_cluster, tmp_path):
        yield found
