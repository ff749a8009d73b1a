"""Addresses that a pod must not reach: a listener of this gateway, and the API server."""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atoll.backends.kubernetes.names import AGENT_PORT

Address = dict[str, str | int]


@asynccontextmanager
async def canaries(pod: str, api_server: tuple[str, int]) -> AsyncIterator[list[Address]]:
    """Listen where the pod could reach this gateway, and yield what it must fail to connect to."""
    here = _address_towards(pod)

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, here, 0)
    try:
        port = server.sockets[0].getsockname()[1]
        found: list[Address] = [{"host": here, "port": port}]
        if _is_address(api_server[0]):
            found.append({"host": api_server[0], "port": api_server[1]})
        yield found
    finally:
        server.close()


def _address_towards(pod: str) -> str:
    """Return the address of this machine from which packets to the pod leave; nothing is sent."""
    family = socket.AF_INET6 if ":" in pod else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((pod, AGENT_PORT))
        return str(probe.getsockname()[0])


def _is_address(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
