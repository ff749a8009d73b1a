"""The hosts of a running sandbox: change the list, report its traffic, and show its owner every refusal."""

import time
from contextlib import nullcontext

from atoll import errors
from atoll.backends.contract import Traffic
from atoll.core.access import quotas
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.commands.history import History
from atoll.core.policy.network import Network, of_stored
from atoll.core.sandboxes.state import host_name
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.records import Store
from atoll.egress import UPLOAD, EgressEvent, EgressPolicy
from atoll.model import Blocked, ChangeHosts, CreateSandbox, HostsInfo, StoredPolicy, convert

REPEAT = 1.0


class Hosts(Part):
    """The allow lists of all sandboxes."""

    def __init__(self, sandboxes: Sandboxes, store: Store, history: History, network: Network) -> None:
        self._sandboxes = sandboxes
        self._store = store
        self._history = history
        self._network = network
        network.on_blocked = self._blocked
        network.on_traffic = self._traffic

    @verb("hosts.get")
    async def get(self, who: Principal, ref: str) -> HostsInfo:
        """The list in force, and what went where."""
        row = self._sandboxes.known(who, ref)
        policy = row["record"].get("policy", {})
        live = self._sandboxes.live.get((who.owner, row["id"]))
        traffic = await live.box.traffic() if live is not None else Traffic()
        return HostsInfo(
            sandbox_id=row["id"],
            network=policy.get("network", "none"),
            hosts=policy.get("hosts", []),
            default=bool(policy.get("default")),
            host_ports=policy.get("host_ports", []),
            used={host: dict(counts) for host, counts in traffic.hosts.items()},
            refused=traffic.refused,
            open=traffic.open,
        )

    async def set(self, who: Principal, ref: str, hosts: list[str] | None) -> list[str]:
        """Replace the list; None is the default one, an empty list is no host."""
        return (await self.change(who, ref, ChangeHosts(hosts=hosts))).hosts

    @verb("hosts.change")
    async def change(self, who: Principal, ref: str, change: ChangeHosts) -> HostsInfo:
        """Replace the list, add to it or take away from it. When this returns, what was closed is cut."""
        quotas.check_hosts(who, [*(change.hosts or ()), *change.add])
        sandbox = self._sandboxes.known(who, ref)["id"]
        live = self._sandboxes.live.get((who.owner, sandbox))
        async with live.changing if live is not None else nullcontext():
            row = self._store.sandbox(sandbox)
            if row is None or row["state"] in ("ending", "ended"):
                raise errors.FailedPrecondition("the sandbox has ended")
            policy = row["record"].get("policy", {})
            if policy.get("network") != "hosts":
                raise errors.FailedPrecondition(
                    "this sandbox was made without a network", hint="create one without --no-network"
                )
            wanted = await self._wanted(policy, change, row["runtime"])
            if row["parent_id"] is not None:
                self._check_parent(row["parent_id"], wanted["hosts"])
            if live is not None and live.state in ("running", "paused"):
                await live.box.set_policy(of_stored(wanted))
            row = self._store.sandbox(sandbox) or row
            self._store.update_sandbox(sandbox, record={**row["record"], "policy": wanted})
            self._history.record(sandbox, who.owner, "hosts", hosts=wanted["hosts"], by=who.owner)
            for child in self._store.children(sandbox):
                await self._narrow(who, child["id"], wanted["hosts"])
        return await self.get(who, sandbox)

    def _check_parent(self, parent: str, hosts: list[str]) -> None:
        row = self._store.sandbox(parent)
        allowed = row["record"].get("policy", {}).get("hosts", []) if row is not None else []
        if wider := not_among(allowed, hosts):
            raise errors.PermissionDenied(f"{wider[0]!r:.120} is not among the parent's hosts")

    async def _narrow(self, who: Principal, sandbox: str, parents: list[str]) -> None:
        """Take from a sub-agent what its parent has no more. When this returns, what was closed is cut."""
        live = self._sandboxes.live.get((who.owner, sandbox))
        async with live.changing if live is not None else nullcontext():
            row = self._store.sandbox(sandbox)
            policy = row["record"].get("policy", {}) if row is not None else {}
            gone = not_among(parents, policy.get("hosts") or [])
            if row is None or row["state"] in ("ending", "ended") or policy.get("network") != "hosts" or not gone:
                return
            wanted: StoredPolicy = {
                **policy,
                "hosts": [host for host in policy["hosts"] if host not in gone],
                "default": False,
            }
            if live is not None and live.state in ("running", "paused"):
                await live.box.set_policy(of_stored(wanted))
            self._store.update_sandbox(sandbox, record={**row["record"], "policy": wanted})
            self._history.record(sandbox, who.owner, "hosts", hosts=wanted["hosts"], by=who.owner)

    async def _wanted(self, policy: StoredPolicy, change: ChangeHosts, runtime: str) -> StoredPolicy:
        if change.hosts is not None or not (change.add or change.remove):
            asked = convert(CreateSandbox, {"hosts": change.hosts, "host_ports": policy["host_ports"]})
            fresh = await self._network.policy(asked, runtime)
            return {**policy, "hosts": fresh["hosts"], "default": change.hosts is None}
        gone = set(EgressPolicy.of(change.remove).hosts)
        kept = [host for host in policy["hosts"] if host not in gone]
        return {**policy, "hosts": list(EgressPolicy.of([*kept, *change.add]).hosts), "default": False}

    # Notices from egress

    def _blocked(self, event: EgressEvent) -> None:
        """A refusal. Repeated ones of a hostile sandbox were thinned out by the broker already."""
        row = next((live for (_, name), live in self._sandboxes.live.items() if name == event.sandbox), None)
        stored = self._store.sandbox(event.sandbox) if row is None else None
        if row is None and stored is None:
            return
        owner = row.owner if row is not None else stored["owner"] if stored is not None else ""
        if event.protocol == UPLOAD:
            self._history.record(event.sandbox, owner, UPLOAD, name=event.name, note=event.note)
            return
        told: Blocked = {
            "name": event.name,
            "address": event.address,
            "port": event.port,
            "protocol": event.protocol,
            "reason": event.reason,
            "note": event.note,
        }
        if row is not None:
            if event.name in (row.spec.name, host_name(row.id)):
                return  # programs look up their own host's name; that is no attempt to go anywhere
            now = time.time()
            repeated = any(now - at < REPEAT and told == earlier for at, earlier in row.blocked)
            row.blocked.append((now, told))  # each command tells its own; the history has it once
            if repeated:
                return
        self._history.record(event.sandbox, owner, "blocked", **told)

    def _traffic(self, sandbox: str, traffic: Traffic) -> None:
        row = self._store.sandbox(sandbox)
        if row is not None:
            self._history.record(sandbox, row["owner"], "traffic", hosts=traffic.hosts, refused=traffic.refused)


def not_among(parents: list[str], asked: list[str]) -> list[str]:
    """The hosts that a sub-agent may not have, because its parent does not."""
    return [host for host in asked if host not in parents and "*" not in parents]
