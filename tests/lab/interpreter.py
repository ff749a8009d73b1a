"""The image of the code interpreter for tests: its packages are brought once in a run, for all daemons of all processes."""

import os
from pathlib import Path

import pytest

from atoll.images import ImageStore
from atoll.images.locks import file_lock
from lab.sandboxes import Lab, reachable


def share(factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the built layers, which whoever comes first fills."""
    if given := os.environ.get("ATOLL_TEST_INTERPRETER"):
        place = Path(given)
    else:
        own = factory.getbasetemp()
        place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "interpreter-store"
    place.mkdir(exist_ok=True)
    place.chmod(0o711)
    with file_lock(place / "building"):
        store = ImageStore(place)
        if store.interpreter_image(may_fetch=False) is None and not reachable("pypi.org"):
            pytest.skip("PyPI cannot be reached, and the packages are not here")
        store.built_interpreter()
    return place / "interpreter"


def give(lab: Lab, layers: Path) -> None:
    """Have a daemon find the layers as if it had built them."""
    images = Path(lab.home) / "images"
    images.mkdir(mode=0o711, exist_ok=True)
    if not (images / "interpreter").exists():
        (images / "interpreter").symlink_to(layers)
