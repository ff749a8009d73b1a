"""E2B's door: what callers have sent and not finished is charged to their owner, and refused at its cap."""

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from lab.e2b import ENVD, Door, new_key, opened
from lab.sandboxes import NO_SPARES, PATIENCE, RUNTIMES, Lab, until

MIB = 1 << 20
CAP_MIB = 16
MESSAGE = 6 * MIB
FLOOD = 8


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    lab = Lab(f"{NO_SPARES}[accounts.owner]\nmemory_mb = {CAP_MIB}\n")
    try:
        lab.start()
        with opened(lab, RUNTIMES[0]) as port:
            yield Door(lab, port, new_key(lab, "flooder"), RUNTIMES[0])
    finally:
        lab.close()


@pytest.fixture(scope="module")
def box(door: Door) -> Iterator[dict[str, Any]]:
    status, made, _ = door.ask("POST", "/sandboxes", {"templateID": "base", "timeout": 600, "secure": True})
    assert status == 201, made
    yield made
    door.ask("DELETE", f"/sandboxes/{made['sandboxID']}")


def unfinished(door: Door, path: str, kind: str, headers: dict[str, str]) -> socket.socket:
    """A request of which the last byte never comes."""
    sock = socket.create_connection(("127.0.0.1", door.port), PATIENCE)
    lines = {"Host": "localhost", "Content-Type": kind, "Content-Length": str(MESSAGE + 5), **headers}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    sock.sendall(head.encode() + b"\r\n" + struct.pack(">BI", 0, MESSAGE))
    with suppress(OSError):  # a refused one is closed
        sock.sendall(b"x" * (MESSAGE - 1))
    return sock


def held(door: Door) -> int:
    """Return the bytes of memory that are charged to the flooder."""
    found = door.lab.ask("GET", "/v1/accounts")[1]["accounts"]
    return sum(kinds.get("memory", 0) for holder, kinds in found.items() if "flooder" in holder)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/process.Process/Start", "application/connect+json"),
        ("/process.Process/StreamInput", "application/connect+json"),
        ("/filesystem.Filesystem/ListDir", "application/json"),
    ],
)
def test_unfinished_messages_are_charged(door: Door, box: dict[str, Any], path: str, kind: str) -> None:
    headers = {
        "E2b-Sandbox-Id": box["sandboxID"],
        "E2b-Sandbox-Port": str(ENVD),
        "X-Access-Token": box["envdAccessToken"],
    }
    with ExitStack() as stack:
        socks = [stack.enter_context(unfinished(door, path, kind, headers)) for _ in range(FLOOD)]
        said = b""
        for sock in socks[CAP_MIB * MIB // MESSAGE :]:
            sock.settimeout(PATIENCE)
            with suppress(ConnectionResetError):
                said += sock.recv(65536)
        assert b"exhausted" in said or b"429" in said, said
        assert door.ask("GET", "/sandboxes", key=new_key(door.lab))[0] == 200, "others are served"
        assert MESSAGE < held(door) <= CAP_MIB * MIB
    until(lambda: held(door) == 0, "what was charged is given back")
