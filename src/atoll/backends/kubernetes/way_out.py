"""The networks of pods: each sandbox's policy at the broker beside the gateway, and the channel that carries to it.

A pod has no way out by itself. So nothing is open before the channel is, and all is shut as soon as it is gone.
"""

import asyncio
import socket
from collections.abc import Mapping
from typing import cast

from atoll.backends.contract import Traffic
from atoll.backends.kubernetes.channel import GatewayKey
from atoll.backends.kubernetes.channel.egress import EgressChannel
from atoll.backends.local.network import Links, Loopback, in_force
from atoll.egress import CarriedEgress, Kept, Link
from atoll.errors import Unavailable, Unsupported
from atoll.model import Policy

CONNECT_SECONDS = 30.0
NOWHERE = -1  # a pod has no network namespace here

Place = tuple[str, int, str]  # address, port and fingerprint of the agent


class Carried(Links):
    """By the egress broker, for sandboxes whose questions and connections are carried to it."""

    _kind = CarriedEgress

    async def carry(self, sandbox: str) -> socket.socket:
        """Return a socket for what a sandbox sends. An older one of it is closed, with all it carried."""
        return await cast(CarriedEgress, await self._egress()).carry(sandbox)

    async def join_again(self, policies: Mapping[str, Policy]) -> set[str]:
        """Put the sandboxes that outlived a gateway under their policies; return those for which that failed."""
        wanted = {sandbox: in_force(policy) for sandbox, policy in policies.items()}
        kept = [Kept(sandbox, _link(sandbox), policy) for sandbox, policy in wanted.items() if policy is not None]
        return {one.sandbox for one in kept} - await self._readopt(kept)


class WaysOut:
    """The channels of all living sandboxes. With `Loopback` there is no way out at all."""

    def __init__(self, links: Loopback, key: GatewayKey) -> None:
        self.links = links
        self._key = key
        self._channels: dict[str, EgressChannel] = {}

    async def check(self, policy: Policy) -> None:
        """Raise Unsupported if a policy cannot be put in force here."""
        if policy.network != "none" and not (status := await self.links.status()).works:
            raise Unsupported(f"no list of hosts can be enforced: {status.why}", hint=status.fix or "use --no-network")

    async def open(self, sandbox: str, policy: Policy, place: Place, secrets: tuple[str, str]) -> None:
        """Put a policy in force and open the channel; without a network there is nothing to do."""
        await self.links.attach(sandbox, NOWHERE, policy)
        channel = self._begin(sandbox, policy, place, secrets)
        if channel is None:
            return
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await channel.connected.wait()
        except TimeoutError:
            raise Unavailable(f"the egress channel of sandbox {sandbox} was not open in time") from None

    async def join_again(self, policies: Mapping[str, Policy]) -> set[str]:
        """Put the policies of sandboxes that outlived a gateway in force; return those that have lost their network."""
        if isinstance(self.links, Carried):
            return await self.links.join_again(policies)
        return {sandbox for sandbox, policy in policies.items() if policy.network != "none"}

    def begin_again(self, sandbox: str, policy: Policy, place: Place, secrets: tuple[str, str]) -> None:
        """Open the channel of a sandbox whose policy is in force already, as soon as its agent answers."""
        self._begin(sandbox, policy, place, secrets)

    def _begin(self, sandbox: str, policy: Policy, place: Place, secrets: tuple[str, str]) -> EgressChannel | None:
        if policy.network == "none" or not isinstance(self.links, Carried):
            return None
        channel = EgressChannel(self.links, sandbox, self._key, place, secrets)
        self._channels[sandbox] = channel
        return channel

    async def close(self, sandbox: str) -> None:
        """Shut a sandbox's way out and forget its policy. Again is no error."""
        if (channel := self._channels.pop(sandbox, None)) is not None:
            await channel.close()
        await self.links.detach(sandbox)

    async def let_go(self) -> None:
        """Close every channel and the broker: nothing passes until a gateway is back."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))
        await self.links.close(keep=False)

    async def update(self, sandbox: str, policy: Policy) -> None:
        await self.links.update(sandbox, policy)

    async def traffic(self, sandbox: str) -> Traffic:
        return await self.links.traffic(sandbox)


def _link(sandbox: str) -> Link:
    return Link(sandbox, "0.0.0.0", "0.0.0.0", sandbox, 0)
