"""Labels of a sandbox that atoll itself reads."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

TENANT = "k8e.tenant"  # whose sandbox it is, for every surface
OLD_TENANT = "tenant"  # the command line wrote this until 0.1; it is only read
SESSION = "k8e.session"  # the id a client chose for itself at create


def tenant_of(labels: Mapping[str, str] | None) -> str:
    """Return the tenant these labels name, empty when they name none."""
    labels = labels or {}
    return labels.get(TENANT) or labels.get(OLD_TENANT) or ""
