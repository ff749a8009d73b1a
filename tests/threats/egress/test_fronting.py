"""EGR-07: the name in the ClientHello must be the one that was resolved, or no byte leaves."""

import socket
import ssl

import pytest
from lab.hellos import alpn, body, client_hello, handshake, hello_for, records, retry_request, sni
from lab.internet import World

SHARED = "203.0.113.10"


def closed(sock: socket.socket) -> bool:
    """The broker ended it: perhaps with a TLS alert first, never with bytes of a server."""
    try:
        got = sock.recv(4096)
        return got == b"" or (got[0] == 21 and sock.recv(4096) == b"")
    except ConnectionError:
        return True


def test_other_name_in_the_hello_is_refused(world: World) -> None:
    """Refuse a denied name at an allowed name's address."""
    world.inet.records["a.example"] = [SHARED]
    with world.sandbox("a.example") as box:
        before = len(world.inet.dialled)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            box.tls("a.example", sni="evil.example")
        event = box.event("not an allowed host", name="evil.example", port=443)
        assert event.address == SHARED
        assert len(world.inet.dialled) == before


def test_other_allowed_name_needs_its_own_grant(world: World) -> None:
    """Refuse an allowed name at an address that was not resolved for it."""
    world.inet.records["a.example"] = [SHARED]
    world.inet.records["b.example"] = ["203.0.113.20"]
    with world.sandbox("a.example", "b.example") as box:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            box.tls("a.example", sni="b.example")
        box.event("not the name that was resolved", name="b.example")
        box.resolve("b.example")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            box.tls("a.example", sni="b.example")


def test_shared_address_works_for_each_name_resolved(world: World) -> None:
    """Let two allowed names share one address."""
    world.inet.records["a.example"] = world.inet.records["b.example"] = [SHARED]
    with world.sandbox("a.example", "b.example") as box:
        box.resolve("a.example")
        for name in ("a.example", "b.example"):
            with box.tls(name) as tls:
                tls.sendall(b"x")
                assert tls.recv(10) == b"tls:x"


BAD_HELLOS = {
    "no server name": client_hello(alpn(b"h2")),
    "no extensions": client_hello(),
    "empty name": client_hello(sni(b"")),
    "two names": client_hello(sni(b"a.example", b"evil.example")),
    "two extensions": client_hello(sni(b"a.example"), sni(b"evil.example")),
    "name of another kind": client_hello(sni(b"a.example", kind=1)),
    "NUL in the name": client_hello(sni(b"a.example\0")),
    "address as name": client_hello(sni(b"203.0.113.10")),
    "two hellos in one record": records(handshake(body(sni(b"a.example"))) + handshake(body(sni(b"evil.example")))),
    "trailing bytes": records(handshake(body(sni(b"a.example"), tail=b"x"))),
    "not TLS": b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n",
    "SSH": b"SSH-2.0-x\r\n",
    "SSLv2": b"\x80\x2e\x01\x00\x02" + bytes(44),
    "a server's hello": records(handshake(body(sni(b"a.example")), kind=2)),
    "an alert": records(b"\x02\x28", kind=21),
    "empty record": b"\x16\x03\x01\x00\x00" + hello_for("a.example"),
    "huge length": b"\x16\x03\x01\xff\xff" + bytes(100),
    "huge hello": records(b"\x01\xff\xff\xff" + bytes(20000)),
}


@pytest.mark.parametrize("shape", BAD_HELLOS)
def test_malformed_or_nameless_hello_is_refused(world: World, shape: str) -> None:
    """Close before any upstream byte when the hello is not exactly right."""
    world.inet.records["a.example"] = [SHARED]
    with world.sandbox("a.example") as box:
        before = len(world.inet.dialled)
        with box.connect("a.example", 443) as sock:
            sock.sendall(BAD_HELLOS[shape])
            assert closed(sock)
        box.event("", port=443, protocol="tcp")
        assert len(world.inet.dialled) == before


@pytest.mark.parametrize("record_size", [64, 70, 16384])
@pytest.mark.parametrize("segment", [1, 9, 65536])
def test_split_hello_is_put_together(world: World, record_size: int, segment: int) -> None:
    """Judge a hello split over records and segments as one: allowed passes, denied does not."""
    world.inet.records["echo.example"] = [SHARED]
    with world.sandbox("echo.example") as box:
        for name, allowed in (("echo.example", True), ("evil.example", False)):
            before = len(world.inet.dialled)
            hello = client_hello(sni(name.encode()), size=record_size)
            with box.connect("echo.example", 443) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for at in range(0, len(hello), segment):
                    sock.send(hello[at : at + segment])
                # The test's TLS server answers a hello it dislikes with an alert: it was reached.
                if allowed:
                    assert sock.recv(10)
                else:
                    assert closed(sock)
            assert (len(world.inet.dialled) > before) is allowed


def test_second_hello_after_a_retry_is_judged_too(world: World) -> None:
    """Refuse another name in the hello that follows a HelloRetryRequest, also when sent ahead of time."""
    world.inet.records["retry.example"] = ["203.0.113.77"]
    accepted = world.inet.take("203.0.113.77")
    first, same, other = (hello_for(name) for name in ("retry.example", "retry.example", "evil.example"))
    change = b"\x14\x03\x03\x00\x01\x01"
    with world.sandbox("retry.example") as box:
        for early in (False, True):
            for second, allowed in ((same, True), (other, False)):
                with box.connect("retry.example", 443) as sock:
                    sock.sendall(first + (change + second if early else b""))
                    with accepted.get(timeout=60) as server:
                        assert read_exactly(server, len(first)) == first
                        server.sendall(retry_request())
                        if allowed or not early:
                            assert sock.recv(4096)
                        if not early:
                            sock.sendall(change + second)
                        if allowed:
                            assert read_exactly(server, len(change + second)) == change + second
                            sock.sendall(b"tail")
                            assert read_exactly(server, 4) == b"tail"
                        else:
                            assert closed(server)
        box.event("second ClientHello", name="evil.example")


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (got := sock.recv(size - len(data))):
        data += got
    return data
