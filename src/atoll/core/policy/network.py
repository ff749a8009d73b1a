"""The seam to egress: what a sandbox may reach, in force before any of its code runs and until the last of it is gone.

`Broker` is the real one. `Loopback` gives no way out at all, which is the safe end of every policy.
"""

import asyncio
import ipaddress
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from atoll import errors
from atoll.backends.local.kernel.rootless import standing
from atoll.core.access.approval_rules import held_hosts
from atoll.egress import Egress, EgressEvent, EgressPolicy, Kept, Limits, Link, default_hosts
from atoll.model import CreateSandbox

log = logging.getLogger("atoll.network")

BROKER_UID = 0x0FFF_A701  # nobody's: above real users, below the ranges of sandboxes
SETTLE = 2.0
NONE = {"network": "none", "hosts": []}

Policy = dict[str, Any]
Attach = Callable[[int], Awaitable[None]]
OnBlocked = Callable[[EgressEvent], None]
OnTraffic = Callable[[str, dict[str, Any]], None]
OnAsk = Callable[[str, str, int], Awaitable[str]]  # sandbox, name, port; why not, or nothing
OnLeft = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Survivor:
    """A sandbox that outlived a daemon: what was kept of its link, its policy, and a process inside it."""

    sandbox: str
    link: Mapping[str, Any] | None
    policy: Policy
    pid: int | None


class Network(Protocol):
    """What core asks of egress. `attach` returns the call the backend makes with the new network namespace."""

    on_blocked: OnBlocked
    on_traffic: OnTraffic
    on_ask: OnAsk
    on_left: OnLeft

    async def start(self) -> None: ...

    async def policy(self, spec: CreateSandbox) -> Policy: ...

    async def attach(self, sandbox: str, policy: Policy) -> Attach | None: ...

    async def update(self, sandbox: str, policy: Policy) -> None: ...

    async def detach(self, sandbox: str) -> None: ...

    async def readopt(self, survivors: Iterable[Survivor]) -> set[str]: ...  # those that could not be connected again

    def link(self, sandbox: str) -> dict[str, Any] | None: ...  # for the record, so that `readopt` finds it

    async def counters(self, sandbox: str) -> dict[str, Any]: ...

    async def settle(self, sandbox: str) -> None: ...  # every refusal until now has been told

    async def status(self) -> dict[str, Any]: ...  # for doctor

    async def close(self, *, keep: bool) -> None: ...  # keep: sandboxes stay connected until the next daemon comes


def new_policy(spec: CreateSandbox, defaults: Iterable[str], private: Mapping[str, Iterable[str]]) -> Policy:
    """The policy of a new sandbox in the form it is stored and shown; InvalidArgument names the first bad host."""
    hosts = [*(spec.hosts if spec.hosts is not None else defaults), *spec.more_hosts]
    made = EgressPolicy.of(hosts, private=private, host_ports=spec.host_ports, held=held_hosts(spec.require_approval))
    if not spec.network:
        return dict(NONE)
    return {"network": "hosts", **made.to_dict(), "default": spec.hosts is None and not spec.more_hosts}


def in_force(policy: Policy) -> EgressPolicy | None:
    """What egress is told; None is no interface at all."""
    if policy.get("network") != "hosts":
        return None
    return EgressPolicy.from_dict(
        {key: policy[key] for key in ("hosts", "private", "host_ports", "held") if key in policy}
    )


async def _nobody(sandbox: str, name: str, port: int) -> str:
    return "needs approval, and this daemon has none to ask"


class Loopback:
    """No way out at all."""

    def __init__(self) -> None:
        self.on_blocked: OnBlocked = lambda event: None
        self.on_traffic: OnTraffic = lambda sandbox, counters: None
        self.on_ask: OnAsk = _nobody
        self.on_left: OnLeft = lambda sandbox: None

    async def start(self) -> None:
        return None

    async def policy(self, spec: CreateSandbox) -> Policy:
        new_policy(spec, default_hosts(), {})
        return dict(NONE)

    async def attach(self, sandbox: str, policy: Policy) -> Attach | None:
        return None

    async def update(self, sandbox: str, policy: Policy) -> None:
        return None

    async def detach(self, sandbox: str) -> None:
        return None

    async def readopt(self, survivors: Iterable[Survivor]) -> set[str]:
        return set()

    def link(self, sandbox: str) -> dict[str, Any] | None:
        return None

    async def counters(self, sandbox: str) -> dict[str, Any]:
        return {}

    async def settle(self, sandbox: str) -> None:
        return None

    async def status(self) -> dict[str, Any]:
        return {"works": False, "why": "this daemon was started without network", "fix": ""}

    async def close(self, *, keep: bool) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's `[egress]` table: private networks that are open for named hosts, and name servers to ask instead
    of the machine's. What is wrong with it stops the daemon."""

    private: Mapping[str, list[str]]
    servers: tuple[tuple[str, int], ...]
    limits: Limits

    @staticmethod
    def of(table: Mapping[str, Any], defaults: Iterable[str]) -> "Settings":
        for key in table:
            if key not in ("private", "servers", "limits"):
                raise errors.InvalidArgument(
                    f"config.toml: unknown key `egress.{key}`",
                    hint="known are `egress.private`, `egress.servers` and `egress.limits`",
                )
        private, servers = table.get("private", {}), table.get("servers", [])
        if not isinstance(private, dict) or not isinstance(servers, list):
            raise errors.InvalidArgument("config.toml: `egress.private` is a table and `egress.servers` a list")
        try:
            found = tuple((str(ipaddress.ip_address(server)), 53) for server in servers)
        except ValueError as error:
            raise errors.InvalidArgument(f"config.toml: egress.servers: {error}") from None
        EgressPolicy.of(defaults, private=private)
        limits = table.get("limits", {})
        if not isinstance(limits, dict):
            raise errors.InvalidArgument("config.toml: `egress.limits` is a table")
        opened = {str(host): [str(net) for net in nets] for host, nets in private.items()}
        return Settings(opened, found, Limits.of(limits))


class Broker:
    """Egress of one daemon. Starting it takes a moment, so it starts beside everything else and is waited for when needed."""

    def __init__(self, home: Path, defaults: Iterable[str] | None = None, settings: Mapping[str, Any] | None = None):
        self._directory = home / "egress"
        self._defaults = tuple(default_hosts() if defaults is None else defaults)
        self._settings = Settings.of(settings or {}, self._defaults)
        self._starting: asyncio.Task[Egress] | None = None
        self.on_blocked: OnBlocked = lambda event: None
        self.on_traffic: OnTraffic = lambda sandbox, counters: None
        self.on_ask: OnAsk = _nobody
        self.on_left: OnLeft = lambda sandbox: None

    async def start(self) -> None:
        uid = None if standing().rootless else BROKER_UID
        self._starting = asyncio.create_task(
            Egress.start(
                self._directory,
                uid,
                lambda event: self.on_blocked(event),
                lambda sandbox, name, port: self.on_ask(sandbox, name, port),
                servers=self._settings.servers,
                limits=self._settings.limits,
            )
        )
        self._starting.add_done_callback(_report)

    async def _egress(self) -> Egress:
        assert self._starting is not None, "started before use"
        return await asyncio.shield(self._starting)

    async def policy(self, spec: CreateSandbox) -> Policy:
        """A list that was asked for and cannot be enforced is an error; the default one is then no network at all."""
        made = new_policy(spec, self._defaults, self._settings.private)
        if made["network"] == "none":
            return made
        try:
            await self._egress()
        except (errors.AtollError, OSError) as error:
            if spec.hosts or spec.more_hosts or spec.host_ports:
                raise errors.Unsupported(
                    f"this host cannot enforce a list of hosts: {error}", hint="use --no-network, or see `atoll doctor`"
                ) from error
            return {**NONE, "enforced": False, "why": str(error)}
        return made

    async def attach(self, sandbox: str, policy: Policy) -> Attach | None:
        allowed = in_force(policy)
        if allowed is None:
            return None
        egress = await self._egress()

        async def join(netns: int) -> None:
            await egress.attach(sandbox, netns, allowed)

        return join

    async def update(self, sandbox: str, policy: Policy) -> None:
        """On return nothing the policy does not allow is open any more."""
        allowed = in_force(policy)
        if allowed is None:
            raise errors.FailedPrecondition("this sandbox was made without a network")
        await (await self._egress()).update(sandbox, allowed)

    async def detach(self, sandbox: str) -> None:
        with suppress(errors.AtollError, OSError):  # egress that never started has nothing to let go of
            counters = await (await self._egress()).detach(sandbox)
            self.on_left(sandbox)
            if counters.get("hosts") or counters.get("refused"):
                self.on_traffic(sandbox, counters)

    async def readopt(self, survivors: Iterable[Survivor]) -> set[str]:
        """Connect the living again, remove what is left of the dead; those that have lost their network for good."""
        kept, opened, lost = [], [], set()
        for one in survivors:
            allowed = in_force(one.policy)
            if allowed is None:
                continue
            lost.add(one.sandbox)
            if one.link is None:
                continue
            netns = _netns(one.pid)
            if netns is not None:
                opened.append(netns)
            kept.append(Kept(one.sandbox, Link.from_dict(dict(one.link)), allowed, netns))
        try:
            return lost - set(await (await self._egress()).readopt(kept))
        except (errors.AtollError, OSError) as error:
            log.error("no sandbox has its network back: %s", error)
            return lost
        finally:
            for netns in opened:
                os.close(netns)

    def link(self, sandbox: str) -> dict[str, Any] | None:
        egress = self._running
        link = egress.link(sandbox) if egress is not None else None
        return None if link is None else link.to_dict()

    async def counters(self, sandbox: str) -> dict[str, Any]:
        egress = self._running
        return await egress.counters(sandbox) if egress is not None and egress.link(sandbox) is not None else {}

    async def settle(self, sandbox: str) -> None:
        with suppress(errors.AtollError, TimeoutError):
            async with asyncio.timeout(SETTLE):
                await self.counters(sandbox)  # events and answers come over one line, in order

    async def status(self) -> dict[str, Any]:
        try:
            egress = await self._egress()
        except errors.AtollError as error:
            return {"works": False, "why": error.message, "fix": error.hint}
        except OSError as error:
            return {"works": False, "why": str(error), "fix": ""}
        return {"works": True, "why": "", "fix": "", "broker_pid": egress.broker_pid}

    async def close(self, *, keep: bool) -> None:
        if self._starting is None:
            return
        with suppress(errors.AtollError, OSError):
            await (await self._egress()).close(keep_broker=keep)

    @property
    def _running(self) -> Egress | None:
        task = self._starting
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()


def _netns(pid: int | None) -> int | None:
    if pid is None:
        return None
    try:
        return os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        log.warning("the network namespace of process %d: %s", pid, error)
        return None


def _report(task: "asyncio.Task[Egress]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("there is no egress: %s", error)
