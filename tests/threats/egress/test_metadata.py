"""EGR-15: metadata services, the host's loopback and its ports stay out of reach, whatever the list says."""

import pytest
from lab.internet import World

from atoll.egress import EgressPolicy, mode, mode_names

METADATA = ["169.254.169.254", "169.254.170.2", "168.63.129.16", "100.100.100.200", "192.0.0.192", "169.254.0.23"]
NAMES = ["metadata.google.internal", "metadata.goog", "metadata", "instance-data.ec2.internal"]


def test_metadata_addresses_are_reset(world: World) -> None:
    """Refuse known metadata addresses from a sandbox that may reach everything public."""
    with world.sandbox("*") as box:
        before = len(world.inet.dialled)
        for address in METADATA:
            with box.open() as sock, pytest.raises(ConnectionRefusedError):
                sock.connect((address, 80))
            box.event("raw addresses", address=address, port=80)
        assert len(world.inet.dialled) == before


def test_metadata_names_are_never_answered(world: World) -> None:
    """Answer NXDOMAIN even when a tenant lists the name itself and upstream gives a public address."""
    for name in NAMES:
        world.inet.records[name] = ["203.0.113.10"]
    with world.sandbox("*", *NAMES) as box:
        for name in NAMES:
            assert box.ask(name) == (3, [])
            box.event("metadata", name=name)


@pytest.mark.parametrize("name", mode_names())
def test_every_mode_refuses_metadata(name: str) -> None:
    """Decide against metadata names under each compatibility mode."""
    policy = EgressPolicy.of(mode(name))
    assert not policy.decide("metadata.google.internal", 80).allowed
    assert not policy.decide("anything.internal", 443).allowed


def test_host_ports_are_closed_unless_opened(world: World) -> None:
    """Reach exactly the loopback port that was opened, under the host's name, and no other."""
    with world.host_listener() as opened, world.host_listener() as closed:
        port, other = opened.getsockname()[1], closed.getsockname()[1]
        with world.sandbox("*") as box:
            assert box.ask("host.atoll.internal") == (3, [])
            for number in (port, other):
                with box.open() as sock, pytest.raises(ConnectionRefusedError):
                    sock.connect((box.link.gateway, number))
        with world.sandbox(host_ports=[port]) as box:
            assert box.resolve("host.atoll.internal") == box.link.gateway
            with pytest.raises(ConnectionRefusedError):
                box.connect("host.atoll.internal", other)
            with box.connect("host.atoll.internal", port) as sock:
                server, _ = opened.accept()
                with server:
                    server.sendall(b"host says hi")
                    assert sock.recv(100) == b"host says hi"
            box.update()
            with box.open() as sock, pytest.raises(ConnectionRefusedError):
                sock.connect((box.link.gateway, port))
        closed.settimeout(0.1)
        with pytest.raises(TimeoutError):
            closed.accept()
