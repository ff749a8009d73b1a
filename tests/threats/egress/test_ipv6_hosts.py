"""Hosts that have only IPv6 are reached through a stand-in address, by the same rules as any other; no other way exists."""

import socket
import ssl

import pytest
from lab.internet import World, in_net, wait_for

from atoll.egress.broker.ipv6_standins import MAX_STANDINS, StandIns

SIX, OTHER = "2001:db8::10", "2001:db8::20"


@pytest.fixture(autouse=True)
def six(world: World) -> None:
    def reach() -> bool:
        try:
            socket.create_connection((SIX, 5432), 5).close()
        except OSError:
            return False
        return True

    def count() -> int:
        return world.inet.dialled.count((SIX, 5432))

    before = count()
    if not in_net(world.host, reach):
        pytest.skip("no IPv6 here")
    # The server notes a connection a moment after the client has it: this one must not count as one of the test.
    wait_for("the note of this connection", lambda: count() > before)
    world.inet.records.update({"six.example": [SIX], "other6.example": [OTHER], "both.example": ["203.0.113.10", SIX]})


def test_a_host_with_only_ipv6_is_reached(world: World) -> None:
    """Answer A with a stand-in and AAAA with nothing, and dial the IPv6 address."""
    with world.sandbox("six.example", "six.example:5432") as box:
        assert box.ask("six.example", 28) == (0, [])
        address = box.resolve("six.example")
        assert address.startswith(("198.18.", "198.19.")) and box.resolve("six.example") == address
        with box.tls("six.example") as tls:
            tls.sendall(b"x")
            assert tls.recv(10) == b"tls:x"
        assert (SIX, "six.example") in world.inet.names_sent
        with box.connect("six.example", 5432) as sock:
            sock.sendall(b"echo")
            assert sock.recv(10) == b"echo"
        assert box.counters()["hosts"]["six.example"]["connections"] == 2


def test_ipv4_is_taken_where_there_is_one(world: World) -> None:
    with world.sandbox("both.example") as box:
        assert box.resolve("both.example") == "203.0.113.10"


def test_a_stand_in_is_bound_to_its_name_and_sandbox(world: World) -> None:
    """Refuse another name, another port, another sandbox's stand-in, and one after its host was closed."""
    with world.sandbox("six.example", "other6.example") as box, world.sandbox("six.example") as neighbour:
        address, other = box.resolve("six.example"), box.resolve("other6.example")
        assert address != other
        before = len(world.inet.dialled)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            box.tls("six.example", sni="other6.example", address=address)
        assert box.event("not the name that was resolved", name="other6.example").address == SIX
        for where, port, who in ((address, 22, box), (address, 443, neighbour), ("198.18.0.1", 443, neighbour)):
            if who is neighbour and neighbour.ask("six.example")[1] == [where]:
                continue  # by chance the same number
            with pytest.raises(ConnectionRefusedError):
                who.connect(where, port)
        box.update("other6.example")
        with pytest.raises(ConnectionRefusedError):
            box.connect(address, 443)
        assert len(world.inet.dialled) == before


@pytest.mark.parametrize(
    "special", ["::1", "fe80::1", "fd00::1", "64:ff9b::a00:1", "::ffff:10.0.0.1", "2002:a00:1::", "ff02::1"]
)
def test_special_ipv6_answers_are_refused(world: World, special: str) -> None:
    """Hand out nothing for a name that leads to a special IPv6 address, and dial nothing."""
    world.inet.records["evil6.example"] = [special]
    with world.sandbox("evil6.example") as box:
        before = len(world.inet.dialled)
        code, addresses = box.ask("evil6.example")
        assert addresses == [] and code in (0, 3)
        world.inet.records["evil6.example"] = [SIX, special]
        assert len(box.ask("evil6.example")[1]) == 1
        wait_for("the event", lambda: any(special == event.address for event in box.events()))
        assert len(world.inet.dialled) == before


def test_a_full_table_gives_up_only_what_nobody_uses() -> None:
    used: set[str] = set()
    table = StandIns(used.__contains__)
    first = table.give("2001:db8::1")
    assert first is not None and table.give("2001:db8::1") == first and table.real(first) == "2001:db8::1"
    used.add(first)
    given = {table.give(f"2001:db8::{number:x}") for number in range(2, MAX_STANDINS + 1)}
    assert None not in given and len(given) == MAX_STANDINS - 1
    assert table.give("2001:db8:1::1") is not None and table.real(first) == "2001:db8::1"
    for address in list(table._real):
        used.add(address)
    for number in range(MAX_STANDINS):
        if table.give(f"2001:db8:2::{number:x}") is None:
            break
        used.update(table._real)
    else:
        pytest.fail("the table grows without end")
    assert len(table._real) == MAX_STANDINS and table.real("203.0.113.1") == "203.0.113.1"
