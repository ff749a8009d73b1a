"""Sub-agents: sandboxes of their own that share another one's /workspace, live, and end with it.

A sub-agent is no way to get more: its limits, hosts and ports are at most its parent's, mounts are not passed on, and it has
none of its own.
"""

import time
from typing import Any

import msgspec

from atoll import errors, labels
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.policy.hosts import not_among
from atoll.core.sandboxes.state import Live
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.model import CreateSandbox, HeldLimit, LimitsSpec, SandboxInfo, SubAgent, convert

AT_MOST = 32


class SubAgents(Part):
    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    @verb("subagents.create")
    async def create(self, who: Principal, ref: str, request: SubAgent | None = None) -> SandboxInfo:
        """A sub-agent of a running sandbox. Its parent can neither stop nor end in the middle of this."""
        parent = self._sandboxes.reach(who, ref)
        if parent.parent_id is not None:
            raise errors.PermissionDenied("a sub-agent cannot have sub-agents of its own")
        async with parent.changing:
            if parent.state != "running":
                raise parent.not_running()
            if len(self._sandboxes.store.children(parent.id)) >= AT_MOST:
                raise errors.Exhausted(f"this sandbox has {AT_MOST} sub-agents already", hint="destroy one first")
            spec = self._spec(parent, request or SubAgent())
            made = await self._sandboxes.create(who, spec, parent=parent.id)
        parent.touch()
        return made

    async def end_orphans(self) -> None:
        """After a restart: those whose parent is gone or does not run any more."""
        for row in self._sandboxes.store.living():
            if row["parent_id"] is None or row["state"] in ("creating", "ending"):
                continue
            if (row["owner"], row["parent_id"]) not in self._sandboxes.live:
                await self._sandboxes.end(row["id"], "destroyed", "its parent ended", "atoll")

    def _spec(self, parent: Live, request: SubAgent) -> CreateSandbox:
        row = self._sandboxes.store.sandbox(parent.id)
        assert row is not None
        given, policy = parent.spec, row["record"].get("policy", {})
        hosts: list[str] = list(policy.get("hosts") or [])
        tenant = labels.tenant_of(given.labels)
        changes: dict[str, object] = {
            "name": request.name,
            "alias": None,
            # Whose it is passes on; other labels, such as an id the parent was given, stay there.
            "labels": {**({labels.TENANT: tenant} if tenant else {}), **request.labels},
            "runtime": row["runtime"],
            "env": {**given.env, **request.env},
            "limits": _limits(row["record"]["limits"], request.limits),
            "network": request.network and policy.get("network") == "hosts",
            "hosts": _hosts(hosts, request.hosts),
            "more_hosts": [],
            "mounts": [],
            "persistent": False,
            "lifetime_s": None,
            "idle_timeout_s": parent.idle_timeout,
            "start": True,
        }
        if parent.expires_at is not None:
            changes["lifetime_s"] = max(1.0, parent.expires_at - time.time())
        return convert(CreateSandbox, msgspec.to_builtins(msgspec.structs.replace(given, **changes)))


def _limits(held: dict[str, HeldLimit], asked: LimitsSpec) -> LimitsSpec:
    """The parent's, or less."""
    chosen: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(asked).items():
        limit = held.get(name)
        most = limit["value"] if limit is not None else None
        if value is not None and most is not None and value > most:
            raise errors.PermissionDenied(f"{name} {value} is more than the parent's {most}")
        if value is not None:
            chosen[name] = value
        elif limit is not None and limit["enforced"]:
            chosen[name] = most
    return LimitsSpec(**chosen)


def _hosts(parents: list[str], asked: list[str] | None) -> list[str]:
    if asked is None:
        return parents
    if wider := not_among(parents, asked):
        raise errors.PermissionDenied(f"{wider[0]!r:.120} is not among the parent's hosts")
    return asked
