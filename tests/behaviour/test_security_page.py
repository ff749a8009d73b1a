"""SECURITY.md names only tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_file_named_exists() -> None:
    """A claim without its test is no claim."""
    named = set(re.findall(r"`((?:tests|guest)/[\w/.]+)`", PAGE))
    assert len(named) > 50
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
