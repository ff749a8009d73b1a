"""The sandboxes' only name server: answers for allowed names alone, and opens the way before it answers.

A denied name gets NXDOMAIN and no query leaves the machine. Only A records exist here: AAAA, HTTPS and SVCB get empty
answers, so there is neither a way around over IPv6 nor a key for encrypted hellos. Where this machine reaches a name over
IPv6 alone, the answer is an address that stands for the IPv6 one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from atoll.egress.addresses import refusal
from atoll.egress.broker.sandbox import Member
from atoll.egress.broker.upstream import Upstream, has_route
from atoll.egress.names import BadName, from_wire
from atoll.egress.parse import dns
from atoll.egress.policy import HOST_NAME
from atoll.egress.router.nft import Entry

GRANT_MIN: Final = 60
GRANT_MAX: Final = 3600
GRANT_SLACK: Final = 60
_ANSWER_TTL_MAX: Final = 300
_MAX_ADDRESSES: Final = 16
_MAX_ASKING: Final = 64
_MAX_WILDCARD_NAME: Final = 128
_MAX_WILDCARD_LABELS: Final = 10
_log = logging.getLogger(__name__)

OpenWay = Callable[[Member, list[Entry]], Awaitable[bool]]
Report = Callable[[Member, str, str, int, str, str], None]


class Resolver:
    """Turns one packet of one sandbox into an answer. `open_way` puts grants into the router's rules."""

    def __init__(self, upstream: Upstream, open_way: OpenWay, report: Report) -> None:
        self._upstream = upstream
        self._open_way = open_way
        self._report = report

    def answer(self, member: Member, packet: bytes) -> "bytes | Coroutine[Any, Any, bytes] | None":
        """The response to send, None for packets that deserve none, or the work that finds the response."""
        try:
            query = dns.parse_query(packet)
        except dns.DnsError:
            return dns.build_error(packet, dns.FORMERR)
        if not member.queries.take():
            self._report(member, "", "", 53, "dns", "too many DNS queries")
            return dns.build_response(query, dns.REFUSED)
        if query.opcode != 0:
            return dns.build_response(query, dns.NOTIMP)
        if query.klass != dns.IN:
            return dns.build_response(query, dns.REFUSED)
        try:
            name = from_wire(query.name)
        except BadName:
            shown = query.name[:100].decode("ascii", "backslashreplace")
            self._report(member, shown, "", 0, "dns", "not a host name")
            return dns.build_response(query, dns.NXDOMAIN)
        denied = self._denied(member, name)
        if denied:
            self._report(member, name, "", 0, "dns", denied)
            return dns.build_response(query, dns.NXDOMAIN)
        if query.kind != dns.A:
            return dns.build_response(query, dns.NOERROR)
        if name == HOST_NAME:
            return dns.build_response(query, dns.NOERROR, (member.link.gateway,), GRANT_MIN)
        if member.asking >= _MAX_ASKING:
            return dns.build_response(query, dns.SERVFAIL)
        member.asking += 1
        return self._ask(member, query, name)

    async def _ask(self, member: Member, query: dns.Query, name: str) -> bytes:
        try:
            async with member.lookups:
                return await self._resolve(member, query, name)
        finally:
            member.asking -= 1

    def _denied(self, member: Member, name: str) -> str:
        verdict = member.policy.decide(name)
        if not verdict.allowed:
            return verdict.reason
        if not member.policy.by_wildcard(name):
            return ""
        if len(name) > _MAX_WILDCARD_NAME or name.count(".") >= _MAX_WILDCARD_LABELS:
            return "name too long for a wildcard"
        return "" if member.may_ask_new(name) else "too many different names under a wildcard"

    async def _resolve(self, member: Member, query: dns.Query, name: str) -> bytes:
        found = await self._look_up(member, name)
        if found.code != dns.NOERROR or not found.addresses:
            return dns.build_response(query, found.code)
        # The policy may have changed while upstream was asked.
        verdict = member.policy.decide(name)
        if not verdict.allowed:
            return dns.build_response(query, dns.NXDOMAIN)
        good = []
        for address in found.addresses[:_MAX_ADDRESSES]:
            why = refusal(address, verdict.exceptions)
            if why is None and address in member.standins:
                why = "stand-in"  # an operator's own use of that range must not be taken for ours
            if why is None:
                stands = ":" in address or member.link.is_carried
                good.append(member.standins.give(address) if stands else address)
            else:
                self._report(member, name, address, 0, "dns", f"the name leads to a {why} address")
        if not good:
            return dns.build_response(query, dns.NXDOMAIN)
        granted = await self._grant(member, name, [address for address in good if address is not None], found.ttl)
        if not granted:
            return dns.build_response(query, dns.SERVFAIL)
        return dns.build_response(query, dns.NOERROR, granted, min(found.ttl, _ANSWER_TTL_MAX))

    async def _look_up(self, member: Member, name: str) -> dns.Answer:
        """Ask the name servers. Concurrent questions of one sandbox for one name are asked once."""
        task = member.under_way.get(name)
        if task is None:
            task = member.under_way[name] = member.lane.spawn(self._from_upstream(name))
            task.add_done_callback(lambda _: member.under_way.pop(name, None))
        return await asyncio.shield(task)

    async def _from_upstream(self, name: str) -> dns.Answer:
        found = await self._upstream.lookup(name)
        if found.code == dns.NOERROR and not any(map(has_route, found.addresses[:_MAX_ADDRESSES])):
            found = await self._over_ipv6(name) or found
        return found

    async def _grant(self, member: Member, name: str, addresses: list[str], ttl: int) -> tuple[str, ...]:
        """Open the way to the addresses of a name; those that are open then. One change of the rules is under way for a
        sandbox at a time, and none where they hold long enough already."""
        seconds = min(max(ttl, GRANT_MIN), GRANT_MAX) + GRANT_SLACK
        needed = min(ttl, _ANSWER_TTL_MAX) + GRANT_SLACK // 2
        async with member.granting:
            ports = member.open_ports(name)
            wanted = {(address, port): seconds for address in addresses for port in ports}
            rows = member.new_rules(wanted, needed)
            if rows is None:
                self._report(member, name, "", 0, "dns", "too many addresses are open for this sandbox")
                return ()
            if member.policy.waits(name) and not all(member.remember_held(each, name) for each in addresses):
                return ()
            granted = tuple(address for address in addresses if member.grants.add(address, name, seconds))
            entries = [Entry(address, port, life) for address, port, life in rows if address in granted]
            if not granted or (entries and not await self._open_way(member, entries)):
                return ()
            member.put_rules([entry.address, entry.port, entry.seconds] for entry in entries)
            return granted

    async def _over_ipv6(self, name: str) -> dns.Answer | None:
        """The IPv6 addresses of a name, if there are any and this machine has a way to them."""
        found = await self._upstream.lookup(name, dns.AAAA)
        return found if any(map(has_route, found.addresses[:_MAX_ADDRESSES])) else None
