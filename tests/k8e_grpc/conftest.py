"""Fixtures of the gRPC tests: a real daemon with a home of its own, listening on a port the system chose."""

import os
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from lab.gateway import Gateway
from lab.keys import keyed_daemon


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    # One runtime, so that no test waits for probes of others; ATOLL_RUNTIME chooses another.
    runtime = os.environ.get("ATOLL_RUNTIME", "container")
    with keyed_daemon(f'[sandboxes]\nruntime = "{runtime}"\n') as made:
        yield made


@pytest.fixture(scope="session")
def local(gateway: Gateway) -> Any:
    return gateway.stub()


@pytest.fixture(scope="session")
def shared(local: Any) -> str:
    """A session for tests that leave nothing behind which others would mind."""
    return local.CreateSession(memory_mb=512).session_id


@pytest.fixture
def session(local: Any) -> Iterator[str]:
    """A session of the test's own."""
    made = local.CreateSession(memory_mb=256).session_id
    yield made
    try:
        local.DestroySession(session_id=made)
    except grpc.RpcError:
        pass
