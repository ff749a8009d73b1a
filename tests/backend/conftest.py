"""Fixtures of the backend tests: a backend with a home of its own, and sandboxes that are gone when the test is over."""

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import probes
from lab.backend import Sandbox, children, chosen_runtime, host_rootfs, inherited, local_backend, nothing_left, spec_for

from atoll.backends.local import LocalBackend
from atoll.backends.local.box import LocalBox
from atoll.backends.local.layers import Rootfs

Make = Callable[..., Awaitable[Sandbox]]


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Rootfs:
    return host_rootfs(tmp_path_factory.mktemp("host-image") / "cache")


@pytest.fixture(params=["container", "gvisor"])
def runtime(request: pytest.FixtureRequest) -> Iterator[str]:
    """What sandboxes of this test are made with: a test that asks for it runs once with each."""
    if request.param == "gvisor" and shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    chosen_runtime.append(request.param)
    yield request.param
    chosen_runtime.pop()


@pytest.fixture
def unprobed() -> None:
    """For tests of the probes: their backend knows nothing of earlier ones."""


@pytest.fixture
async def backend(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[LocalBackend]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    inherited.update(children())
    if "unprobed" not in request.fixturenames:
        probes.give(tmp_path / "home")
    made = local_backend(tmp_path / "home", engines=[os.environ.get("ATOLL_TEST_ENGINE") or "auto"])
    await made.start()
    yield made
    await made.sweep(set())
    for box in list(made._boxes.values()):
        await made.destroy(box.record)
    await nothing_left(made)
    await made.close()
    if "unprobed" not in request.fixturenames:
        probes.keep(tmp_path / "home")


@pytest.fixture
async def make(backend: LocalBackend, rootfs: Rootfs) -> AsyncIterator[Make]:
    """Makes sandboxes of the host image."""
    made: list[Sandbox] = []

    async def one(**fields: Any) -> Sandbox:
        box = await backend.create(spec_for(rootfs, **fields))
        assert isinstance(box, LocalBox)
        made.append(Sandbox(backend, box))
        return made[-1]

    yield one
    for sandbox in made:
        await sandbox.destroy()
