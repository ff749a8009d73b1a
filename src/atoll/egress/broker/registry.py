"""The broker's list of sandboxes, found by id or by interface, and what their policies open."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from atoll import accounts
from atoll.egress.broker.local_ports import LocalPorts, count_ports
from atoll.egress.broker.relay import Buffers
from atoll.egress.broker.sandbox import Counters, EgressEvent, Member, Row
from atoll.egress.broker.turns import Lane, Turns
from atoll.egress.limits import Limits
from atoll.egress.policy import EgressPolicy
from atoll.egress.router.router import Link, LinkSockets
from atoll.errors import Exhausted

if TYPE_CHECKING:
    from atoll.egress.broker.carrier import CarrierPlace

_OWN_CONNECTIONS: Final = 64


class Roster:
    """All members. `file_limit` is how many descriptors the broker may have; `notice` tells the daemon of an event."""

    def __init__(
        self, file_limit: int, notice: Callable[[EgressEvent], None], turns: Turns, limits: Limits | None = None
    ) -> None:
        # Two descriptors a connection, and a few for each sandbox.
        limits = limits or Limits()
        most = max(64, (file_limit - 256) * 3 // 8)
        self._limits = replace(limits, all_connections=min(limits.all_connections, most))
        self._notice = notice
        self._turns = turns
        self._accounts = accounts.Accounts(self._limits.caps())
        self._buffers = Buffers(self._limits.all_buffers_mb << 20)
        self.ports = LocalPorts(count_ports())
        self._members: dict[str, Member] = {}
        self._by_index: dict[int, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, sandbox: str) -> Member | None:
        return self._members.get(sandbox)

    def at_interface(self, index: int) -> Member | None:
        return self._by_index.get(index)

    def take_room(self, member: Member) -> bool:
        """Count one more connection of this sandbox, if it may have one. A few are every sandbox's due."""
        mine, open_now = (self._accounts.held(accounts.CONNECTIONS, who) for who in (member.holder, accounts.TOTAL))
        if mine >= _OWN_CONNECTIONS and open_now >= self._limits.all_connections:
            return False
        try:
            self._accounts.charge(accounts.CONNECTIONS, 1, member.holder)
        except Exhausted:
            return False
        return True

    def give_room(self, member: Member) -> None:
        """One connection less."""
        self._accounts.release(accounts.CONNECTIONS, 1, member.holder)

    def put(
        self, link: Link, policy: EgressPolicy, take_sockets: "Callable[[Link], LinkSockets | CarrierPlace]"
    ) -> tuple[list[Row], list[Row]]:
        """A new sandbox, or a new policy for a known one: what it no longer allows ends here and now.

        Gives what the router's rules should open, and what they should close. `take_sockets` gives those of a new link.
        """
        member = self._members.get(link.sandbox)
        if member is not None and member.link != link:
            self.remove(link.sandbox)
            member = None
        if member is None:
            member = Member(
                link,
                policy,
                take_sockets(link),
                Lane(self._turns),
                self._accounts,
                Buffers(self._limits.buffers_mb << 20, self._buffers),
                self.ports,
                self._limits,
                self._notice,
            )
            self._members[link.sandbox] = self._by_index[link.index] = member
            return [], []
        before = dict.fromkeys(member.rules)
        member.policy = policy
        member.grants.revoke(lambda name: policy.decide(name).allowed)
        for flow in list(member.flows):
            if not flow.still_allowed():
                flow.cut()
        after = open_rows(member)
        for address, port, _ in after:
            before.pop((address, port), None)
        member.rules = {}
        member.put_rules(after)
        return after, [[address, port, None] for address, port in before]

    def remove(self, sandbox: str) -> Counters:
        """Forget a sandbox and cut its connections; its last counters."""
        member = self._members.pop(sandbox, None)
        if member is None:
            return {}
        if self._by_index.get(member.link.index) is member:
            del self._by_index[member.link.index]
        member.policy = EgressPolicy()  # what is still being resolved or dialled ends as not allowed
        for flow in list(member.flows):
            flow.cut()
        for stream in list(member.streams):
            stream.end()
        member.lane.close()
        member.sockets.close()
        self._accounts.end(member.holder)
        return member.counters()


def open_rows(member: Member) -> list[Row]:
    """Return the elements that the router's rules should hold for this sandbox now."""
    longest: dict[tuple[str, int | None], int] = {}
    for address, name, left in member.grants.live():
        for port in member.open_ports(name):
            longest[address, port] = max(longest.get((address, port), 1), int(left) + 1)
    rows = [[address, port, seconds] for (address, port), seconds in longest.items()]
    return rows[: member.limits.elements]
