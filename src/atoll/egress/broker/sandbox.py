"""What the broker knows of one sandbox: its link, its policy, what it was granted, has open, and has used."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from atoll.egress.broker.grants import Grants
from atoll.egress.broker.ipv6_standins import StandIns
from atoll.egress.policy import EgressPolicy
from atoll.egress.router.router import Link

if TYPE_CHECKING:
    from atoll.egress.broker.flow import Flow

_MAX_COUNTED_HOSTS: Final = 1024
_OTHERS: Final = "(others)"
_REPEAT_SECONDS: Final = 0.05
ALERT_BYTES: Final = 64 << 20
UPLOAD: Final = "upload"  # in place of a protocol: the event is no refusal


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

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EgressEvent":
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})


@dataclass(slots=True, eq=False)
class Member:
    """The broker's record of one sandbox."""

    link: Link
    policy: EgressPolicy
    notice: Callable[[EgressEvent], None] = lambda event: None
    grants: Grants = field(default_factory=lambda: Grants(time.monotonic))
    standins: StandIns = field(init=False)
    flows: "set[Flow]" = field(default_factory=set)
    queries: Bucket = field(default_factory=lambda: Bucket(100, 300))
    new_names: Bucket = field(default_factory=lambda: Bucket(2, 300))
    reports: Bucket = field(default_factory=lambda: Bucket(20, 400))
    asking: int = 0
    refused: int = 0
    last_payload: float = 0.0
    traffic: dict[str, Traffic] = field(default_factory=dict)
    _seen_names: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _recent: OrderedDict[tuple[Any, ...], float] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.standins = StandIns(lambda address: bool(self.grants.names(address)))

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

    def counters(self) -> dict[str, Any]:
        return {
            "hosts": {
                name: {"connections": use.connections, "sent": use.sent, "received": use.received}
                for name, use in self.traffic.items()
            },
            "refused": self.refused,
            "open": len(self.flows),
            "last_payload": self.last_payload,
        }
