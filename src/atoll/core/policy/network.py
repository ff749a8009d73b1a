"""Make a sandbox's network policy from a request and the operator's settings. The backend puts it in force."""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from atoll import config, errors
from atoll.backends.contract import Backend, NetworkEvents
from atoll.core.access.approval_rules import held_hosts
from atoll.core.store.typed import SandboxRecord
from atoll.egress import EgressPolicy, Limits, default_hosts
from atoll.model import CreateSandbox, Policy, StoredPolicy

NONE: StoredPolicy = {"network": "none", "hosts": []}


def policy_of(record: SandboxRecord) -> Policy:
    """The policy in a sandbox's record."""
    return of_stored(record.get("policy", {}))


def of_stored(policy: StoredPolicy) -> Policy:
    return msgspec.convert(policy, Policy)


def new_policy(spec: CreateSandbox, defaults: Iterable[str], private: Mapping[str, Iterable[str]]) -> StoredPolicy:
    """The policy of a new sandbox in the form it is stored and shown; InvalidArgument names the first bad host."""
    hosts = [*(spec.hosts if spec.hosts is not None else defaults), *spec.more_hosts]
    made = EgressPolicy.of(hosts, private=private, host_ports=spec.host_ports, held=held_hosts(spec.require_approval))
    if not spec.network:
        return {**NONE}
    policy: StoredPolicy = {"network": "hosts", "default": spec.hosts is None and not spec.more_hosts}
    return {**policy, **made.to_dict()}


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's `[egress]` table: private networks that are open for named hosts, and name servers to ask instead
    of the machine's. What is wrong with it stops the daemon."""

    private: Mapping[str, list[str]]
    servers: tuple[tuple[str, int], ...]
    limits: Limits

    @staticmethod
    def of(table: config.Egress, defaults: Iterable[str]) -> "Settings":
        try:
            found = tuple((str(ipaddress.ip_address(server)), 53) for server in table.servers)
        except ValueError as error:
            raise errors.InvalidArgument(f"config.toml: egress.servers: {error}") from None
        EgressPolicy.of(defaults, private=table.private)
        return Settings(table.private, found, Limits.of(table.limits))


class Network(NetworkEvents):
    """Makes policies, and is told by the backend what becomes of them."""

    __slots__ = ("_backend", "_defaults", "_settings")

    def __init__(self, backend: Backend, defaults: Iterable[str] | None, settings: config.Egress) -> None:
        super().__init__()
        self._backend = backend
        self._defaults = tuple(default_hosts() if defaults is None else defaults)
        self._settings = Settings.of(settings, self._defaults)

    async def policy(self, spec: CreateSandbox, runtime: str) -> StoredPolicy:
        """A list that was asked for and cannot be enforced is an error; the default one is then no network at all."""
        made = new_policy(spec, self._defaults, self._settings.private)
        if made["network"] == "none":
            return made
        status = await self._backend.network()
        if status.off:
            return {**NONE}
        asked, can = bool(spec.hosts or spec.more_hosts), self._backend.capabilities(runtime)
        can.check(runtime, ports=bool(spec.host_ports), hosts=asked)
        if can.policy == "none":
            return {**NONE, "enforced": False, "why": f"the runtime {runtime} enforces no list of hosts"}
        if status.works:
            return made
        if asked or spec.host_ports:
            raise errors.Unsupported(
                f"this host cannot enforce a list of hosts: {status.why}",
                hint="use --no-network, or see `atoll doctor`",
            )
        return {**NONE, "enforced": False, "why": status.why}

    async def status(self) -> Mapping[str, object]:
        """For doctor: whether lists of hosts are enforced, and why not."""
        found = await self._backend.network()
        return {"works": found.works, "why": found.why, "fix": found.fix, **found.shown}
