"""EGR-09: an allowed host can be a mailbox, so its use is counted to the byte, and presets name no shared storage."""

import socket

from egress_world import World, dns_query, wait_for

from atoll.egress import default_hosts, mode, registries


def test_counters_are_exact(world: World) -> None:
    """Count connections and bytes per host, both ways."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    world.inet.records["b.example"] = ["203.0.113.20"]
    with world.sandbox("a.example:5432", "b.example:5432") as box:
        for name, sizes in (("a.example", (10, 2000)), ("b.example", (300_000,))):
            for size in sizes:
                with box.connect(name, 5432) as sock:
                    sock.sendall(bytes(size))
                    got = 0
                    while got < size:
                        got += len(sock.recv(65536))
        counters = box.counters()
        assert counters["hosts"]["a.example"] == {"connections": 2, "sent": 2010, "received": 2010}
        assert counters["hosts"]["b.example"] == {"connections": 1, "sent": 300_000, "received": 300_000}
        assert counters["last_payload"] > 0
        wait_for("closed connections", lambda: box.counters()["open"] == 0)


def test_refusals_are_counted(world: World) -> None:
    """Count every refusal, also those that are not told one by one."""
    with world.sandbox() as box:
        with box.open(socket.SOCK_DGRAM) as sock:
            for _ in range(200):
                sock.sendto(dns_query(b"evil.example"), (box.link.gateway, 53))
        wait_for("most of them", lambda: box.counters()["refused"] >= 150)
        assert 0 < len([event for event in box.events() if event.name == "evil.example"]) < 150


def test_presets_open_no_shared_storage() -> None:
    """Keep object stores and paste sites that anyone can write to out of the registry set and the default list."""
    shared = (
        "amazonaws",
        "storage.googleapis",
        "blob.core",
        "gist.github",
        "pastebin",
        "cloudfront",
        "r2.dev",
        "herokuapp",
    )
    for host in (*registries(), *default_hosts(), *mode("codex")):
        assert not any(word in host for word in shared), host
