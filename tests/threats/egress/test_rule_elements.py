"""F2-H3: the router's rule sets are shared, so what one sandbox puts into them is small, quick, and gone with it."""

import json
import subprocess

import pytest
from lab.internet import Inside, World, wait_for

from atoll.egress.router.nft import Entry

PORTS = range(20001, 21001)


@pytest.fixture(autouse=True)
def records(world: World) -> None:
    world.inet.records["many.example"] = [f"203.0.113.{host}" for host in range(100, 116)]
    world.inet.records["a.example"] = ["203.0.113.10"]


def elements(world: World, box: Inside) -> int:
    """How many elements of the rule sets belong to this sandbox."""
    return len(rows(world, box.link.ifname))


def rows(world: World, ifname: str) -> list[object]:
    def listed() -> bytes:
        return subprocess.run(["nft", "-j", "list", "table", "inet", "atoll"], capture_output=True, check=True).stdout

    found: list[object] = []
    for item in json.loads(world.call(world.egress._in_router(listed)))["nftables"]:
        if item.get("set", {}).get("name") in ("granted", "granted_any"):
            for element in item["set"].get("elem", []):
                value = element["elem"]["val"] if "elem" in element else element
                if value["concat"][0] == ifname:
                    found.append(value["concat"][1:])
    return found


def test_many_ports_are_one_element_for_each_address(world: World) -> None:
    """Answer a name with 1,000 ports and 16 addresses by few elements; the broker refuses ports that are not listed."""
    with world.sandbox("a.example", *(f"many.example:{port}" for port in (5432, *PORTS))) as box:
        assert box.ask("many.example")[0] == 0
        assert elements(world, box) <= 64
        with box.connect("many.example", 5432) as sock:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
        before = len(world.inet.dialled)
        with pytest.raises(ConnectionError), box.connect("many.example", 8443) as sock:
            assert sock.recv(1)
        box.event("port 8443 is not open for this host", name="many.example", port=8443)
        assert len(world.inet.dialled) == before


def test_elements_of_a_sandbox_are_capped(world: World) -> None:
    """Refuse answers beyond the cap, tell it, and go on answering a neighbour."""
    with world.sandbox("*.wide.example:5432", "a.example") as box, world.sandbox("a.example") as calm:
        number, code = 0, 0
        while code == 0 and number < 300:
            name = f"n{number}.wide.example"
            world.inet.records[name] = [f"198.51.{number // 15}.{16 * (number % 15) + i}" for i in range(1, 16)]
            code, _ = box.ask(name)
            number += 1
        assert code == 2 and elements(world, box) <= 4096
        box.event("too many addresses", name=name)
        assert calm.ask("a.example")[0] == 0


def test_elements_end_with_their_sandbox(world: World) -> None:
    """Leave no element of a sandbox that is gone, opened ports of the host included."""
    with world.sandbox("many.example", "many.example:5432", host_ports=[8080]) as box:
        assert box.ask("many.example")[0] == 0
        ifname = box.link.ifname
        assert len(rows(world, ifname)) == 16 * 3 + 1
    wait_for("their end", lambda: not rows(world, ifname))


def test_elements_are_changed_in_batches(world: World) -> None:
    """Open, open again and close 256 destinations within a few steps of the rules."""
    with world.sandbox("a.example") as box:
        router = world.egress._router
        entries = [Entry(f"198.51.100.{host}", port, 300) for host in range(1, 17) for port in range(1, 17)]
        commands: list[str] = []
        run = router._nft.run

        def counted(text: str) -> None:
            commands.extend(text.splitlines())
            run(text)

        router._nft.run = counted  # type: ignore[method-assign]
        try:
            for work in (router.grant, router.grant, router.revoke):
                world.call(world.egress._in_router(work, box.link, entries))
        finally:
            router._nft.run = run  # type: ignore[method-assign]
        assert len(commands) <= 9, f"{len(commands)} commands"
        assert elements(world, box) == 0


def test_repeated_lookups_leave_the_rules_alone(world: World) -> None:
    """Change the rules for the first of a hundred lookups of one name, and for no other."""
    with world.sandbox("a.example") as box:
        grants: list[int] = []
        grant = world.egress._router.grant

        def counted(link: object, entries: object) -> None:
            grants.append(1)
            grant(link, entries)  # type: ignore[arg-type]

        world.egress._router.grant = counted  # type: ignore[method-assign,assignment]
        try:
            for _ in range(100):
                assert box.ask("a.example") == (0, ["203.0.113.10"])
        finally:
            world.egress._router.grant = grant  # type: ignore[method-assign]
        assert len(grants) == 1
