"""EGR-10: a name never leads into private space, at first or later, and the judgement is repeated at each dial."""

import ipaddress
import ssl

import pytest
from lab.internet import HOST_ADDRESS, World

from atoll.egress.addresses import refusal, refused_networks

SPECIAL = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.254", "100.64.0.1", "100.96.0.1", "100.127.255.254", "127.0.0.1",
    "127.1.2.3", "168.63.129.16", "169.254.0.1", "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.254",
    "192.0.0.1", "192.0.0.192", "192.88.99.1", "192.168.0.1", "192.168.255.254", "198.18.0.1", "198.19.255.254",
    "224.0.0.1", "239.255.255.255", "240.0.0.1", "250.1.2.3", "255.255.255.255", "100.100.100.200", "169.254.10.10",
    "172.20.1.1", "10.96.0.1",
]  # fmt: skip
SPECIAL_V6 = [
    "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:10.0.0.1",
    "64:ff9b::a00:1", "64:ff9b:1::1", "2002:a00:1::", "2001::1", "100::1", "fc00::1", "fd00:ec2::254", "fe80::1",
    "fec0::1", "ff02::1", "fe80::1%1",
]  # fmt: skip
PUBLIC = ["192.0.2.1", "198.51.100.1", "203.0.113.10", "1.1.1.1", "8.8.8.8", "172.32.0.1", "172.15.0.1", "100.63.1.1",
          "100.128.0.1", "169.253.1.1", "2606:4700::1111", "2001:db8::1", "2a00:1450::1"]  # fmt: skip


@pytest.mark.parametrize("address", SPECIAL + SPECIAL_V6)
def test_special_addresses_are_refused(address: str) -> None:
    """Name a reason for every special address, in every spelling."""
    assert refusal(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_and_documentation_addresses_are_not(address: str) -> None:
    """Leave public addresses, and documentation ranges, alone."""
    assert refusal(address) is None


def test_every_refused_network_is_refused_at_both_ends() -> None:
    """Check the first and last address of each network of the list."""
    assert len(refused_networks()) >= 25
    for network in refused_networks():
        assert refusal(str(network[0])) and refusal(str(network[-1]))
        if isinstance(network, ipaddress.IPv4Network):
            assert refusal(f"::ffff:{network[0]}")


def test_no_special_address_is_handed_out_or_dialled(world: World) -> None:
    """Answer NXDOMAIN when an allowed name leads to any special range, and dial none of them."""
    with world.sandbox("rebind.example", "*") as box:
        before = len(world.inet.dialled)
        for address in SPECIAL:
            world.inet.records["rebind.example"] = [address]
            assert box.ask("rebind.example") == (3, [])
            box.event("the name leads to", address=address, name="rebind.example")
            with box.open() as sock, pytest.raises(OSError):
                sock.settimeout(2)
                sock.connect((address, 80))
        assert len(world.inet.dialled) == before


def test_private_addresses_are_taken_out_of_mixed_answers(world: World) -> None:
    """Hand out only the public part of an answer."""
    world.inet.records["mixed.example"] = ["10.0.0.1", "203.0.113.10", "127.0.0.1"]
    with world.sandbox("mixed.example") as box:
        assert box.ask("mixed.example") == (0, ["203.0.113.10"])


def test_flipping_answers_reach_only_what_was_handed_out(world: World) -> None:
    """Keep refusing after a name that was public turns private."""
    world.inet.records["flip.example"] = ["203.0.113.10"]
    with world.sandbox("flip.example") as box:
        with box.tls("flip.example") as tls:
            tls.sendall(b"x")
            assert tls.recv(10)
        world.inet.records["flip.example"] = ["169.254.169.254"]
        before = len(world.inet.dialled)
        assert box.ask("flip.example") == (3, [])
        with box.open() as sock, pytest.raises(ConnectionRefusedError):
            sock.connect(("169.254.169.254", 80))
        assert len(world.inet.dialled) == before


def test_hosts_file_answers_are_judged_too(world: World) -> None:
    """Honour the machine's hosts file, but not for loopback."""
    with world.sandbox("from-hosts.example", "loop-hosts.example") as box:
        assert box.ask("from-hosts.example") == (0, ["203.0.113.99"])
        assert box.ask("loop-hosts.example") == (3, [])


def test_operator_can_open_one_private_network_for_one_host(world: World) -> None:
    """Reach a company mirror that the operator named, and nothing else there."""
    world.inet.records["mirror.example"] = ["10.1.2.3"]
    world.inet.records["other.example"] = ["10.1.2.3"]
    with world.sandbox("mirror.example", "other.example", private={"mirror.example": ["10.1.0.0/16"]}) as box:
        with box.tls("mirror.example") as tls:
            tls.sendall(b"x")
            assert tls.recv(10) == b"tls:x"
        assert box.ask("other.example") == (3, [])
        world.inet.records["mirror.example"] = ["10.2.2.3"]
        assert box.ask("mirror.example") == (3, [])


def test_public_address_of_the_machine_itself_is_refused(world: World) -> None:
    """Refuse a name that leads to the host's own, unlisted address."""
    listener = world.host_listener(HOST_ADDRESS)
    port = listener.getsockname()[1]
    world.inet.records["self.example"] = [HOST_ADDRESS]
    with listener, world.sandbox(f"self.example:{port}", "self.example") as box:
        with pytest.raises(ConnectionError), box.connect("self.example", port) as sock:
            sock.recv(10)
        box.event("address of this machine", port=port)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            box.tls("self.example")
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()
