"""The gRPC server: services, health and reflection, on a private socket that only the doors dial."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from atoll.core import Core
from atoll.core.access.credentials import Doorkeeper
from atoll.core.verbs import Scope
from atoll.server.tls import Authority

from . import service
from .calls import Calls, Kind, Observer
from .doors import Doors
from .introspection import SERVICE as REFLECTION
from .introspection import Reflection

MAX_MESSAGE = 64 * 1024 * 1024

OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.http2.bdp_probe", 0),  # else what is not read yet may grow to megabytes a stream
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message stays small
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 32 * 1024),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True)
class Service:
    """One service to offer: what it is called, who answers, and which of its RPCs count as writes or need a scope."""

    descriptor: ServiceDescriptor
    implementation: object
    kinds: dict[str, Kind] = field(default_factory=dict)
    scopes: dict[str, Scope] = field(default_factory=dict)


async def start(doors: Doors, services: Sequence[Service], keeper: Doorkeeper, observe: Observer | None = None) -> Any:
    """Serve `services` at `doors.inner`; returns gRPC's server, to be stopped by the caller."""
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
    server.add_insecure_port(f"unix:{doors.inner}")
    await server.start()
    os.chmod(doors.inner, 0o600)
    return server


def services(core: Core, authority: Authority) -> list[Service]:
    """All that atoll offers over gRPC."""
    return [
        Service(service.DESCRIPTOR, service.SandboxService(core, authority), service.KINDS, service.SCOPES),
    ]
