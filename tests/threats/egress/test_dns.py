"""EGR-01: DNS carries nothing out: denied names reach no server, whatever the shape of the question."""

import os
import socket
import struct

import pytest
from lab.internet import DNS_SERVER, World, dns_query

NOERROR, FORMERR, NXDOMAIN, NOTIMP, REFUSED = 0, 1, 3, 4, 5


@pytest.mark.parametrize("kind", [1, 2, 5, 6, 12, 15, 16, 28, 33, 64, 65, 255])
def test_denied_name_is_never_asked_upstream(world: World, kind: int) -> None:
    """Answer NXDOMAIN for a denied name, of any type, with no query leaving the machine."""
    with world.sandbox("a.example") as box:
        secret = f"{os.urandom(8).hex()}.evil.example"
        for tcp in (False, True):
            assert box.ask(secret, kind, tcp=tcp) == (NXDOMAIN, [])
        assert box.event("not an allowed host", name=secret).protocol == "dns"
        assert not [name for name in world.inet.queries if secret.partition(".")[0] in name.lower()]


def test_hard_coded_public_resolver_gets_the_same_answers(world: World) -> None:
    """Redirect port 53 of any address to our resolver: the outside server sees nothing."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    with world.sandbox("a.example") as box:
        before = len(world.inet.dialled)
        for tcp in (False, True):
            assert box.ask("x.denied-by-list.example", server=DNS_SERVER, tcp=tcp) == (NXDOMAIN, [])
            assert box.ask("a.example", server="8.8.8.8", tcp=tcp) == (NOERROR, ["203.0.113.10"])
        assert not [name for name in world.inet.queries if "denied-by-list" in name]
        assert len(world.inet.dialled) == before


def test_only_addresses_are_answered_for_allowed_names(world: World) -> None:
    """Give empty answers to AAAA, HTTPS, SVCB and TXT of an allowed name, without asking upstream."""
    world.inet.records["quiet.example"] = ["203.0.113.10"]
    with world.sandbox("quiet.example") as box:
        for kind in (28, 64, 65, 16, 15, 255):
            assert box.ask("quiet.example", kind) == (NOERROR, [])
        assert "quiet.example" not in world.inet.queries


def test_dns_over_tls_and_https_ports_are_closed(world: World) -> None:
    """Refuse 853 of a resolver even when its name is allowed for the web."""
    world.inet.records["dns.example"] = [DNS_SERVER]
    with world.sandbox("dns.example") as box:
        address = box.resolve("dns.example")
        with pytest.raises(ConnectionRefusedError), box.open() as sock:
            sock.connect((address, 853))
        box.event("port 853 is not open", port=853, name="dns.example")


def test_names_below_a_wildcard_are_few_and_short(world: World) -> None:
    """Bound what a sandbox can spell into names of an allowed suffix."""
    with world.sandbox("*.wild.example") as box:
        long = ".".join(["x" * 60] * 3) + ".wild.example"
        assert box.ask(long) == (NXDOMAIN, [])
        deep = ".".join("abcdefghijkl") + ".wild.example"
        assert box.ask(deep) == (NXDOMAIN, [])
        box.event("too long for a wildcard")
        assert not [name for name in world.inet.queries if name in (long, deep)]


def test_flood_of_queries_is_limited_and_harms_nobody_else(world: World) -> None:
    """Let one sandbox flood the resolver while another goes on being answered."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    with world.sandbox("*.flood.example") as noisy, world.sandbox("a.example") as calm:
        with noisy.open(socket.SOCK_DGRAM) as sock:
            for number in range(4000):
                sock.sendto(dns_query(f"n{number}.flood.example".encode()), (noisy.link.gateway, 53))
        assert calm.resolve("a.example") == "203.0.113.10"
        assert len({name for name in world.inet.queries if "flood.example" in name}) < 1500


@pytest.mark.parametrize("tcp", [False, True])
def test_garbage_does_not_stop_the_resolver(world: World, tcp: bool) -> None:
    """Survive malformed packets and answer the next good one."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    good = dns_query(b"a.example")
    bad = [
        b"",
        b"\0",
        good[:11],
        good[:-1],
        good[:12],
        b"\xff" * 600,
        struct.pack("!6H", 1, 0x0100, 1, 0, 0, 0) + b"\xc0\x0c\x00\x01\x00\x01",
        struct.pack("!6H", 1, 0x0100, 9999, 0, 0, 0) + good[12:],
        struct.pack("!6H", 1, 0x8180, 1, 0, 0, 0) + good[12:],
        struct.pack("!6H", 1, 0x0100, 1, 0, 0, 0) + b"\x3f" + b"a" * 10,
        struct.pack("!6H", 1, 0x0100, 1, 0, 0, 0) + (b"\x3f" + b"a" * 63) * 5 + b"\0\0\1\0\1",
    ]
    with world.sandbox("a.example") as box:
        for packet in bad:
            with box.open(socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM) as sock:
                sock.connect((box.link.gateway, 53))
                sock.send(struct.pack("!H", len(packet)) + packet if tcp else packet)
        assert box.resolve("a.example") == "203.0.113.10"


def test_odd_opcodes_and_classes_are_refused(world: World) -> None:
    """Serve nothing but plain queries of class IN."""
    with world.sandbox("a.example") as box:
        update = bytearray(dns_query(b"a.example"))
        update[2] = 5 << 3
        assert box.send_dns(bytes(update))[3] & 15 == NOTIMP
        chaos = dns_query(b"a.example")[:-2] + b"\0\3"
        assert box.send_dns(chaos)[3] & 15 == REFUSED
