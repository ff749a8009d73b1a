"""EGR-08: encrypted hellos are refused, and every request of a plain connection must name the right host."""

import socket

import pytest
from lab.hellos import client_hello, sni
from lab.internet import World

SHARED = "203.0.113.10"


def get(host: str, path: str = "/", more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode()


def until_end(sock: socket.socket) -> bytes:
    data = b""
    try:
        while got := sock.recv(65536):
            data += got
    except ConnectionError:
        pass
    return data


@pytest.mark.parametrize("extension", [0xFE0D, 0xFF02, 0xFFCE])
def test_encrypted_hello_is_refused(world: World, extension: int) -> None:
    """Refuse ECH and ESNI even under an allowed outer name."""
    world.inet.records["a.example"] = [SHARED]
    with world.sandbox("a.example") as box:
        before = len(world.inet.dialled)
        with box.connect("a.example", 443) as sock:
            sock.sendall(client_hello(sni(b"a.example"), (extension, b"\0" * 40)))
            assert sock.recv(100)[:1] in (b"", b"\x15")
        box.event("encrypted ClientHello", port=443)
        assert len(world.inet.dialled) == before


def test_kept_alive_connection_serves_its_own_host(world: World) -> None:
    """Let several requests to the allowed host share a connection."""
    world.inet.records["a.example"] = [SHARED]
    with world.sandbox("a.example") as box, box.connect("a.example", 80) as sock:
        for number in range(3):
            sock.sendall(get("a.example", f"/{number}"))
            got = b""
            while b"hello from a.example" not in got:
                got += sock.recv(4096)
        sock.sendall(b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 5\r\n\r\nabcde" + get("a.example"))
        got = b""
        while got.count(b"hello from a.example") < 2:
            got += sock.recv(4096)


SECOND = {
    "plain": get("evil.example"),
    "absolute form": b"GET http://evil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
    "absolute form, both": b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a.example\r\nHost: evil.example\r\n\r\n",
    "folded host": b"GET / HTTP/1.1\r\nHost: a.example\r\n evil.example\r\n\r\n",
    "space before colon": b"GET / HTTP/1.1\r\nHost : evil.example\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nHost: evil.example\n\n" + b"\r\n\r\n",
    "no host": b"GET / HTTP/1.0\r\n\r\n",
    "connect": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n",
    "h2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "h2c upgrade": get("a.example", more="Connection: Upgrade\r\nUpgrade: h2c\r\n"),
    "late upgrade": get("a.example", more="Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    "two lengths": b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "length and chunks": (
        b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "odd coding": b"POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "userinfo": b"GET / HTTP/1.1\r\nHost: a.example@evil.example\r\n\r\n",
    "other port": b"GET / HTTP/1.1\r\nHost: a.example:8080\r\n\r\n",
    "NUL": b"GET / HTTP/1.1\r\nHost: a.example\0.evil.example\r\n\r\n",
}


PLACES = [(shape, first) for shape in SECOND for first in (True, False) if not (first and shape == "late upgrade")]


@pytest.mark.parametrize(("shape", "first"), PLACES)
def test_odd_or_foreign_request_is_refused(world: World, shape: str, first: bool) -> None:
    """Refuse it as the first request and as the second of an allowed connection."""
    world.inet.records["a.example"] = [SHARED]
    with world.sandbox("a.example") as box:
        before = len(world.inet.dialled)
        with box.connect("a.example", 80) as sock:
            if not first:
                sock.sendall(get("a.example"))
                assert b"200 OK" in sock.recv(4096)
            seen = len(world.inet.requests)
            sock.sendall(SECOND[shape])
            got = until_end(sock)
            assert b"hello from" not in got.partition(b"200 OK")[0]
        box.event("", port=80, protocol="tcp")
        assert not [host for _, host in world.inet.requests[seen:] if "evil" in host]
        if first:
            assert len(world.inet.dialled) == before


def test_websocket_passes_only_when_the_server_agrees(world: World) -> None:
    """Pass raw bytes after a 101, and go on judging requests when the server declines."""
    world.inet.records["a.example"] = [SHARED]
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    with world.sandbox("a.example") as box:
        with box.connect("a.example", 80) as sock:
            sock.sendall(get("a.example", "/ws", upgrade))
            assert b"101" in sock.recv(4096)
            sock.sendall(b"\x81\x05frame")
            assert sock.recv(100) == b"ws:\x81\x05frame"
        with box.connect("a.example", 80) as sock:
            seen = len(world.inet.requests)
            sock.sendall(get("a.example", "/no", upgrade) + get("evil.example"))
            until_end(sock)
            assert not [host for _, host in world.inet.requests[seen:] if "evil" in host]
        box.event("not an allowed host", name="evil.example", port=80)


def test_refusal_over_http_says_why(world: World) -> None:
    """Tell a plain HTTP client in words."""
    world.inet.records["a.example"] = [SHARED]
    with world.sandbox("a.example") as box, box.connect("a.example", 80) as sock:
        sock.sendall(get("evil.example"))
        assert b"403 Forbidden" in until_end(sock)
