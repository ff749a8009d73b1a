"""What is allowed works, end to end, and the broker stands what sandboxes throw at it."""

import contextlib
import hashlib
import os
import socket
import ssl
import threading

import pytest
from lab.internet import Inside, World, wait_for

ADDRESS = "203.0.113.10"


@pytest.fixture(autouse=True)
def records(world: World) -> None:
    world.inet.records["a.example"] = [ADDRESS]


def echo(box: Inside, data: bytes = b"ping") -> None:
    with box.connect("a.example", 5432) as sock:
        sock.sendall(data)
        got = b""
        while len(got) < len(data):
            got += sock.recv(65536)
        assert got == data


def test_tls_to_an_allowed_host_passes(world: World) -> None:
    """Reach an allowed host over TLS and count its bytes."""
    with world.sandbox("a.example") as box, box.tls("a.example") as tls:
        tls.sendall(b"ping")
        assert tls.recv(100) == b"tls:ping"
        use = box.counters()["hosts"]["a.example"]
        assert use["connections"] == 1 and use["sent"] > 100 and use["received"] > 100


def test_ssh_of_listed_git_hosts_passes(world: World) -> None:
    """Open port 22 for a git host that is listed, and for no other."""
    world.inet.records["github.com"] = [ADDRESS]
    with world.sandbox("github.com", "a.example") as box, box.connect("github.com", 22) as sock:
        assert sock.recv(100).startswith(b"SSH-2.0")
    with world.sandbox("a.example") as box, pytest.raises(ConnectionRefusedError):
        box.connect("a.example", 22)


def test_everything_public_by_name(world: World) -> None:
    """Reach any port of any public name under `*`, and names that are not public not at all."""
    world.inet.records["anything.example"] = [ADDRESS]
    with world.sandbox("*") as box:
        for port in (5432, 8443):
            with box.connect("anything.example", port) as sock:
                sock.sendall(b"x")
                assert sock.recv(1) == b"x"
        with box.tls("anything.example") as tls:
            tls.sendall(b"x")
            assert tls.recv(10) == b"tls:x"
        for name in ("printer", "db.internal", "nas.local", "x.home.arpa", "4.3.2.1.in-addr.arpa"):
            assert box.ask(name) == (3, [])


def test_answers_that_need_tcp_are_fetched(world: World) -> None:
    """Ask again over TCP when upstream truncates."""
    world.inet.records["big.example"] = ["tcp-only", *(f"203.0.113.{i}" for i in range(1, 40))]
    with world.sandbox("big.example") as box:
        code, addresses = box.ask("big.example")
        assert code == 0 and len(addresses) == 16
        assert box.ask("big.example", tcp=True) == (code, addresses)


def test_names_that_do_not_exist(world: World) -> None:
    """Pass on NXDOMAIN for an allowed name without calling it a refusal."""
    with world.sandbox("missing.example") as box:
        assert box.ask("missing.example") == (3, [])
        assert box.counters()["refused"] == 0


def test_data_arrives_whole_with_a_slow_reader(world: World) -> None:
    """Hold the server back when the sandbox reads slowly, and lose nothing."""
    size = 24 << 20
    with world.sandbox("a.example:9000") as box, box.connect("a.example", 9000) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sock.sendall(b"%d\n" % size)
        got = 0
        while got < size:
            got += len(sock.recv(1 << 20)) or pytest.fail("short")
        assert got == size
        assert sock.recv(1) == b""


def test_upload_is_byte_exact(world: World) -> None:
    """Carry random bytes up and back through a port that echoes."""
    data = os.urandom(4 << 20)
    with world.sandbox("a.example:5432") as box, box.connect("a.example", 5432) as sock:
        sender = threading.Thread(target=sock.sendall, args=(data,))
        sender.start()
        digest, left = hashlib.sha256(), len(data)
        while left:
            part = sock.recv(65536)
            digest.update(part)
            left -= len(part) or pytest.fail("short")
        sender.join(60)
        assert digest.digest() == hashlib.sha256(data).digest()


def test_half_closed_connection_goes_on(world: World) -> None:
    """Pass on the end of one direction and keep the other open."""
    world.inet.records["half.example"] = ["203.0.113.88"]
    accepted = world.inet.take("203.0.113.88")
    with world.sandbox("half.example:5432") as box, box.connect("half.example", 5432) as sock:
        sock.sendall(b"question")
        sock.shutdown(socket.SHUT_WR)
        with accepted.get(timeout=60) as server:
            got = b""
            while part := server.recv(100):
                got += part
            assert got == b"question"
            server.sendall(b"answer")
        got = b""
        while part := sock.recv(100):
            got += part
        assert got == b"answer"


def test_refused_upstream_is_a_reset(world: World) -> None:
    """Show an unreachable server as a reset connection, not as a silent end."""
    with world.sandbox("a.example:7777") as box, pytest.raises(ConnectionError), box.connect("a.example", 7777) as sock:
        assert sock.recv(1)


def test_many_connections_at_once(world: World) -> None:
    """Serve a thousand connections of one sandbox while another goes on undisturbed."""
    world.inet.records["many.example"] = ["203.0.113.89"]
    accepted = world.inet.take("203.0.113.89")
    with world.sandbox("many.example:5432") as busy, world.sandbox("a.example:5432") as calm:
        address = busy.resolve("many.example")
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(busy.connect(address, 5432)) for _ in range(1000)]
            for sock in socks:
                sock.sendall(b"hello")
            echo(calm)
            for _ in socks:
                server = stack.enter_context(accepted.get(timeout=60))
                assert server.recv(5) == b"hello"
                server.sendall(b"world")
            for sock in socks:
                assert sock.recv(5) == b"world"
            assert busy.counters()["open"] == 1000
        wait_for("all closed", lambda: busy.counters()["open"] == 0)


def test_half_open_hellos_starve_nobody(world: World) -> None:
    """Leave hundreds of connections without a hello; others are served meanwhile."""
    with world.sandbox("a.example") as slow, world.sandbox("a.example") as calm:
        slow.resolve("a.example")
        with contextlib.ExitStack() as stack:
            for number in range(300):
                sock = stack.enter_context(slow.connect(ADDRESS, (443, 80)[number % 2]))
                sock.sendall((b"\x16\x03\x01\x02", b"GET / HT")[number % 2])
            with calm.tls("a.example") as tls:
                tls.sendall(b"x")
                assert tls.recv(10) == b"tls:x"


def test_garbage_on_every_port_stops_nothing(world: World) -> None:
    """Throw random bytes at the TLS, HTTP and DNS ports; the same broker serves on."""
    pid = world.egress.broker_pid
    with world.sandbox("a.example", "a.example:5432") as box:
        box.resolve("a.example")
        for number in range(120):
            with contextlib.suppress(OSError), box.connect(ADDRESS, (443, 80)[number % 2]) as sock:
                sock.sendall(os.urandom(1 + number * 7))
                if number % 3 == 0:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            with box.open(socket.SOCK_DGRAM) as sock:
                sock.sendto(os.urandom(number), (box.link.gateway, 53))
        echo(box)
        assert world.egress.broker_pid == pid


def test_connections_beyond_the_limit_are_refused(world: World) -> None:
    """Reset what one sandbox opens beyond its share, tell it, and serve it again later."""
    world.inet.records["limit.example"] = ["203.0.113.90"]
    accepted = world.inet.take("203.0.113.90")
    with world.sandbox("limit.example:5432", "a.example:5432") as box:
        address = box.resolve("limit.example")
        with contextlib.ExitStack() as stack:
            for _ in range(2100):
                try:
                    stack.enter_context(box.connect(address, 5432))
                except ConnectionError:
                    break
            box.event("too many connections", address=address, port=5432)
            assert box.counters()["open"] <= 2048

        def drained() -> bool:
            while not accepted.empty():
                accepted.get().close()
            return bool(box.counters()["open"] == 0)

        wait_for("room again", drained)
        echo(box)


def test_events_name_what_was_refused(world: World) -> None:
    """Tell time, sandbox, name, address, port and reason, and a line for a person."""
    with world.sandbox("a.example") as box:
        box.ask("evil.example")
        event = box.event("not an allowed host", name="evil.example")
        assert event.sandbox == box.name and event.time > 1e9
        assert event.note == "blocked: evil.example is not an allowed host"
        with pytest.raises((ssl.SSLError, ConnectionError)):
            box.tls("a.example", sni="evil.example")
        assert box.event("not an allowed host", port=443).note == "blocked: evil.example:443 is not an allowed host"


def test_listener_sees_events_at_once(world: World) -> None:
    """Call the daemon's listener for each event, and survive one that fails."""
    seen: list[str] = []

    def listen(event: object) -> None:
        seen.append(getattr(event, "name"))  # noqa: B009
        raise RuntimeError("a careless listener")

    world.egress._on_event = listen
    try:
        with world.sandbox() as box:
            box.ask("one.example")
            box.ask("two.example")
            wait_for("both", lambda: seen == ["one.example", "two.example"])
    finally:
        world.egress._on_event = None


def test_rate_of_attach_and_detach(world: World) -> None:
    """Attach and detach in a row without leaving interfaces behind."""
    for _ in range(30):
        with world.sandbox("a.example") as box:
            assert box.ask("a.example")[0] == 0
    router = world.egress._router
    wait_for(
        "only the loopback",
        lambda: world.call(world.egress._in_router(socket.if_nameindex)) == [(1, "lo")],
    )
    assert router._used == set()
