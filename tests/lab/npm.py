"""Packages from npm, as users install them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lab.waiting import PATIENCE


def install(place: Path, package: str) -> Path:
    """Install a package into an empty directory and return that; skip where it cannot be had."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node is not here")
    (place / "package.json").write_text('{"private": true, "type": "module"}')
    command = [npm, "install", "--no-audit", "--no-fund", "--prefer-offline", package]
    done = subprocess.run(command, cwd=place, capture_output=True, timeout=4 * PATIENCE)
    if done.returncode:
        pytest.skip(f"the package cannot be installed here: {done.stderr[-300:]!r}")
    return place
