"""Every backend and runtime there is, behind one fixture."""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lab import orphans
from lab.backend import children, host_rootfs, inherited
from lab.contract import IN_CLUSTER, PLACES, Place, PlaceInCluster
from lab.microvm import emulated, small_rootfs
from lab.sandboxes import LONG
from lab.waiting import eventually

from atoll.backends.local.layers import Rootfs


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Rootfs:
    return host_rootfs(tmp_path_factory.mktemp("host-image") / "cache")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Rootfs:
    """The image of virtual machines."""
    return small_rootfs(tmp_path_factory.mktemp("small-image"))


@pytest.fixture(scope="session")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the answers of the probes are kept, so that each runtime is tried out once."""
    return tmp_path_factory.mktemp("probes")


# On an emulated processor every start takes seconds: these run each time on virtual machines, the others in the long run.
EACH_TIME = frozenset(
    {
        "test_BK01_create_returns_a_sandbox_that_answers",
        "test_BK02_BK15_a_policy_is_in_force_from_the_start_and_after_a_restart",
        "test_BK12_a_frozen_sandbox_goes_on_when_it_is_thawed",
        "test_BK21_a_kept_disk_is_there_again",
    }
)


@pytest.fixture(params=[*PLACES, *(pytest.param(name, marks=pytest.mark.kubernetes) for name in IN_CLUSTER)])
async def place(request: pytest.FixtureRequest, tmp_path: Path, rootfs: Rootfs, probes: Path) -> AsyncIterator[Place]:
    """A backend with a home of its own, for each runtime. After the test nothing may be left of it."""
    wanted = os.environ.get("ATOLL_TEST_RUNTIMES", "").replace(",", " ").split()
    if wanted and request.param not in wanted:
        pytest.skip("not asked for")
    if request.param in IN_CLUSTER:
        async for found in place_in_cluster(request, tmp_path, rootfs):
            yield found
        return
    if request.param != "plain" and os.geteuid() != 0:
        pytest.skip("needs root")
    if request.param == "gvisor" and shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    if request.param == "microvm":
        if why := emulated().lacking("qemu-tcg"):
            pytest.skip(why)
        if not (LONG or "microvm" in wanted or request.node.originalname in EACH_TIME):
            pytest.skip("takes seconds for each start: the long run has it")
        rootfs = request.getfixturevalue("small")
    found = Place(tmp_path / "home", request.param, rootfs, probes / f"{request.param}.json")
    inherited.update(children())
    with orphans.gathered():
        await found.open()
        try:
            yield found
        finally:
            await found.clear()
        await eventually(found.nothing_left, "nothing is left")
        await found.backend.close()


async def place_in_cluster(
    request: pytest.FixtureRequest, tmp_path: Path, rootfs: Rootfs
) -> AsyncIterator[PlaceInCluster]:
    """A gateway of the test cluster. After the test nothing may be left but the pools."""
    cluster = request.getfixturevalue("test_cluster")
    found = PlaceInCluster(tmp_path, request.param, rootfs, tmp_path, cluster=cluster)
    await found.open()
    try:
        yield found
    finally:
        await found.clear()
    await eventually(found.nothing_left, "nothing is left")
    await found.backend.close()
