"""Real sandboxes on a test internet: a daemon in a network namespace of its own, whose only way on leads to servers of
the test. Nothing of the machine's network is touched, and every name and address is the test's to say."""

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lab import internet
from lab.daemon import PATIENCE, Box, DaemonProcess, Failed, until

__all__ = ["PATIENCE", "Box", "DaemonProcess", "Failed", "Lab", "client", "hosts", "until"]

ALLOWED, OTHER, THIRD = "203.0.113.10", "203.0.113.20", "203.0.113.30"
T = TypeVar("T")


class Lab(DaemonProcess):
    """A daemon between its sandboxes and `inet`."""

    def __init__(self, **egress: Any) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="atn-", dir="/tmp")
        directory = Path(self._directory.name)
        self.net, self._inet_net = internet.new_net(), internet.new_net()
        internet._join(self.net, self._inet_net)
        self.inet = internet.Internet(self._inet_net, directory)
        authority = directory / "ca.pem"
        authority.write_text(self.inet.ca)
        private = "".join(f"[egress.private]\n{host!r} = {nets!r}\n" for host, nets in egress.items())
        super().__init__(
            f"[images]\nca_file = {str(authority)!r}\n[egress]\nservers = [{internet.DNS_SERVER!r}]\n{private}".replace(
                "'", '"'
            )
        )
        self.inet.records.update(
            {"a.example": [ALLOWED], "b.example": [OTHER], "c.example": [THIRD], "deep.a.example": [ALLOWED]}
        )

    def start(self) -> None:
        internet.in_net(self.net, super().start)  # a child is born in the namespace of the thread that starts it

    def create(self, **fields: Any) -> Box:
        return super().create(**{"runtime": "container", **fields})

    def in_net(self, work: Callable[[], T]) -> T:
        """Do something from where the daemon is."""
        return internet.in_net(self.net, work)

    def dial(self, port: int) -> socket.socket:
        return self.in_net(lambda: socket.create_connection(("127.0.0.1", port), PATIENCE))

    def listener(self) -> socket.socket:
        """A server on the machine's own loopback."""

        def make() -> socket.socket:
            sock = socket.create_server(("127.0.0.1", 0))
            sock.settimeout(PATIENCE)
            return sock

        return self.in_net(make)

    def dialled(self, address: str) -> int:
        return sum(1 for there, _ in self.inet.dialled if there == address)

    def blocked(self, box: Box) -> list[dict[str, Any]]:
        return [event for event in self.get(f"{box.path}/events?limit=1000")["events"] if event["kind"] == "blocked"]

    def works(self, runtime: str) -> bool:
        return any(one["name"] == runtime and one["works"] for one in self.get("/v1/runtimes")["runtimes"])

    def close(self) -> None:
        super().close()
        self.inet.close()
        os.close(self.net)
        os.close(self._inet_net)
        self._directory.cleanup()


def hosts(box: Box, **change: Any) -> Any:
    return box.daemon.post(f"{box.path}/hosts", change)


# Small programs for the inside. Each prints one word, so that a test reads what really happened there.

client = """
import socket, ssl, sys, urllib.request
def fetch(url):
    try:
        return "got " + urllib.request.urlopen(url, timeout=20).read().decode()
    except Exception as error:
        return "no " + type(getattr(error, "reason", error)).__name__
def tls(name, address=None, sni=None):
    context = ssl.create_default_context()
    context.check_hostname = False
    try:
        with socket.create_connection((address or name, 443), 20) as plain:
            with context.wrap_socket(plain, server_hostname=sni or name) as secure:
                secure.sendall(b"x")
                return "got " + secure.recv(100).decode()
    except Exception as error:
        return "no " + type(error).__name__
"""
