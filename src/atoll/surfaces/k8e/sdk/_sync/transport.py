"""gRPC for threads: the channel of one client, opened when it is first needed."""

from __future__ import annotations

import threading
from typing import Any

import grpc

from atoll.client.route import Route
from atoll.proto.sandbox.v1 import sandbox_pb2_grpc

from ..channel import open_channel, ready

Lock = threading.Lock


class Transport:
    def __init__(self, route: Route) -> None:
        self.route = route
        self._channel: Any = None
        self._stub: Any = None
        self._opening = threading.Lock()

    def stub(self) -> Any:
        with self._opening:
            if self._stub is None:
                self.route = ready(self.route)
                self._channel = open_channel(self.route, grpc.insecure_channel, grpc.secure_channel)
                self._stub = sandbox_pb2_grpc.SandboxServiceStub(self._channel)
            return self._stub

    def recover(self) -> None:
        """Start the local daemon again if it is gone; the channel connects again by itself."""
        self.route = ready(self.route)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
