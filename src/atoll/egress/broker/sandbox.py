"""The broker's record of one sandbox: its link, its policy, what it was granted, has open, and has used."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypedDict

from atoll.accounts import MEMORY, TOTAL, Accounts, Holder
from atoll.accounts import sandbox as sandbox_holder
from atoll.egress.broker.grants import MAX_ADDRESSES, Grants
from atoll.egress.broker.ipv6_standins import LOOPBACK, PUBLIC, StandIns
from atoll.egress.broker.local_ports import LocalPorts
from atoll.egress.broker.relay import Buffers
from atoll.egress.broker.turns import Lane
from atoll.egress.limits import Limits
from atoll.egress.policy import EgressPolicy
from atoll.egress.router.router import Link, LinkSockets
from atoll.errors import Exhausted

if TYPE_CHECKING:
    from atoll.egress.broker.carrier import CarrierPlace
    from atoll.egress.broker.dns_stream import DnsStream
    from atoll.egress.broker.flow import Flow
    from atoll.egress.parse.dns import Answer

_MAX_COUNTED_HOSTS: Final = 1024
_OTHERS: Final = "(others)"
_OWN_EARLY: Final = 256 * 1024
MAX_LOOKUPS: Final = 8  # questions to name servers under way for one sandbox; more wait
MAX_RULE_PORTS: Final = 8
_REPEAT_SECONDS: Final = 0.05
ALERT_BYTES: Final = 64 << 20
UPLOAD: Final = "upload"  # in place of a protocol: the event is no refusal

# Address, port or None for all, seconds: the form in which the daemon gets entries for its rules.
Row = list[Any]


class Bucket:
    """A token bucket: `rate` per second, up to `burst` at once."""

    __slots__ = ("_burst", "_clock", "_rate", "_tokens", "_when")

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._when = burst, clock()

    def take(self) -> bool:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._when) * self._rate)
        self._when = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(slots=True)
class Traffic:
    """Use of one host: connections opened, bytes sent to it and received from it."""

    connections: int = 0
    sent: int = 0
    received: int = 0
    alert: int = ALERT_BYTES  # what was sent is told when it reaches this, and at each doubling


@dataclass(frozen=True, slots=True)
class EgressEvent:
    """One refusal, or one alert, as people see it."""

    time: float
    sandbox: str
    name: str
    address: str
    port: int
    protocol: str
    reason: str

    @property
    def note(self) -> str:
        """One line for a person."""
        target = self.name or self.address or "a connection"
        if self.port:
            target += f":{self.port}"
        if self.protocol == UPLOAD:
            return f"upload: {self.reason} to {self.name}"
        if self.reason == "not an allowed host":
            return f"blocked: {target} is not an allowed host"
        return f"blocked: {target} ({self.reason})"

    def to_dict(self) -> Mapping[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "EgressEvent":
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})


class Counters(TypedDict, total=False):
    """Traffic of a sandbox by host; empty when the broker does not know the sandbox."""

    hosts: dict[str, dict[str, int]]  # connections, sent, received
    refused: int
    open: int
    seconds: float
    longest_wait: float
    last_payload: float


@dataclass(slots=True, eq=False)
class Member:
    """The broker's record of one sandbox."""

    link: Link
    policy: EgressPolicy
    sockets: "LinkSockets | CarrierPlace"
    lane: Lane
    accounts: Accounts
    buffers: Buffers
    ports: LocalPorts
    limits: Limits = field(default_factory=Limits)
    notice: Callable[[EgressEvent], None] = lambda event: None
    grants: Grants = field(default_factory=lambda: Grants(time.monotonic))
    standins: StandIns = field(init=False)
    flows: "set[Flow]" = field(default_factory=set)
    streams: "set[DnsStream]" = field(default_factory=set)
    queries: Bucket = field(default_factory=lambda: Bucket(100, 300))
    new_names: Bucket = field(default_factory=lambda: Bucket(2, 300))
    reports: Bucket = field(default_factory=lambda: Bucket(20, 400))
    asking: int = 0
    lookups: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LOOKUPS))
    under_way: "dict[str, asyncio.Task[Answer]]" = field(default_factory=dict)
    granting: asyncio.Lock = field(default_factory=asyncio.Lock)
    rules: dict[tuple[str, int | None], float] = field(default_factory=dict)
    refused: int = 0
    last_payload: float = 0.0
    traffic: dict[str, Traffic] = field(default_factory=dict)
    _held_at: dict[str, set[str]] = field(default_factory=dict)
    _seen_names: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _recent: OrderedDict[tuple[Any, ...], float] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        of = LOOPBACK if self.link.is_carried else PUBLIC
        self.standins = StandIns(lambda address: bool(self.grants.names(address)), of)

    @property
    def holder(self) -> Holder:
        return sandbox_holder(self.link.sandbox)

    def check_early(self) -> None:
        """Exhausted when all sandboxes together have sent too much too early, and this one more than its due."""
        mine, everything = (self.accounts.held(MEMORY, who) for who in (self.holder, TOTAL))
        if everything >= self.limits.all_early_mb << 20 and mine >= _OWN_EARLY:
            raise Exhausted("all sandboxes together hold too much", hint="set `all_early_mb` in [egress.limits]")

    def open_ports(self, name: str) -> tuple[int | None, ...]:
        """The ports of a name as the router's rules open them. More than a few are opened as "any", one element instead of
        many, and the broker judges the port when the connection comes."""
        ports = self.policy.ports(name)
        return (None,) if ports is None or len(ports) > MAX_RULE_PORTS else ports

    def remember_held(self, address: str, name: str) -> bool:
        """Keep that a name for which a person is asked has this address; False when too many are kept."""
        if address not in self._held_at and len(self._held_at) >= MAX_ADDRESSES:
            return False
        self._held_at.setdefault(address, set()).add(name)
        return True

    def held_names(self, address: str, port: int) -> set[str]:
        """The names ever answered with this address for which a connection on this port waits for a person."""
        names = self._held_at.get(address, set())
        return {name for name in names if self.policy.waits(name) and self.policy.decide(name, port).allowed}

    def new_rules(self, wanted: dict[tuple[str, int | None], int], needed: int) -> list[Row] | None:
        """The rows of `wanted` that the router does not hold for `needed` more seconds; None when there is no room."""
        now = time.monotonic()
        rows = [
            [address, port, seconds]
            for (address, port), seconds in wanted.items()
            if self.rules.get((address, port), 0.0) < now + needed
        ]
        added = sum((address, port) not in self.rules for address, port, _ in rows)
        if len(self.rules) + added > self.limits.elements:
            self.rules = {key: end for key, end in self.rules.items() if end > now}
            added = sum((address, port) not in self.rules for address, port, _ in rows)
        return None if len(self.rules) + added > self.limits.elements else rows

    def put_rules(self, rows: Iterable[Row]) -> None:
        """The router holds these rows from now on."""
        now = time.monotonic()
        for address, port, seconds in rows:
            self.rules[address, port] = now + seconds

    def account(self, name: str) -> Traffic:
        """The counter of a host; beyond a thousand hosts, of all others together."""
        if name not in self.traffic and len(self.traffic) >= _MAX_COUNTED_HOSTS:
            name = _OTHERS
        return self.traffic.setdefault(name, Traffic())

    def may_ask_new(self, name: str) -> bool:
        """A name under a wildcard is partly chosen by the sandbox: new ones are few, so that they carry little out."""
        if name in self._seen_names:
            self._seen_names.move_to_end(name)
            return True
        if not self.new_names.take():
            return False
        self._seen_names[name] = None
        if len(self._seen_names) > 4096:
            self._seen_names.popitem(last=False)
        return True

    def refusal(self, name: str, address: str, port: int, protocol: str, reason: str) -> EgressEvent | None:
        """Count a refusal; the event to report, or None when it only repeats one or there are too many."""
        self.refused += 1
        key, now = (name, address, port, protocol, reason), time.monotonic()
        last = self._recent.pop(key, None)
        self._recent[key] = now
        if len(self._recent) > 256:
            self._recent.popitem(last=False)
        if (last is not None and now - last < _REPEAT_SECONDS) or not self.reports.take():
            return None
        return EgressEvent(time.time(), self.link.sandbox, name, address, port, protocol, reason)

    def count_sent(self, name: str, use: Traffic, size: int) -> None:
        """Bytes that left for a host: an allowed one may be a mailbox, so much of it is told."""
        use.sent += size
        if use.sent >= use.alert:
            reason = f"{use.sent >> 20} MiB sent"
            use.alert *= 2
            self.notice(EgressEvent(time.time(), self.link.sandbox, name, "", 0, UPLOAD, reason))

    def counters(self) -> Counters:
        return {
            "hosts": {
                name: {"connections": use.connections, "sent": use.sent, "received": use.received}
                for name, use in self.traffic.items()
            },
            "refused": self.refused,
            "open": len(self.flows),
            "seconds": round(self.lane.used, 6),
            "longest_wait": self.lane.longest_wait,
            "last_payload": self.last_payload,
        }
