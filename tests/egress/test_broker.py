"""What is allowed works, end to end, on real namespaces."""

from egress_world import World


def test_tls_to_an_allowed_host_passes(world: World) -> None:
    """Reach an allowed host over TLS and count its bytes."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    with world.sandbox("a.example") as box, box.tls("a.example") as tls:
        tls.sendall(b"ping")
        assert tls.recv(100) == b"tls:ping"
        use = box.counters()["hosts"]["a.example"]
        assert use["connections"] == 1 and use["sent"] > 100 and use["received"] > 100
