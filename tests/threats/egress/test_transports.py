"""EGR-14: nothing but TCP to granted addresses and DNS to the resolver leaves a sandbox."""

import contextlib
import os
import socket
import struct

import pytest
from lab.internet import PATIENCE, Inside, World, in_net, wait_for

ETH_P_ALL = 3


@contextlib.contextmanager
def sniffer(world: World) -> "contextlib.AbstractContextManager[socket.socket]":  # type: ignore[misc]
    """Sees every packet on the broker's cable to the outside."""
    sock = in_net(world.host, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)))
    sock.bind(("up0", ETH_P_ALL))
    sock.setblocking(False)
    with sock:
        yield sock


def seen(sock: socket.socket, marker: bytes) -> bool:
    found = False
    while True:
        try:
            found = marker in sock.recv(65536) or found
        except BlockingIOError:
            return found


def test_raw_address_is_reset_and_logged(world: World) -> None:
    """Fail connect() itself for an address that was never resolved, allowed host or not."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    with world.sandbox("a.example") as box:
        before = len(world.inet.dialled)
        for port in (80, 443, 22, 8443):
            with box.open() as sock, pytest.raises(ConnectionRefusedError):
                sock.connect(("203.0.113.10", port))
            assert box.event("raw addresses", port=port).address == "203.0.113.10"
        assert len(world.inet.dialled) == before


def test_no_raw_address_under_a_wildcard_for_everything(world: World) -> None:
    """Keep refusing raw addresses when every public name is allowed."""
    with world.sandbox("*") as box, box.open() as sock, pytest.raises(ConnectionRefusedError):
        sock.connect(("203.0.113.10", 443))


def test_port_that_is_not_open_is_reset_and_logged(world: World) -> None:
    """Fail connect() for other ports of an allowed host."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    with world.sandbox("a.example") as box:
        for port in (22, 8443, 1, 25):
            with pytest.raises(ConnectionRefusedError):
                box.connect("a.example", port)
            box.event("is not open for this host", port=port, name="a.example")


@pytest.mark.parametrize("target", ["203.0.113.10", "255.255.255.255", "224.0.0.251", "gateway"])
def test_udp_is_dropped_and_logged(world: World, target: str) -> None:
    """Drop UDP, so also QUIC, to a granted address, broadcast, multicast and the gateway."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    marker = os.urandom(12)
    with world.sandbox("a.example") as box, sniffer(world) as outside:
        box.resolve("a.example")
        address = box.link.gateway if target == "gateway" else target
        with box.open(socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sock.sendto(b"\xc3\0\0\0\x01" + marker, (address, 443))
        box.event("udp is not passed", address=address, port=443)
        assert not seen(outside, marker)
        assert not world.inet.udp_seen


@pytest.mark.parametrize("protocol", [1, 47, 50, 132, 136, 255])
def test_other_protocols_are_dropped(world: World, protocol: int) -> None:
    """Drop ICMP, GRE, ESP, SCTP, UDP-Lite and raw IP from a root with raw sockets."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    marker = os.urandom(16)
    with world.sandbox("a.example") as box, sniffer(world) as outside:
        box.resolve("a.example")
        for address in ("203.0.113.10", box.link.gateway):
            payload = (b"\x08\0" + struct.pack("!H", ~8 << 8 & 0xFFFF) + bytes(4) if protocol == 1 else b"") + marker
            raw_send(box, protocol, address, payload)
        box.event("is not passed", address="203.0.113.10")
        assert not seen(outside, marker)


def raw_send(box: Inside, protocol: int, target: str, payload: bytes, source: str | None = None) -> None:
    """One IP packet with a header of our own making."""
    with box.open(socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 0, 0, 64, protocol, 0)
        head += socket.inet_aton(source or box.link.address) + socket.inet_aton(target)
        sock.sendto(head + payload, (target, 0))


def test_spoofed_source_is_dropped_and_logged(world: World) -> None:
    """Drop packets under another sandbox's address, also those that would be allowed there."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    with world.sandbox("a.example") as victim, world.sandbox() as box:
        victim.resolve("a.example")
        before, asked = len(world.inet.dialled), len(world.inet.queries)
        syn = struct.pack("!HHIIBBHHH", 40000, 443, 1, 0, 5 << 4, 2, 65535, 0, 0)
        query = os.urandom(2) + struct.pack("!5H", 0x0100, 1, 0, 0, 0) + b"\1a\7example\0\0\1\0\1"
        dns = struct.pack("!HHHH", 40001, 53, 8 + len(query), 0) + query
        for source in (victim.link.address, victim.link.gateway, box.link.gateway, "203.0.113.10", "127.0.0.1"):
            raw_send(box, 6, "203.0.113.10", syn, source)
            raw_send(box, 17, victim.link.gateway, dns, source)
        box.event("is not the sandbox's own")
        assert not victim.events()
        assert len(world.inet.dialled) == before and len(world.inet.queries) == asked


def test_other_sandboxes_are_out_of_reach(world: World) -> None:
    """Refuse TCP from one sandbox to another, by its address, and to its gateway."""
    with world.sandbox() as one, world.sandbox("*") as two:
        server = in_net(one.net, lambda: socket.create_server((one.link.address, 0)))
        with server:
            port = server.getsockname()[1]
            for address in (one.link.address, one.link.gateway):
                with two.open() as sock, pytest.raises(ConnectionRefusedError):
                    sock.connect((address, port))
            server.settimeout(0.2)
            with pytest.raises(TimeoutError):
                server.accept()


def test_grants_are_not_shared(world: World) -> None:
    """Refuse an address that another sandbox was given."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    with world.sandbox("a.example") as one, world.sandbox("a.example") as two:
        one.resolve("a.example")
        with two.open() as sock, pytest.raises(ConnectionRefusedError):
            sock.connect(("203.0.113.10", 443))


def test_ipv6_is_off_and_dropped(world: World) -> None:
    """Have no IPv6 on the link, and pass none when root turns it on."""
    with world.sandbox("*") as box:
        assert box.ask("a.example", 28)[1] == []
        with box.open(family=socket.AF_INET6) as sock, pytest.raises(OSError):
            sock.connect(("2001:db8::1", 443))

        def turn_on() -> None:
            with open("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "w") as handle:
                handle.write("0")

        in_net(box.net, turn_on)
        index = in_net(box.net, lambda: socket.if_nametoindex("eth0"))
        with box.open(socket.SOCK_DGRAM, family=socket.AF_INET6) as sock:

            def send() -> bool:
                try:
                    sock.sendto(b"x", ("ff02::1", 53, 0, index))
                except OSError:
                    return False
                return True

            wait_for("IPv6 in the sandbox", send)
        with box.open(family=socket.AF_INET6) as sock, pytest.raises(OSError):
            sock.settimeout(1)
            sock.connect((f"fe80::1%{index}", 53, 0, index))


def test_broker_ports_cannot_be_reached_directly(world: World) -> None:
    """Refuse connections to the broker's own port on the gateway."""
    with world.sandbox("*") as box:
        for port in (1, 2, 80, 443, 8811):
            with box.open() as sock, pytest.raises(ConnectionRefusedError):
                sock.connect((box.link.gateway, port))
    assert PATIENCE > 1
