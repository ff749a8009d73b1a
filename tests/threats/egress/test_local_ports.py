"""F2 floods of the broker: who opens and closes connections does not take the machine's ports towards a server from others."""

from collections.abc import Iterator

import pytest
from lab.internet import Inside, World, in_net, wait_for

from atoll.accounts import sandbox
from atoll.egress.broker.local_ports import OWN, LocalPorts
from atoll.egress.router.netlink import write_sysctl

HOST = "shared.example"
PORTS = 256  # the kernel chooses from so few in this world


class FewPorts(World):
    def start_egress(self):  # type: ignore[no-untyped-def]
        in_net(self.host, lambda: write_sysctl("ipv4/ip_local_port_range", f"40000 {40000 + PORTS - 1}"))
        return super().start_egress()


@pytest.fixture(scope="module")
def few() -> Iterator[World]:
    made = FewPorts()
    made.inet.records[HOST] = ["203.0.113.10"]
    yield made
    made.close()


def open_and_close(box: Inside, address: str, count: int) -> int:
    """Use a connection and end it first, some times; how many of them worked."""
    worked = 0
    for _ in range(count):
        try:
            with box.connect(address, 5432) as sock:
                sock.sendall(b"x")
                worked += sock.recv(1) == b"x"
        except ConnectionResetError:
            pass
    return worked


def test_a_neighbour_reaches_a_server_whose_ports_others_used_up(few: World) -> None:
    rule = f"{HOST}:5432"
    with few.sandbox(rule) as one, few.sandbox(rule) as two, few.sandbox(rule) as three, few.sandbox(rule) as near:
        worked = [open_and_close(box, box.resolve(HOST), PORTS // 2) for box in (one, two, three)]
        assert worked[0] >= OWN, worked
        one.event("too many connections to this host within a minute", name=HOST)
        assert open_and_close(near, near.resolve(HOST), OWN // 2) == OWN // 2, worked


def test_connections_ended_by_the_server_take_no_port(few: World) -> None:
    """The kernel keeps the port at the side that ends first."""
    few.inet.records["banner.example"] = ["203.0.113.11"]
    with few.sandbox("banner.example:22") as box:
        address = box.resolve("banner.example")
        for _ in range(OWN * 2):
            with box.connect(address, 22) as sock:
                assert sock.recv(100).startswith(b"SSH")
                sock.sendall(b"x")
                assert sock.recv(100) == b""
        wait_for("all are ended", lambda: box.counters()["open"] == 0)


def test_shares_of_ports() -> None:
    """One gets half of what may be taken; those who come later get as much as those before them; a minute gives them back."""
    now = [0.0]
    ports = LocalPorts(16384, lambda: now[0])
    to, most = ("203.0.113.1", 443), 16384 * 3 // 8

    def take_all(name: str) -> int:
        return next(n for n in range(PORTS * 100) if not ports.take(sandbox(name), to))

    assert take_all("a") == most // 2
    assert take_all("b") == most // 4
    assert all(take_all(f"n{n}") >= OWN for n in range(30))
    assert ports.take(sandbox("a"), ("203.0.113.2", 443))
    for _ in range(most // 2):
        ports.give(sandbox("a"), to, kept=True)
    assert not ports.take(sandbox("a"), to)
    now[0] = 61.0
    assert ports.take(sandbox("a"), to)


def test_nothing_is_kept_of_destinations_that_are_not_used() -> None:
    now = [0.0]
    ports = LocalPorts(16384, lambda: now[0])
    for number in range(100):
        assert ports.take(sandbox("a"), ("203.0.113.1", number))
        ports.give(sandbox("a"), ("203.0.113.1", number), kept=number % 2 == 0)
    assert len(ports) == 50
    now[0] = 61.0
    ports.expire()
    assert len(ports) == 0
