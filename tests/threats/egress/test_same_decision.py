"""EGR-04: one table of hosts gives the same verdict at every door: DNS, TLS, plain HTTP and other ports."""

import contextlib
import ssl

import pytest
from lab.internet import Inside, World

ADDRESS = "203.0.113.10"
LIST = ["a.example", "*.b.example", "c.example:5432", "UPPER.example"]
TABLE = {
    "a.example": {443, 80},
    "A.EXAMPLE": {443, 80},
    "x.b.example": {443, 80},
    "x.y.b.example": {443, 80},
    "upper.example": {443, 80},
    "c.example": {5432},
    "b.example": set(),
    "a.example.evil.example": set(),
    "evila.example": set(),
    "xb.example": set(),
    "evil.example": set(),
}


def door(box: Inside, name: str, port: int) -> bool:
    """Try to really speak to `name`, at an address the sandbox may use."""
    if port == 443:
        with contextlib.suppress(OSError, ssl.SSLError), box.tls("a.example", sni=name, address=ADDRESS) as tls:
            tls.sendall(b"x")
            return tls.recv(10) == b"tls:x"
    elif port == 80:
        with contextlib.suppress(OSError), box.connect(ADDRESS, 80) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: " + name.encode() + b"\r\n\r\n")
            return b"200 OK" in sock.recv(4096)
    else:
        with contextlib.suppress(OSError), box.connect(ADDRESS, port) as sock:
            sock.sendall(b"x")
            return sock.recv(10) == b"x"
    return False


@pytest.mark.parametrize("name", TABLE)
def test_all_doors_agree(world: World, name: str) -> None:
    """Resolve and reach a name exactly where the list says."""
    world.inet.records[name.lower()] = [ADDRESS]
    with world.sandbox(*LIST) as box:
        code, found = box.ask(name)
        assert (code == 0) == bool(TABLE[name]) and bool(found) == bool(TABLE[name])
        for port in (443, 80, 5432):
            assert door(box, name, port) is (port in TABLE[name]), port
