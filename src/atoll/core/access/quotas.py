"""Quotas of a key: so many sandboxes, CPUs and megabytes at once, and nothing above its ceiling.

Local callers have neither. The counts are taken in the same step as the place in the store, so that two creates at once
cannot both take the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from atoll.core.store.typed import SandboxRow
from atoll.errors import Exhausted, PermissionDenied
from atoll.model import CreateSandbox

from ..policy.profiles import Ceiling
from .credentials import KeyHolder, may
from .principals import Principal

_LIMITS = {"cpus": "CPUs", "memory_mb": "MB of memory", "disk_mb": "MB of disk"}


def check_request(who: Principal, spec: CreateSandbox) -> None:
    """Refuse what a remote caller may never ask for: the host's files and ports, every host, no profile."""
    if not isinstance(who, KeyHolder):
        return
    trusted = may(who, "admin")
    Ceiling(any_host=trusted, permissive=trusted, mounts=False).check(spec)


def check_hosts(who: Principal, hosts: Iterable[str]) -> None:
    """The same for a list that changes later."""
    if isinstance(who, KeyHolder) and not may(who, "admin") and any(h.partition(":")[0] == "*" for h in hosts):
        raise PermissionDenied("`*` in a list of hosts is more than this key gives", hint="an admin's key may")


def reserve(
    who: Principal, limits: Mapping[str, float], living: Callable[[], Iterable[SandboxRow]], volumes_mb: float = 0
) -> None:
    """Raise when one more with these limits is too much for the key.

    `living` gives the rows of the owner's sandboxes; `volumes_mb` is the size of the owner's volumes, which count as disk.
    """
    if not isinstance(who, KeyHolder) or not who.quotas:
        return
    rows = list(living())
    most = who.quotas.get("sandboxes")
    if most is not None and len(rows) + 1 > most:
        raise Exhausted(f"this key may have {most:g} sandboxes at once", hint="destroy one first")
    for name, shown in _LIMITS.items():
        most = who.quotas.get(name)
        if most is None:
            continue
        used = sum(_number(row["record"].get("limits", {}).get(name)) for row in rows)
        used += volumes_mb if name == "disk_mb" else 0
        if used + _number(limits.get(name)) > most + 1e-9:
            raise Exhausted(f"this key may have {most:g} {shown} at once, {used:g} are in use", hint="ask for less")


def _number(value: object) -> float:
    inner = value.get("value") if isinstance(value, dict) else value
    return float(inner) if isinstance(inner, int | float) else 0.0
