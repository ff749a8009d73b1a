"""Connections that a rule holds: nothing is dialled before the answer, no answer is a no, and no way leads around."""

import asyncio
import ssl
import threading
from collections.abc import Iterator

import pytest
from lab.internet import Inside, World, wait_for

HELD, FREE = "203.0.113.10", "203.0.113.20"


class Person:
    """Decides when the test says so; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.why = ""
        self.decided = threading.Event()

    async def __call__(self, sandbox: str, name: str, port: int) -> str:
        self.asked.append((sandbox, name, port))
        await asyncio.to_thread(self.decided.wait, 60)
        return self.why


@pytest.fixture
def person(world: World) -> Iterator[Person]:
    made = Person()
    world.inet.records.update({"held.example": [HELD], "free.example": [FREE], "also.example": [FREE]})
    world.egress._on_ask = made
    yield made
    made.decided.set()
    world.egress._on_ask = None


def dialled(world: World) -> int:
    return sum(1 for address, _ in world.inet.dialled if address == HELD)


def hello(box: Inside, host: str = "held.example") -> str:
    try:
        with box.tls(host) as tls:
            tls.sendall(b"x")
            return tls.recv(10).decode()
    except (ssl.SSLError, ConnectionError) as err:
        return type(err).__name__


def test_many_wait_for_one_answer(world: World, person: Person) -> None:
    """Hold twenty connections with one question, and let all pass on a yes."""
    with world.sandbox("held.example", "free.example", held=["held.*"]) as box:
        before, got = dialled(world), []
        threads = [threading.Thread(target=lambda: got.append(hello(box))) for _ in range(20)]
        for thread in threads:
            thread.start()
        wait_for("all of them", lambda: box.counters()["open"] == 20)
        assert hello(box, "free.example") == "tls:x", "others do not wait"
        assert person.asked == [(box.name, "held.example", 443)] and dialled(world) == before
        person.decided.set()
        for thread in threads:
            thread.join(60)
        assert got == ["tls:x"] * 20


def test_no_is_told(world: World, person: Person) -> None:
    """End each protocol in its own way, with the reason in the event."""
    person.why = "needs approval, and was rejected: not today"
    person.decided.set()
    with world.sandbox("held.example", "held.example:5432", held=["*"]) as box:
        before = dialled(world)
        assert hello(box) in ("SSLError", "SSLZeroReturnError", "ConnectionResetError")
        with box.connect("held.example", 80) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: held.example\r\n\r\n")
            got = sock.makefile("rb").read()
            assert got.startswith(b"HTTP/1.1 403 ") and b"not today" in got
        with pytest.raises(ConnectionResetError), box.connect("held.example", 5432) as sock:
            assert sock.recv(1)
        for port in (443, 80, 5432):
            box.event("not today", name="held.example", port=port)
        assert dialled(world) == before


def test_a_used_connection_is_no_way_around(world: World, person: Person) -> None:
    """Refuse a held name in a later request of a connection, and hold the first request that names two."""
    with world.sandbox("free.example", "also.example", held=["also.example"]) as box:
        box.resolve("also.example")
        get = "GET / HTTP/1.1\r\nHost: {}\r\n\r\n"
        with box.connect("free.example", 80) as sock:
            sock.sendall(get.format("free.example").encode())
            assert b"200 OK" in sock.recv(1000)
            sock.sendall(get.format("also.example").encode())
            with pytest.raises(ConnectionError):
                assert sock.recv(1000)
        box.event("connection of its own", name="also.example", port=80)
        assert not person.asked
        with box.connect("free.example", 80) as sock:
            sock.sendall((get.format("free.example") + get.format("also.example")).encode())
            wait_for("a question", lambda: person.asked == [(box.name, "also.example", 80)])
        assert ("GET / HTTP/1.1", "also.example") not in world.inet.requests


def test_who_leaves_frees_its_place(world: World, person: Person) -> None:
    """Forget a held connection when its client is gone, and keep the question for the next try."""
    with world.sandbox("held.example:5432", held=["*"]) as box:
        for _ in range(3):
            with box.connect("held.example", 5432):
                wait_for("the question", lambda: person.asked)
            wait_for("its place", lambda: box.counters()["open"] == 0)
        assert len(person.asked) == 1
        person.decided.set()


def test_nobody_to_ask_is_a_no(world: World, person: Person) -> None:
    """Refuse when the daemon has nobody who decides, and when the answer is an error."""
    world.egress._on_ask = None
    with world.sandbox("held.example", held=["*"]) as box:
        assert hello(box) != "tls:x"
        box.event("nobody can be asked", name="held.example")

        async def broken(sandbox: str, name: str, port: int) -> str:
            raise ValueError("broken")

        world.egress._on_ask = broken
        before = dialled(world)
        assert hello(box) != "tls:x" and dialled(world) == before
