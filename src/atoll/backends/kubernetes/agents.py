"""The gateway's side of activation: its key, the agents it dials, and what their refusals mean."""

import asyncio
import hashlib
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.backends.kubernetes.canaries import Address, canaries
from atoll.backends.kubernetes.channel import AGENT, GatewayKey, Refused, dial, order
from atoll.backends.kubernetes.claims import Identity
from atoll.backends.kubernetes.names import AGENT_PORT
from atoll.backends.kubernetes.way_out import WaysOut
from atoll.backends.local.network import Loopback
from atoll.errors import Internal, Unavailable, Unsupported

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

ORDER_TIMEOUT = 15.0  # canaries are dialled for 5 s at most
AGAIN, PAUSE = 5, 0.3  # an activation whose answer was lost is sent again as it was
# Seconds (the last one milliseconds) after which a machine that is gone is noticed on an idle connection.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


class Agents:
    """All that a gateway can do with its key."""

    def __init__(self, key: GatewayKey) -> None:
        self._key = key
        self.public_key = key.public
        self.mark = hashlib.sha256(key.public_raw).hexdigest()[:16]  # of the claims of this key's gateways
        self.digest_key = HKDF(hashes.SHA256(), 32, b"atoll kubernetes request v1", b"").derive(key.raw)

    @staticmethod
    def load(path: Path) -> "Agents":
        return Agents(GatewayKey.load(path))

    def secrets(self, claim_uid: str, pod_uid: str) -> tuple[str, str]:
        """Return the secrets of the hello: the gateway's and the agent's."""
        key = self._key
        return key.hello_secret(claim_uid, pod_uid, "host"), key.hello_secret(claim_uid, pod_uid, "agent")

    def dialler(self, address: str, fingerprint: str) -> Callable[[], Awaitable[Streams]]:
        """Return a function that opens the agent channel of one pod."""

        async def connect() -> Streams:
            reader, writer = await dial(self._key, address, AGENT_PORT, fingerprint, AGENT)
            _notice_loss(writer.get_extra_info("socket"))
            return reader, writer

        return connect

    def ways_out(self, links: Loopback) -> WaysOut:
        """Return the networks of this key's sandboxes."""
        return WaysOut(links, self._key)

    async def activate(
        self, identity: Identity, fingerprint: str, boot: dict[str, Any], api_server: tuple[str, int]
    ) -> dict[str, Any]:
        """Take a pod into use, once the agent has shown that nothing of the pod gets out."""
        value = {"op": "activate", "claim": identity.claim_uid, "pod": identity.pod_uid, "boot": boot}
        async with canaries(identity.address, api_server) as addresses:
            try:
                return await self._order(identity.address, fingerprint, {**value, "canaries": addresses})
            except Refused as refused:
                raise _explain(refused, identity) from None

    async def dial_canaries(self, address: str, fingerprint: str, addresses: list[Address]) -> bool:
        """Let the agent of a pod dial, and return whether it got through."""
        answer = await self._order(address, fingerprint, {"op": "canary", "canaries": addresses})
        return bool(answer.get("open", True))

    async def _order(self, address: str, fingerprint: str, value: dict[str, Any]) -> dict[str, Any]:
        for attempt in range(1, AGAIN + 1):
            try:
                async with asyncio.timeout(ORDER_TIMEOUT):
                    return await order(self._key, address, AGENT_PORT, fingerprint, value)
            except (OSError, TimeoutError, Unavailable) as error:
                if attempt == AGAIN:
                    why = str(error) or "no answer"
                    raise Unavailable(f"the agent at {address} cannot be reached: {why}") from None
            await asyncio.sleep(PAUSE * attempt)
        raise AssertionError("unreachable")


def _explain(refused: Refused, identity: Identity) -> Exception:
    if refused.reason == "egress_open":
        return Unsupported(
            f"the network policy does not hold on node {identity.node}: {refused.message}",
            hint="see that the cluster's network policy engine runs on that node",
            details={"reason": "egress_unenforceable", "node": identity.node, "pod": identity.sandbox},
        )
    return Internal(f"the agent refused its activation: {refused.message}", details={"reason": refused.reason})


def _notice_loss(connection: Any) -> None:
    """Ask the kernel to end a connection whose other side has vanished."""
    with suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
