"""Sandboxes on this machine, by an OCI engine."""

from atoll.backends.local.backend import LocalBackend

__all__ = ["LocalBackend"]
