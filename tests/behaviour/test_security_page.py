"""SECURITY.md names only tests that exist, and every row that has a test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_file_named_exists() -> None:
    """A claim without its test is no claim."""
    named = set(re.findall(r"`((?:tests|guest)/[\w/.]+)`", PAGE))
    assert len(named) > 50
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_every_threat_test_is_named() -> None:
    """No test is forgotten: the page is the index."""
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests/threats").glob("*/test_*.py")]
    assert [name for name in sorted(files) if name not in PAGE] == []
