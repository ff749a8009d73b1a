"""Labels of a sandbox that atoll itself reads, and what makes a sandbox a tenant's own session."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

TENANT = "k8e.tenant"  # whose sandbox it is, for every surface
OLD_TENANT = "tenant"  # the command line wrote this until 0.1; it is only read
HOLDER = "k8e.holder"  # which machine's own it is, within a tenant that several machines share
SESSION = "k8e.session"  # the id a client chose for itself at create
IDLE_S, LIFETIME_S = 1800, 43_200  # of a session that was not asked for by name


def tenant_of(labels: Mapping[str, str] | None) -> str:
    """Return the tenant these labels name, empty when they name none."""
    labels = labels or {}
    return labels.get(TENANT) or labels.get(OLD_TENANT) or ""


def session_labels(tenant: str, holder: str = "") -> dict[str, str]:
    """Return the labels of a tenant's session; empty for none."""
    return {label: value for label, value in ((TENANT, tenant), (HOLDER, holder)) if value}
