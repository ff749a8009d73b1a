"""The networks of this machine's sandboxes: a link to the egress router for each, with its policy in force before any code runs.

Starting the broker takes a moment, so it starts beside everything else and is waited for when it is needed. A start that has failed, as it
may on a machine that is slow for a while, is tried again by the next one who needs it. `Loopback` gives no way out at all.
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from atoll import errors
from atoll.backends.contract import NetworkEvents, NetworkStatus, Traffic
from atoll.backends.local.kernel.rootless import standing
from atoll.egress import Egress, EgressPolicy, Kept, Limits, Link
from atoll.egress.broker.sandbox import Counters
from atoll.egress.router.router import LinkFields
from atoll.model import Policy

log = logging.getLogger("atoll.network")

BROKER_UID = 0x0FFF_A701  # nobody's: above real users, below the ranges of sandboxes
START_AGAIN = 5.0  # seconds after a failed start before another one
READOPT_TRIES = 3  # a sandbox that is not connected again now never is
DETACH_TIMEOUT = 20.0  # seconds for egress to let a link go; a broker that hangs must not keep a sandbox from ending


@dataclass(frozen=True, slots=True)
class Survivor:
    """A sandbox that outlived a daemon: what was kept of its link, its policy, and its first process."""

    sandbox: str
    link: LinkFields | None
    policy: Policy
    pid: int


class Loopback:
    """No way out at all."""

    async def start(self, events: NetworkEvents) -> None:
        return None

    async def status(self) -> NetworkStatus:
        return NetworkStatus(False, "this daemon was started without network", off=True)

    async def attach(self, sandbox: str, netns: int, policy: Policy) -> None:
        if policy.network != "none":
            raise errors.Unsupported("this daemon was started without network", hint="use --no-network")

    async def update(self, sandbox: str, policy: Policy) -> None:
        raise errors.FailedPrecondition("this sandbox was made without a network")

    async def detach(self, sandbox: str) -> None:
        return None

    async def readopt(self, survivors: Iterable[Survivor]) -> set[str]:
        return set()

    def link(self, sandbox: str) -> LinkFields | None:
        return None

    async def traffic(self, sandbox: str) -> Traffic:
        return Traffic()

    async def close(self, *, keep: bool) -> None:
        return None


class Links(Loopback):
    """By the egress broker. `servers` are name servers to ask instead of the machine's, `limits` the share of each sandbox."""

    _kind: type[Egress] = Egress

    def __init__(self, home: Path, servers: Iterable[tuple[str, int]] = (), limits: Limits | None = None) -> None:
        self._directory = home / "egress"
        self._servers = tuple(servers)
        self._limits = limits or Limits.of({})
        self._starting: asyncio.Task[Egress] | None = None
        self._failed_at = 0.0
        self._events = NetworkEvents()

    async def start(self, events: NetworkEvents) -> None:
        self._events = events
        self._starting = self._start_egress()

    def _start_egress(self) -> asyncio.Task[Egress]:
        events, uid = self._events, None if standing().rootless else BROKER_UID
        task = asyncio.create_task(
            self._kind.start(
                self._directory,
                uid,
                lambda event: events.on_blocked(event),
                lambda sandbox, name, port: events.on_ask(sandbox, name, port),
                servers=self._servers,
                limits=self._limits,
            )
        )
        task.add_done_callback(self._on_started)
        return task

    def _on_started(self, task: asyncio.Task[Egress]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed_at = time.monotonic()
            log.error("there is no egress: %s", error)

    async def status(self) -> NetworkStatus:
        try:
            egress = await self._egress()
        except errors.AtollError as error:
            return NetworkStatus(False, error.message, error.hint or "")
        except OSError as error:
            return NetworkStatus(False, str(error))
        return NetworkStatus(True, shown={"broker_pid": egress.broker_pid})

    async def attach(self, sandbox: str, netns: int, policy: Policy) -> None:
        """Join a network namespace; when this returns, the policy is in force there."""
        allowed = in_force(policy)
        if allowed is not None:
            await (await self._egress()).attach(sandbox, netns, allowed)

    async def update(self, sandbox: str, policy: Policy) -> None:
        """On return nothing the policy does not allow is open any more."""
        allowed = in_force(policy)
        if allowed is None:
            raise errors.FailedPrecondition("this sandbox was made without a network")
        await (await self._egress()).update(sandbox, allowed)

    async def detach(self, sandbox: str) -> None:
        """Take a sandbox off the network and tell its last count. Idempotent."""
        assert self._starting is not None, "started before use"
        try:
            async with asyncio.timeout(DETACH_TIMEOUT):
                with suppress(errors.AtollError, OSError):  # egress that never started has nothing to let go of
                    counters = await (await asyncio.shield(self._starting)).detach(sandbox)
                    self._events.on_left(sandbox)
                    if counters.get("hosts") or counters.get("refused"):
                        self._events.on_traffic(sandbox, _traffic(counters))
        except TimeoutError:
            log.error("the network link of sandbox %s could not be taken away in time", sandbox)

    async def readopt(self, survivors: Iterable[Survivor]) -> set[str]:
        """Connect the living again, remove what is left of the dead; returns those that have lost their network for good."""
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
            kept.append(Kept(one.sandbox, Link.from_dict(one.link), allowed, netns))
        try:
            return lost - await self._readopt(kept)
        finally:
            for netns in opened:
                os.close(netns)

    async def _readopt(self, kept: list[Kept]) -> set[str]:
        """The sandboxes that are connected again."""
        for left in reversed(range(READOPT_TRIES if kept else 1)):
            try:
                return set(await (await self._egress()).readopt(kept))
            except (errors.AtollError, OSError) as error:
                log.error("no sandbox has its network back: %s", error)
            if left:
                await asyncio.sleep(START_AGAIN)
        return set()

    def link(self, sandbox: str) -> LinkFields | None:
        """Return the part of a sandbox's record by which `readopt` finds its link."""
        egress = self._running
        link = egress.link(sandbox) if egress is not None else None
        return None if link is None else link.to_dict()

    async def traffic(self, sandbox: str) -> Traffic:
        """Events and answers come over one line, in order: when this returns, every refusal until now was told."""
        egress = self._running
        if egress is None or egress.link(sandbox) is None:
            return Traffic()
        return _traffic(await egress.counters(sandbox))

    async def close(self, *, keep: bool) -> None:
        """`keep`: sandboxes stay connected until the next daemon comes."""
        if self._starting is None:
            return
        with suppress(errors.AtollError, OSError):
            await (await asyncio.shield(self._starting)).close(keep_broker=keep)

    async def _egress(self) -> Egress:
        """The running egress, started again if its last start has failed."""
        assert self._starting is not None, "started before use"
        over = self._starting.done() and self._running is None
        if over and time.monotonic() - self._failed_at >= START_AGAIN:
            self._starting = self._start_egress()
        return await asyncio.shield(self._starting)

    @property
    def _running(self) -> Egress | None:
        task = self._starting
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()


def in_force(policy: Policy) -> EgressPolicy | None:
    """Return the policy for egress; None is no interface at all."""
    if policy.network != "hosts":
        return None
    return EgressPolicy.of(policy.hosts, private=policy.private, host_ports=policy.host_ports, held=policy.held)


@contextmanager
def namespace_of(pid: int) -> Iterator[int]:
    """The network namespace of a process, open for as long."""
    netns = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield netns
    finally:
        os.close(netns)


def _netns(pid: int) -> int | None:
    try:
        return os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        log.warning("the network namespace of process %d: %s", pid, error)
        return None


def _traffic(counters: Counters) -> Traffic:
    return Traffic(counters.get("hosts", {}), counters.get("refused", 0), counters.get("open", 0))
