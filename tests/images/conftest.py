"""Fixtures of the image tests; what they are made of is in lab/images.py."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.images import RegistryServer, running_registry

from atoll.images import ImageStore


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """Debian's docker-registry with TLS and a login; it picks its own port and says which."""
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed (Debian package docker-registry)")
    with running_registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def store(tmp_path: Path, registry: RegistryServer) -> Iterator[ImageStore]:
    """An empty store that trusts the registry's certificate and has a login for it."""
    (tmp_path / "login").mkdir()
    root = tmp_path / "store"
    yield ImageStore(root, credentials=registry.docker_config(tmp_path / "login"), ca_file=registry.ca)
    shutil.rmtree(root)
    assert not root.exists()
