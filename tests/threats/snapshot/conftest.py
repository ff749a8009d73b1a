"""A real daemon with real sandboxes for the tests of snapshots."""

from lab.daemon_fixtures import box, daemon

__all__ = ["box", "daemon"]
