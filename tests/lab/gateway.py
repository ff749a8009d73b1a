"""A daemon process with a TCP port, and stubs of its gRPC service."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc

from atoll.client import calls
from atoll.client._sync.driver import Link
from atoll.core.access.keys import Keys, NewKey
from atoll.errors import AtollError
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.proto.sandbox.v1 import sandbox_pb2_grpc

PATIENCE = 90.0
OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]


class Gateway:
    """A daemon process. It may be restarted; its sandboxes go on meanwhile."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.process: subprocess.Popen[bytes] | None = None
        self.channels: list[grpc.Channel] = []
        self.starts = 0

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "atoll.server.daemon",
            "--home",
            str(self.home),
            "--grpc",
            "127.0.0.1:0",
        ]
        self.starts += 1
        with open(self.home / "stderr", "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        until = time.monotonic() + PATIENCE
        while not (self.home / "daemon.sock").exists() or not (self.home / "grpc.endpoint").exists():
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"the daemon did not start: {self.log()}")
            time.sleep(0.05)

    def log(self) -> str:
        logs = [self.home / "stderr", self.home / "daemon.log"]
        return "\n".join(log.read_text(errors="replace")[-4000:] for log in logs if log.exists())

    @property
    def endpoint(self) -> str:
        return (self.home / "grpc.endpoint").read_text().split()[0]

    @property
    def ca(self) -> bytes:
        return (self.home / "tls" / "sandbox-ca.crt").read_bytes()

    def channel(self, pair: tuple[bytes, bytes] = (None, None)) -> grpc.Channel:
        made = grpc.secure_channel(self.endpoint, grpc.ssl_channel_credentials(self.ca, *pair), OPTIONS)
        self.channels.append(made)
        return made

    def stub(self, key: str | None = None) -> Any:
        """A client: with a key, or as the local user."""
        return Caller(self, key)

    def key(self, name: str, **options: Any) -> NewKey:
        keys = Keys(self.home / "atoll.db")
        try:
            quotas = {"write_burst": 10**6, "write_rate": 10**6, "read_burst": 10**6, "read_rate": 10**6}
            return keys.create(name, **{"quotas": quotas, **options})
        finally:
            keys.close()

    def revoke(self, name: str) -> None:
        keys = Keys(self.home / "atoll.db")
        keys.revoke(name)
        keys.close()

    def terminate(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(PATIENCE)

    def restart(self, number: int = signal.SIGTERM) -> None:
        self.terminate(number)
        (self.home / "grpc.endpoint").unlink(missing_ok=True)
        self.start()

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        try:
            Link(path=str(self.home / "daemon.sock")).call(calls.post("/v1/daemon/stop", {"force": True}))
        except AtollError:
            pass
        if self.process is not None:
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.terminate(signal.SIGKILL)


class Caller:
    """A stub whose every call carries a key and a time limit, and which finds the gateway again after a restart."""

    def __init__(self, gateway: Gateway, key: str | None) -> None:
        self._gateway = gateway
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._start = 0
        self._stub: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._start != self._gateway.starts:
            starts = self._gateway.starts
            self._stub = sandbox_pb2_grpc.SandboxServiceStub(self._gateway.channel())
            self._start = starts  # last: other threads may be here at the same moment
        rpc = getattr(self._stub, name)

        def call(*requests: Any, deadline: float = 120, **fields: Any) -> Any:
            request = requests[0] if requests else getattr(pb, _request_of(name))(**fields)
            return rpc(request, timeout=deadline, metadata=self._metadata)

        return call


def _request_of(name: str) -> str:
    return "ExecRequest" if name == "ExecStream" else f"{name}Request"
