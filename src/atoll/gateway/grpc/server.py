"""The gRPC server: both services, health and reflection, behind the doors.

`serve` is how the daemon starts it. It listens on a Unix socket in `$ATOLL_HOME` for the local user, and with `listen`
set on TCP, always with TLS. The server itself is bound to a socket in a private directory that only the doors dial.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from msgspec import Struct

from ...core import Core
from ...core.credentials import Doorkeeper
from ...core.keys import Keys
from ...errors import InvalidArgument
from ..tls import Authority
from . import service, verbs
from .calls import Calls, Kind, Observer
from .doors import Doors
from .introspection import SERVICE as REFLECTION
from .introspection import Reflection

MAX_MESSAGE = 64 * 1024 * 1024
RENEW_CHECK_SECONDS = 6 * 3600.0
_log = logging.getLogger(__name__)

OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class Settings(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """`[gateway.grpc]` of config.toml. `listen` is what `atoll serve` opens; empty: the Unix socket only."""

    listen: tuple[str, ...] = ("127.0.0.1:50051",)
    advertised: str = ""


@dataclass(frozen=True)
class Service:
    """One service to offer: what it is called, who answers, and which of its RPCs count as writes or need a scope."""

    descriptor: ServiceDescriptor
    implementation: object
    kinds: dict[str, Kind] = field(default_factory=dict)
    scopes: dict[str, str] = field(default_factory=dict)


class Running:
    """A server that is listening. `port` is the TCP port, 0 when only the Unix socket is open."""

    def __init__(
        self, server: Any, doors: Doors, authority: Authority, context: ssl.SSLContext, directory: Path
    ) -> None:
        self.port = 0
        self.authority = authority
        self.context = context
        self.doors = doors
        self._server = server
        self._directory = directory
        self._renewal = asyncio.ensure_future(self._renew())

    async def close(self, grace: float = 1.0) -> None:
        """Stop listening, give running calls `grace` seconds, then cut them off."""
        self._renewal.cancel()
        await self._server.stop(grace)
        await self.doors.close()
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _renew(self) -> None:
        """A daemon may run for longer than its certificate lives."""
        while True:
            await asyncio.sleep(RENEW_CHECK_SECONDS)
            try:
                if await asyncio.to_thread(self.authority.ensure):
                    self.context.load_cert_chain(self.authority.server_cert_file, self.authority.server_key_file)
            except (OSError, ValueError) as trouble:
                _log.error("the gateway's certificate could not be renewed: %s", trouble)


async def serve(core: Core, app: verbs.App, *, tcp: bool = False, listen: Sequence[str] | None = None) -> Running:
    """What the daemon calls, with the REST application for `atoll.v1`. The Unix socket is always opened; TCP (`listen`, else
    the operator's setting) with `tcp`."""
    settings = read_settings(core)
    authority = Authority(core.home / "tls", advertised=settings.advertised)
    await asyncio.to_thread(authority.ensure)
    keeper = Doorkeeper(Keys(core.home / "atoll.db"), authority)
    services = [
        Service(service.DESCRIPTOR, service.SandboxService(core, keeper, authority), service.KINDS, service.SCOPES),
        Service(verbs.DESCRIPTOR, verbs.AtollService(core, app, keeper.admit), verbs.KINDS),
    ]
    addresses = [parse_address(text) for text in (settings.listen if listen is None else listen)] if tcp else []
    return await start(services, keeper, authority, home=core.home, listen=addresses, unix=core.home / "grpc.sock")


def read_settings(core: Core) -> Settings:
    table = dict(core.config.gateway.get("grpc") or {})
    advertised = os.environ.get("ATOLL_ADVERTISED_HOSTNAME") or os.environ.get("K8E_SANDBOX_ADVERTISED_HOSTNAME")
    if advertised:
        table["advertised"] = advertised
    try:
        return msgspec.convert(table, Settings)
    except msgspec.ValidationError as bad:
        raise InvalidArgument(f"config.toml, [gateway.grpc]: {bad}") from None


def parse_address(text: str) -> tuple[str, int]:
    """`host:port`, `[::1]:port`, `:port` (every IPv4 address) or a bare port (loopback)."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(f"not an address to listen on: {text!r:.80}", hint="for example 127.0.0.1:50051")
    if ":" not in text:
        return "127.0.0.1", int(port)
    return host.strip("[]") or "0.0.0.0", int(port)


async def start(
    services: Sequence[Service],
    keeper: Doorkeeper,
    authority: Authority,
    *,
    home: Path,
    listen: Sequence[tuple[str, int]] = (),
    unix: Path | None = None,
    observe: Observer | None = None,
) -> Running:
    """Serve `services` on every address of `listen` and on `unix`."""
    home.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="grpc-", dir=_short_directory(home)))
    inner = directory / "s"
    doors = Doors(inner)
    server = grpc.aio.server(options=OPTIONS)
    calls = Calls(doors, keeper, observe)
    names = [one.descriptor.full_name for one in services]
    for one in [*services, Service(REFLECTION, Reflection(names))]:
        handlers = calls.handlers(one.descriptor, one.implementation, one.kinds, one.scopes)
        server.add_generic_rpc_handlers((handlers,))
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    for name in ["", *names]:
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(f"unix:{inner}")
    await server.start()
    os.chmod(inner, 0o600)
    context = authority.server_context()
    running = Running(server, doors, authority, context, directory)
    try:
        for host, port in listen:
            running.port = await doors.open_tcp(host, port or running.port, context)
        if unix is not None:
            await doors.open_unix(unix)
    except BaseException:
        await running.close(0)
        raise
    return running


def _short_directory(home: Path) -> Path:
    """Socket paths end at 107 bytes; a deep home needs another place, which mkdtemp makes just as private."""
    return home if len(os.fsencode(home)) < 70 else Path(tempfile.gettempdir())
