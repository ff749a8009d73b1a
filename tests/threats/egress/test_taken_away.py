"""F2-M6: a list that gets narrower ends what uses the rest, and an address of two names is judged by the stricter."""

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest
from lab.internet import Inside, World, wait_for

ADDRESS = "203.0.113.10"
NARROW = "GET http://a.example/ro/"


@pytest.fixture(autouse=True)
def records(world: World) -> None:
    world.inet.records["a.example"] = [ADDRESS]


def is_cut(sock: socket.socket) -> bool:
    """Does the connection end although nobody at its ends closed it?"""
    sock.settimeout(20)
    try:
        for _ in range(1000):
            sock.sendall(b"secret data\n")
            if sock.recv(100) == b"":
                return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return False


def websocket(box: Inside) -> socket.socket:
    sock = box.connect("a.example", 80)
    sock.sendall(b"GET /ws HTTP/1.1\r\nHost: a.example\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
    assert sock.recv(200).startswith(b"HTTP/1.1 101 ")
    return sock


def test_narrowing_cuts_an_open_websocket(world: World) -> None:
    """Cut a WebSocket when only some GETs stay open, and not when the list stays as wide."""
    with world.sandbox("a.example") as box, websocket(box) as sock:
        box.update("a.example", "b.example")
        sock.sendall(b"hello")
        assert sock.recv(100) == b"ws:hello", "a change of something else cuts nothing"
        box.update(NARROW)
        assert is_cut(sock)


def test_narrowing_cuts_a_running_body(world: World) -> None:
    """Cut an upload in the middle of its body, and leave a request that is still allowed."""
    with world.sandbox("a.example") as box, box.connect("a.example", 80) as post, box.connect("a.example", 80) as get:
        post.sendall(b"POST /upload HTTP/1.1\r\nHost: a.example\r\nContent-Length: 99999999\r\n\r\nbegin")
        get.sendall(b"GET /ro/x HTTP/1.1\r\nHost: a.example\r\n\r\n")
        assert get.recv(1000).startswith(b"HTTP/1.1 200 ")
        wait_for("both", lambda: box.counters()["hosts"].get("a.example", {}).get("connections") == 2)
        box.update(NARROW)
        assert is_cut(post)
        get.sendall(b"GET /ro/y HTTP/1.1\r\nHost: a.example\r\n\r\n")
        assert get.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_narrowing_cuts_a_download_that_was_asked_for_before(world: World) -> None:
    """Cut the answer of a request that is not allowed any more, whatever was asked on the connection since."""
    with world.sandbox("a.example") as box, box.connect("a.example", 80) as sock:
        for path in (b"/big", b"/ro/x"):
            sock.sendall(b"GET %s HTTP/1.1\r\nHost: a.example\r\n\r\n" % path)
            assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")
        box.update(NARROW)
        with pytest.raises(ConnectionError):
            sock.sendall(b"GET /ro/y HTTP/1.1\r\nHost: a.example\r\n\r\n")
            assert sock.recv(1000)


class Person:
    """Keeps what it was asked, and answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.why = "needs approval, and was rejected"
        self.decided = threading.Event()

    async def __call__(self, sandbox: str, name: str, port: int) -> str:
        self.asked.append(name)
        await asyncio.to_thread(self.decided.wait, 60)
        return self.why


@pytest.fixture
def person(world: World) -> Iterator[Person]:
    made = Person()
    world.inet.records.update({"held.example": ["203.0.113.30"], "free.example": ["203.0.113.30"]})
    world.egress._on_ask = made
    yield made
    made.decided.set()
    world.egress._on_ask = None


@pytest.mark.parametrize("last", ["held.example", "free.example"])
def test_address_of_two_names_is_held(world: World, person: Person, last: str) -> None:
    """Hold a connection on a port without names when any name resolved for its address waits for a person."""
    names = [name for name in ("held.example", "free.example") if name != last] + [last]
    with world.sandbox("held.example:8443", "free.example:8443", held=["held.*"]) as box:
        for name in names:
            address = box.resolve(name)
        with box.connect(address, 8443) as sock:
            sock.sendall(b"for held.example")
            wait_for("the question", lambda: person.asked == ["held.example"])
            person.decided.set()
            with pytest.raises(ConnectionError):
                assert sock.recv(100)
        box.event("was rejected", name="held.example", port=8443)


def test_address_of_a_free_name_is_free(world: World, person: Person) -> None:
    """Ask nobody where no held name was resolved, or none that has this port."""
    with world.sandbox("held.example", "free.example:8443", held=["held.*"]) as box:
        box.resolve("held.example")
        with box.connect("free.example", 8443) as sock:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
        assert person.asked == []
