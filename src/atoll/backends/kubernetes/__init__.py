"""Sandboxes as pods of a Kubernetes cluster (docs/kubernetes.md)."""

from atoll.backends.kubernetes.backend import KubernetesBackend
from atoll.backends.kubernetes.settings import Settings

__all__ = ["KubernetesBackend", "Settings"]
