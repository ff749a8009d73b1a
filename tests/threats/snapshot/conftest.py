"""A real daemon with real sandboxes for the tests of snapshots."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

from daemon_fixtures import box, daemon

__all__ = ["box", "daemon"]
