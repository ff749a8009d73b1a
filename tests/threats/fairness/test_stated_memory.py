"""The daemon stays under a stated memory, whatever strangers and keys have under way at once.

What is stated is a sum: the program at rest, what strangers may make it hold, and the total of the memory accounts, which is the
operator's (`[accounts.total] memory_mb`). Here that total is small, so that a flood reaches it quickly.
"""

import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from lab.daemon import until
from lab.grpc_daemon import GrpcDaemon, started
from lab.raw_http2 import RawClient, dial, pour

METHOD = "/sandbox.v1.SandboxService/CreateSession"
MIB = 1 << 20
STRANGERS_MIB = 96
TOTAL_MIB = 96
OWNER_MIB = 64
SLACK_MIB = 64  # buffers of TLS and sockets, and what Python keeps beside the bytes that are charged


class Small(GrpcDaemon):
    def __init__(self) -> None:
        super().__init__(f"[accounts.owner]\nmemory_mb = {OWNER_MIB}\n[accounts.total]\nmemory_mb = {TOTAL_MIB}\n")

    @property
    def peak(self) -> int:
        """MiB that were ever resident."""
        return self.memory("VmHWM")


@pytest.fixture(scope="module")
def small() -> Iterator[Small]:
    made = Small()
    with started(made):
        yield made


class HalfRequest:
    """A REST request over TLS whose body never ends."""

    def __init__(self, daemon: Small, key: str) -> None:
        context = ssl.create_default_context(cadata=daemon.ca)
        context.set_alpn_protocols(["http/1.1"])
        self._sock = context.wrap_socket(dial(daemon.port), server_hostname="localhost")
        head = f"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        self._sock.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {60 * MIB}\r\n\r\n".encode())

    def pour(self, size: int) -> None:
        self._sock.settimeout(2)
        block = b" " * 65536
        with suppress(OSError):
            for _ in range(size // len(block)):
                self._sock.sendall(block)

    def close(self) -> None:
        self._sock.close()


def test_strangers_and_keys_together_stay_below_the_stated_memory(small: Small) -> None:
    keys = [small.key(f"k{number}") for number in range(4)]
    before = small.peak
    with ExitStack() as stack:
        halves = []
        for key in keys:
            for _ in range(3):
                halves.append(HalfRequest(small, key))
                stack.callback(halves[-1].close)
        for half in halves:
            half.pour(40 * MIB)
        strangers = [RawClient(small.port, small.ca) for _ in range(8)]
        callers = [RawClient(small.port, small.ca) for _ in keys]
        for client in (*strangers, *callers):
            stack.callback(client.close)
        pour(strangers, METHOD, 8, 60 * MIB)
        for client, key in zip(callers, keys, strict=True):
            pour([client], METHOD, 10, 60 * MIB, key)
        grown = small.peak - before
        assert small.get("/v1/accounts")["accounts"]["total"]["memory"] <= TOTAL_MIB * MIB
        assert grown <= STRANGERS_MIB + TOTAL_MIB + SLACK_MIB, f"{grown} MiB"
        assert grown > OWNER_MIB // 2, "there was a flood"
        assert small.get("/v1/health")["ok"]
    until(lambda: "memory" not in small.get("/v1/accounts")["accounts"].get("total", {}), "all is given back")
