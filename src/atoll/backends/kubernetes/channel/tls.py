"""Connections to the agent of a pod: TLS to a peer that is known by the fingerprint of its certificate."""

import asyncio
import hashlib
import hmac
import ssl

from atoll.backends.kubernetes.channel.gateway_key import GatewayKey
from atoll.errors import Internal

ACTIVATE, AGENT, EGRESS = "atoll-activate/1", "atoll-agent/1", "atoll-egress/1"
_HANDSHAKE_SECONDS = 5.0
_SHUTDOWN_SECONDS = 1.0


async def dial(
    key: GatewayKey, address: str, port: int, fingerprint: str, purpose: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection for one purpose. Nothing is sent to a peer that is not the agent with this fingerprint.

    The agent judges our key after the handshake is over for us: a refusal shows at the first read.
    """
    try:
        reader, writer = await asyncio.open_connection(
            address,
            port,
            ssl=key.context(purpose),
            server_hostname="",
            ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
        )
    except ssl.SSLError as error:
        raise Internal(f"whoever answers at {address}:{port} is no agent: {error.reason}") from None
    if why := _find_fault(writer.get_extra_info("ssl_object"), fingerprint, purpose):
        writer.transport.abort()
        raise Internal(f"whoever answers at {address}:{port} is not the agent of this pod: {why}")
    return reader, writer


def _find_fault(tls: ssl.SSLObject, fingerprint: str, purpose: str) -> str:
    """Return what is wrong with a peer, or nothing."""
    seen = hashlib.sha256(tls.getpeercert(binary_form=True) or b"").hexdigest()
    if not hmac.compare_digest(seen, fingerprint):
        return "it has another certificate"
    if tls.version() != "TLSv1.3":
        return f"it speaks {tls.version()}"
    return "" if tls.selected_alpn_protocol() == purpose else f"it does not offer {purpose}"
