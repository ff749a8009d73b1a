"""F2-H2: what the broker holds is bounded for each connection, each sandbox and all, and given back at the end."""

import contextlib
import socket
import time

from lab.hellos import body, handshake, hello_for, records, retry_request, sni
from lab.internet import Inside, World, wait_for

from atoll.egress.limits import Limits

EARLY = b"\x17\x03\x03\x41\x00" + bytes(16640)
MB = 1 << 20


def broker_memory(world: World) -> int:
    """Resident bytes of the broker."""
    with open(f"/proc/{world.egress.broker_pid}/statm", encoding="ascii") as handle:
        return int(handle.read().split()[1]) * 4096


def push(sock: socket.socket, data: bytes, seconds: float) -> int:
    """Send the same again and again until nobody takes any more; how much went."""
    sock.setblocking(False)
    sent, last = 0, time.monotonic()
    while time.monotonic() - last < seconds and sent < 200 * MB:
        try:
            done = sock.send(data[sent % len(data) :])
        except BlockingIOError:
            time.sleep(0.005)
            continue
        except OSError:
            break
        sent, last = sent + done, time.monotonic()
    return sent


def test_early_data_after_a_retry_is_bounded(world: World) -> None:
    """Answer a hello with a HelloRetryRequest, then send early data without end: the connection is refused."""
    world.inet.records["hrr.example"] = ["203.0.113.93"]
    accepted = world.inet.take("203.0.113.93")
    with world.sandbox("hrr.example") as box, box.connect("hrr.example", 443) as sock:
        sock.sendall(hello_for("hrr.example"))
        with accepted.get(timeout=60) as server:
            server.recv(4096)
            server.sendall(retry_request())
            assert sock.recv(4096)
            before = broker_memory(world)
            # Each piece ends within a record, where the broker has to wait for more.
            sock.sendall(EARLY[:100])
            sent = push(sock, EARLY[100:] + EARLY[:100], 3)
            grown = broker_memory(world) - before
        assert grown < 16 * MB, f"{grown >> 20} MiB for {sent >> 20} MiB sent"
        box.event("early data", port=443)
        wait_for("its end", lambda: box.counters()["open"] == 0)


def test_incomplete_hellos_and_heads_are_bounded(world: World) -> None:
    """Leave 600 large hellos and request heads unfinished: the sandbox's share is the most that is held."""
    world.inet.records["a.example"] = ["203.0.113.10"]
    hello = records(handshake(body(sni(b"a.example"), (21, bytes(32000)))))[:32000]
    head = b"GET / HTTP/1.1\r\nHost: a.example\r\nX: " + b"a" * 60000
    with world.sandbox("a.example") as box, contextlib.ExitStack() as stack:
        address, before = box.resolve("a.example"), broker_memory(world)
        for number in range(600):
            sock = stack.enter_context(box.connect(address, (443, 80)[number % 2]))
            with contextlib.suppress(OSError):
                sock.sendall((hello, head)[number % 2])
        box.event("too much is held")
        grown = broker_memory(world) - before
    assert grown < 20 * MB, f"{grown >> 20} MiB"
    wait_for("their end", lambda: box.counters() == {})


def test_slow_receivers_are_bounded(world: World) -> None:
    """Fill 300 connections whose server reads nothing: what waits in the broker stays within the sandbox's share."""
    world.inet.records["deaf.example"] = ["203.0.113.94"]
    accepted = world.inet.take("203.0.113.94")
    with world.sandbox("deaf.example:5432") as box, contextlib.ExitStack() as stack:
        address, before = box.resolve("deaf.example"), broker_memory(world)
        socks = [stack.enter_context(box.connect(address, 5432)) for _ in range(300)]
        servers = [stack.enter_context(accepted.get(timeout=60)) for _ in socks]
        block = bytes(4 * MB)
        for sock in socks:
            sock.setblocking(False)
        quiet = 0
        while quiet < 5:
            quiet += 1
            for sock in socks:
                with contextlib.suppress(BlockingIOError):
                    sock.send(block)
                    quiet = 0
            time.sleep(0.1)
        grown = broker_memory(world) - before
        assert len(servers) == 300
    assert grown < 40 * MB, f"{grown >> 20} MiB"


# SECURITY.md states what the broker holds at most with the default limits, whatever sandboxes send.
STATED = 512 * MB
AT_REST = 80 * MB  # the program itself, a few sandboxes included
EACH = 12 * 1024  # of one connection, beside the bytes that are charged


def test_the_stated_memory_is_the_sum_of_what_is_capped(world: World) -> None:
    """Measure what a connection costs the broker in each state; the limits say how many there can be."""
    limits = Limits()
    charged = (limits.all_early_mb + limits.all_buffers_mb) * MB
    assert AT_REST + charged + limits.all_connections * EACH <= STATED
    world.inet.records["a.example"] = ["203.0.113.10"]
    count = 200
    with world.sandbox("a.example", "a.example:5432") as box:
        address = box.resolve("a.example")
        assert broker_memory(world) <= AT_REST
        for port, first in ((443, b"\x16"), (80, b"G"), (5432, b"x")):
            open_and_close_once(box, address, port, count, first)  # what is kept for later is not counted as theirs
            before = broker_memory(world)
            cost = open_and_close_once(box, address, port, count, first) - before
            assert cost <= count * EACH, f"port {port}: {cost // count} bytes for each connection"


def open_and_close_once(box: Inside, address: str, port: int, count: int, first: bytes) -> int:
    """Have so many connections open at once; the broker's memory meanwhile."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(box.connect(address, port)).sendall(first)
        wait_for("all are open", lambda: box.counters()["open"] == count)
        held = broker_memory(box.world)
    wait_for("their end", lambda: box.counters()["open"] == 0)
    return held
