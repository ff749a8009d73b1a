"""The wheels of this tree, with the programs that are built already."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab.sandboxes import SOURCE

ROOT = Path(SOURCE).parent


def build(place: Path, *, client: bool = False) -> Path:
    """Build one wheel into a directory and return its path."""
    programs = {"ATOLL_PROGRAMS": str(ROOT / "src" / "atoll" / "_bin"), "ATOLL_MACHINE": os.uname().machine}
    program = (
        "import sys; sys.path.insert(0, 'scripts'); import build_release as b; from pathlib import Path\n"
        "tree = b.client_tree(Path(sys.argv[2])) if len(sys.argv) > 2 else b.ROOT\n"
        "b.hatch('wheel', tree, Path(sys.argv[1]))\n"
    )
    place.mkdir(exist_ok=True)
    words = [str(place)]
    if client:
        (place / "tree").mkdir()
        words.append(str(place / "tree"))
    argv = [sys.executable, "-c", program, *words]
    done = subprocess.run(argv, cwd=ROOT, env={**os.environ, **programs}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = place.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("client"), client=True)
