"""The broker's list of sandboxes, found by id, by gateway address or by interface, and what their policies open."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from atoll.egress.broker.sandbox import EgressEvent, Member
from atoll.egress.policy import EgressPolicy
from atoll.egress.router.router import Link

_MAX_FLOWS: Final = 2048
_OWN_FLOWS: Final = 64

# Address, port or None for all, seconds or None for ever: the form in which the daemon gets entries for its rules.
Row = list[Any]


class Roster:
    """All members. `file_limit` is how many descriptors the broker may have; `notice` tells the daemon of an event."""

    def __init__(self, file_limit: int, notice: Callable[[EgressEvent], None]) -> None:
        self._notice = notice
        self._members: dict[str, Member] = {}
        self._by_gateway: dict[str, Member] = {}
        self._by_index: dict[int, Member] = {}
        # Two descriptors a connection. A few are every sandbox's due; more only while a quarter of all is left.
        self._shared_flows = max(_OWN_FLOWS, (file_limit - 256) * 3 // 8)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def get(self, sandbox: str) -> Member | None:
        return self._members.get(sandbox)

    def at_gateway(self, gateway: str, peer: str) -> Member | None:
        """Whose connection is it, by our address and the sandbox's? Both must belong together."""
        member = self._by_gateway.get(gateway)
        return member if member is not None and member.link.address == peer else None

    def at_interface(self, index: int, peer: str | None = None) -> Member | None:
        member = self._by_index.get(index)
        return member if member is not None and peer in (None, member.link.address) else None

    def has_room(self, member: Member) -> bool:
        """May this sandbox open one more connection?"""
        mine = len(member.flows)
        if mine < _OWN_FLOWS:
            return True
        return mine < _MAX_FLOWS and sum(len(each.flows) for each in self._members.values()) < self._shared_flows

    def put(self, link: Link, policy: EgressPolicy) -> tuple[list[Row], list[Row]]:
        """A new sandbox, or a new policy for a known one: what it no longer allows ends here and now.

        Gives what the router's rules should open, and what they should close.
        """
        member = self._members.get(link.sandbox)
        if member is not None and member.link != link:
            self.remove(link.sandbox)
            member = None
        if member is None:
            member = Member(link, policy, self._notice)
            self._members[link.sandbox] = self._by_gateway[link.gateway] = self._by_index[link.index] = member
            return [], []
        before = dict.fromkeys((address, port) for address, port, _ in open_rows(member))
        member.policy = policy
        member.grants.revoke(lambda name: policy.decide(name).allowed)
        for flow in list(member.flows):
            if not flow.still_allowed():
                flow.cut()
        after = open_rows(member)
        for address, port, _ in after:
            before.pop((address, port), None)
        return after, [[address, port, None] for address, port in before]

    def remove(self, sandbox: str) -> dict[str, Any]:
        """Forget a sandbox and cut its connections; its last counters."""
        member = self._members.pop(sandbox, None)
        if member is None:
            return {}
        if self._by_gateway.get(member.link.gateway) is member:
            del self._by_gateway[member.link.gateway]
        if self._by_index.get(member.link.index) is member:
            del self._by_index[member.link.index]
        member.policy = EgressPolicy()  # what is still being resolved or dialled ends as not allowed
        for flow in list(member.flows):
            flow.cut()
        return member.counters()


def open_rows(member: Member) -> list[Row]:
    """What the router's rules should hold for this sandbox now."""
    longest: dict[tuple[str, int | None], int] = {}
    for address, name, left in member.grants.live():
        ports = member.policy.ports(name)
        for port in (None,) if ports is None else ports:
            longest[address, port] = max(longest.get((address, port), 1), int(left) + 1)
    return [[address, port, seconds] for (address, port), seconds in longest.items()]
