"""Egress for sandboxes without a link to this machine: the same broker, and no router.

Whoever speaks with such a sandbox carries its questions and connections: `carry` gives a socket for that, in the form of
`broker/carrier.py`. Everything else (policies, refusals, counters, people who are asked) is as for any other sandbox.
"""

import socket
from collections.abc import Iterable

from atoll.egress.control.line import BrokerLine
from atoll.egress.control.service import Egress
from atoll.egress.policy import EgressPolicy
from atoll.egress.router.netlink import current_net
from atoll.egress.router.nft import Entry
from atoll.egress.router.router import Link, Router, RouterSockets
from atoll.errors import NotFound


class NoRouter(Router):
    """A router for backends without links: it does nothing."""

    def __init__(self, sockets: RouterSockets) -> None:
        self.sockets = sockets

    @classmethod
    def create(cls) -> "NoRouter":
        return cls(RouterSockets(current_net(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))

    @classmethod
    def adopt(cls, sockets: RouterSockets) -> "NoRouter":
        return cls(sockets)

    def close(self) -> None:
        self.sockets.close()

    def plug(self, sandbox: str, net: int, *, address: str | None = None) -> Link:
        return Link(sandbox, "0.0.0.0", "0.0.0.0", sandbox, 0)

    def unplug(self, link: Link) -> None: ...

    def known(self, link: Link) -> bool:
        return True

    def forget_others(self, keep: Iterable[Link]) -> None: ...

    def grant(self, link: Link, entries: Iterable[Entry]) -> None: ...

    def revoke(self, link: Link, entries: Iterable[Entry]) -> None: ...

    def set_host_ports(self, link: Link, ports: Iterable[int]) -> None: ...

    def open_link(self, link: Link) -> None: ...

    def flush_grants(self) -> None: ...

    def clear_stale(self) -> bool:
        return False

    def sweep(self) -> None: ...


class CarriedEgress(Egress):
    """Use `await CarriedEgress.start(...)`."""

    _routers = NoRouter

    async def join(self, sandbox: str, policy: EgressPolicy) -> None:
        """Put a sandbox under a policy. What it sends waits for `carry`."""
        await self.attach(sandbox, -1, policy)

    async def carry(self, sandbox: str) -> socket.socket:
        """Return a socket that takes questions and connections of the sandbox. An older one of it is closed, with all it carried."""
        if self.link(sandbox) is None:
            raise NotFound(f"sandbox {sandbox} has no network")
        line = await self._living_line()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                line.hand_over_carrier(sandbox, theirs)
            await line.order({"op": "carry", "sandbox": sandbox})
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        return ours

    async def _hand_over(self, link: Link) -> BrokerLine:
        return await self._living_line()
