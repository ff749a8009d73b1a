"""EGR-06: a proxy inside, or a CONNECT within a CONNECT, gains nothing: the verdict is on the sandbox's connection."""

import contextlib
import socket
import threading

import pytest
from lab.internet import World, in_net


def test_proxy_inside_reaches_only_what_its_sandbox_may(world: World) -> None:
    """Run a forwarder inside: through it the same is allowed and refused."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    with world.sandbox("a.example") as box:
        listener = in_net(box.net, lambda: socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(60)
        outcome: list[str] = []

        def forward() -> None:
            for target in (("203.0.113.10", 80), ("203.0.113.20", 80)):
                conn, _ = listener.accept()
                with conn:
                    try:
                        with box.open() as upstream:
                            upstream.connect(target)
                            upstream.sendall(conn.recv(4096))
                            conn.sendall(upstream.recv(4096))
                            outcome.append("passed")
                    except OSError:
                        outcome.append("refused")

        thread = threading.Thread(target=forward)
        thread.start()
        box.resolve("a.example")
        for _ in range(2):
            with contextlib.suppress(ConnectionError), box.open() as sock:
                sock.connect(listener.getsockname())
                sock.sendall(b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n")
                sock.recv(4096)
        thread.join(60)
        listener.close()
        assert outcome == ["passed", "refused"]


@pytest.mark.parametrize("target", ["evil.example:443", "a.example:443", "203.0.113.20:80"])
def test_broker_is_no_proxy(world: World, target: str) -> None:
    """Refuse CONNECT to the broker, whatever it asks for."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    with world.sandbox("a.example") as box, box.connect("a.example", 80) as sock:
        before = len(world.inet.dialled)
        sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        assert b"200" not in sock.recv(4096)[:20]
        box.event("", port=80, protocol="tcp")
        assert len(world.inet.dialled) == before
