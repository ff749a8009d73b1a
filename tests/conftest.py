"""One daemon per test process for the behaviour and threat tests, and one fixture that runs a test on every runtime that works."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from lab import probes
from lab.sandboxes import RUNTIMES, Lab

import atoll

if TYPE_CHECKING:
    from lab.kubernetes import TestCluster

# A loaded machine is no fault of a test: how long it takes to draw examples is not judged, and none has a deadline.
settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")


@pytest.fixture(scope="session", autouse=True)
def shared_probes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have every engine tried out once in a run, by whichever process comes first."""
    own = tmp_path_factory.getbasetemp()
    probes.share_in(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The daemon of this test process. When the session is over nothing of it may be left on the machine."""
    made = Lab()
    yield made
    made.close()


@pytest.fixture
def own_lab() -> Iterator[Lab]:
    """A daemon that a test may kill, starve or configure."""
    made = Lab()
    yield made
    made.close()


@pytest.fixture(scope="module", params=RUNTIMES)
def runtime(request: pytest.FixtureRequest, lab: Lab) -> str:
    """Each runtime of this machine. `ATOLL_TEST_RUNTIMES=container` takes only that one."""
    name = str(request.param)
    if why := lab.works(name):
        pytest.skip(f"{name}: {why}")
    return name


@pytest.fixture(scope="module")
def anywhere(lab: Lab, runtime: str) -> Iterator[atoll.Sandbox]:
    """A sandbox on each runtime, for all tests of a module that leave it as they found it."""
    with lab.sandbox(runtime=runtime) as made:
        yield made


@pytest.fixture(scope="module")
def sandbox(lab: Lab) -> Iterator[atoll.Sandbox]:
    """A sandbox on the host's own kernel (`container`), for what does not depend on the runtime or only exists there."""
    if why := lab.works("container"):
        pytest.skip(f"container: {why}")
    with lab.sandbox(runtime="container") as made:
        yield made


@pytest.fixture(scope="session")
def test_cluster(tmp_path_factory: pytest.TempPathFactory) -> "TestCluster":
    """The cluster that `make test-kubernetes` has started, with the chart's pools in it."""
    from lab.kubernetes import TestCluster, need_cluster

    need_cluster()
    found = TestCluster(tmp_path_factory.mktemp("cluster"))
    found.install()
    return found
