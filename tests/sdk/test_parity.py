"""Sandbox and AsyncSandbox are one face: the same names, the same arguments, the same defaults."""

import subprocess
import sys
from pathlib import Path

import pytest

import atoll

ROOT = Path(__file__).resolve().parents[2]


def test_the_blocking_faces_are_generated_from_the_asyncio_ones() -> None:
    check = [sys.executable, str(ROOT / "scripts/unasync.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_these() -> None:
    assert atoll.__all__ == sorted(atoll.__all__)
    for name in atoll.__all__:
        assert getattr(atoll, name) is not None
    with pytest.raises(AttributeError):
        _ = atoll.nothing  # type: ignore[attr-defined]


def test_a_misspelt_option_is_refused() -> None:
    with pytest.raises(TypeError, match="memroy"):
        atoll.Sandbox(memroy=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="memroy"):
        atoll.AsyncSandbox(memroy=1)  # type: ignore[call-arg]
