"""Profiles and modes applied to a request: what is left unsaid comes from them, and a ceiling says what may be asked for.

Whoever opens a front door sets its ceiling; requests, models and files found in a project choose only below it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from atoll import errors, profiles
from atoll.core.access.credentials import may
from atoll.core.access.principals import Principal
from atoll.egress import presets
from atoll.model import CreateSandbox, Isolation, LimitsSpec


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most a front door gives. The default one: named public hosts, nothing of the machine's own."""

    any_host: bool = False
    permissive: bool = False
    mounts: bool = False
    host_ports: bool = False

    def check(self, spec: CreateSandbox) -> None:
        """Refuse what lies above; the text says who can lift it."""
        if spec.profile == "permissive" and not self.permissive:
            raise _above("the profile permissive")
        if spec.mode is not None and profiles.mode_name(spec.mode) == profiles.NATIVE and not self.any_host:
            raise _above("the mode native, which reaches every public host,")
        if any(host.partition(":")[0] == "*" for host in (*(spec.hosts or ()), *spec.more_hosts)) and not self.any_host:
            raise _above("`*` in a list of hosts")
        if spec.mounts and not self.mounts:
            raise _above("a mount of the host's files")
        if spec.host_ports and not self.host_ports:
            raise _above("a port of the host")


OPEN = Ceiling(any_host=True, permissive=True, mounts=True, host_ports=True)


def ceiling_of(who: Principal) -> Ceiling:
    """Return the ceiling of a caller's own requests: a person on this machine and an admin's key all, any other key the default."""
    return OPEN if may(who, "admin") else Ceiling()


def _above(what: str) -> errors.PermissionDenied:
    return errors.PermissionDenied(
        f"{what} is more than this server gives", hint="whoever starts it can allow that: --allow-host-access"
    )


def resolve(spec: CreateSandbox) -> tuple[CreateSandbox, Isolation]:
    """The request with everything its profile and mode imply filled in, and what was decided, for people to see."""
    policy = of(spec)
    if spec.profile is None and spec.mode is None and not spec.security:
        return spec, _shown(spec, policy)
    changes: dict[str, object] = {
        "network": policy.network,
        "read_only_root": spec.read_only_root or policy.read_only,
        "env": {**policy.env, **spec.env},
        "limits": _limits(spec, policy),
        "mode": policy.mode,
    }
    if spec.hosts is None and policy.mode is not None:
        changes["hosts"] = list(presets.mode(policy.mode))
    resolved = msgspec.structs.replace(spec, **changes)
    return resolved, _shown(resolved, policy)


def _limits(spec: CreateSandbox, policy: profiles.Policy) -> LimitsSpec:
    """A profile's limits, where none was asked for. Those of the default profile are the operator's own."""
    strict = policy.read_only or spec.profile not in (None, "permissive")
    given = msgspec.structs.asdict(spec.limits)
    for name, value in (("memory_mb", policy.memory_mb), ("cpus", policy.cpus)):
        if given[name] is None and value is not None and strict:
            given[name] = value
    return LimitsSpec(**given)


def default_limits(spec: CreateSandbox, defaults: Mapping[str, float]) -> Mapping[str, float]:
    """The operator's limits; permissive has none on memory and CPU, which is all the machine has."""
    if spec.profile != "permissive":
        return defaults
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return {**defaults, "memory_mb": memory, "cpus": float(os.cpu_count() or 1)}


def of(spec: CreateSandbox) -> profiles.Policy:
    """The policy a request adds up to; its single keys are those of a `[security]` block."""
    return profiles.merge(mode=spec.mode, profile=spec.profile, keys=spec.security, no_network=not spec.network)


def _shown(spec: CreateSandbox, policy: profiles.Policy) -> Isolation:
    return {
        "profile": policy.profile,
        "mode": policy.mode,
        "network": spec.network,
        "read_only_root": spec.read_only_root,
        "capabilities": policy.capabilities,
        "seccomp": policy.seccomp,
        "no_new_privileges": True,
        "mounts": [{"source": m.source, "target": m.target, "read_only": m.read_only} for m in spec.mounts],
    }
