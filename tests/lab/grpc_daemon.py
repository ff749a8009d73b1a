"""A daemon with the TLS port open, for the tests of what it holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.daemon import DaemonProcess
from lab.waiting import until


class GrpcDaemon(DaemonProcess):
    """A daemon with a port of its own, no warm sandboxes and these settings."""

    def __init__(self, config: str) -> None:
        super().__init__(f"{config}[pool]\nfloor = 0\nceiling = 0\n")
        self.options = ["--grpc", "127.0.0.1:0"]

    @property
    def port(self) -> int:
        return int((self.home / "grpc.endpoint").read_text().split()[0].rpartition(":")[2])

    @property
    def ca(self) -> str:
        return (self.home / "tls" / "sandbox-ca.crt").read_text()

    def memory(self, field: str) -> int:
        """MiB of the process now (`VmRSS`) or at most until now (`VmHWM`)."""
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        found = [int(line.split()[1]) // 1024 for line in lines if line.startswith(field)]
        assert found, "the daemon is gone"
        return found[0]

    def key(self, name: str) -> str:
        quotas = {"write_burst": 10**6, "write_rate": 10**6}
        return str(self.post("/v1/keys", {"name": name, "scopes": ["use"], "quotas": quotas})["key"])


@contextmanager
def started(daemon: GrpcDaemon) -> Iterator[None]:
    """Run a daemon until the end of the block; its port is open from the start."""
    daemon.start()
    try:
        until((daemon.home / "grpc.endpoint").exists, "the port is open")
        yield
    finally:
        daemon.close()
