"""Sandboxes as pods of a Kubernetes cluster (docs/kubernetes.md)."""

from atoll.backends.kubernetes.backend import KubernetesBackend
from atoll.backends.kubernetes.settings import Settings
from atoll.backends.kubernetes.way_out import Carried

__all__ = ["Carried", "KubernetesBackend", "Settings"]
