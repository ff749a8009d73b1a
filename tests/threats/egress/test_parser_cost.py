"""F2-H1: what the broker reads before it allows anything costs in proportion to the bytes, however they are cut."""

import contextlib
import os
import socket
import time

import pytest
from lab.hellos import body, handshake, records, sni
from lab.internet import Inside, World

ADDRESS = "203.0.113.10"
NEIGHBOUR = "203.0.113.20"
CONNECTIONS, DRIPS = 20, 60


def broker_seconds(world: World) -> float:
    """Processor time that the broker has used."""
    with open(f"/proc/{world.egress.broker_pid}/stat", encoding="ascii") as handle:
        fields = handle.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def drip(world: World, box: Inside, port: int, start: bytes, piece: bytes) -> float:
    """The broker's time for `DRIPS` pieces on each of some connections that have sent `start`."""
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(CONNECTIONS):
            sock = stack.enter_context(box.connect(ADDRESS, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(start)
            socks.append(sock)
        time.sleep(0.5)  # the starts are read
        before = broker_seconds(world)
        for number in range(DRIPS):
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.sendall(piece[number % len(piece) :][:1])
            time.sleep(0.05)
        return broker_seconds(world) - before


@pytest.mark.parametrize("record", [1, 64])
def test_hello_in_drips_costs_little(world: World, record: int) -> None:
    """Send a large hello in tiny records, then byte by byte: each byte costs the broker well under a millisecond."""
    world.inet.records["a.example"] = [ADDRESS]
    large = records(handshake(body(sni(b"a.example"), (21, bytes(32000)))), record)
    with world.sandbox("a.example") as box:
        box.resolve("a.example")
        used = drip(world, box, 443, large[:30000], large[30000 : 30000 + DRIPS])
    assert used < CONNECTIONS * DRIPS * 0.0004, f"{used:.2f} s for {CONNECTIONS * DRIPS} bytes"


def test_http_head_in_drips_costs_little(world: World) -> None:
    """Send a request head of 60,000 bytes, then byte by byte."""
    world.inet.records["a.example"] = [ADDRESS]
    start = b"GET / HTTP/1.1\r\nHost: a.example\r\nX: " + b"a\r" * 30000
    with world.sandbox("a.example") as box:
        box.resolve("a.example")
        used = drip(world, box, 80, start, b"a\r" * DRIPS)
    assert used < CONNECTIONS * DRIPS * 0.0004, f"{used:.2f} s for {CONNECTIONS * DRIPS} bytes"


def test_one_byte_chunks_hold_the_loop_for_moments(world: World) -> None:
    """Stream a body of one-byte chunks to a server that reads; the broker answers others between small steps."""
    world.inet.records.update({"sink.example": ["203.0.113.92"], "n.example": [NEIGHBOUR]})
    accepted = world.inet.take("203.0.113.92")
    with world.sandbox("sink.example") as box, world.sandbox("n.example:5432") as calm:
        sock = box.connect("sink.example", 80)
        sock.sendall(b"POST / HTTP/1.1\r\nHost: sink.example\r\nTransfer-Encoding: chunked\r\n\r\n")
        server = accepted.get(timeout=60)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        with sock, server, calm.connect("n.example", 5432) as probe:
            probe.sendall(b"x")
            assert probe.recv(1) == b"x"
            sock.setblocking(False)
            server.setblocking(False)
            blob, sent, longest = b"1\r\nx\r\n" * 100_000, 0, 0.0
            for _ in range(20):
                with contextlib.suppress(BlockingIOError):
                    sent += sock.send(blob[sent % 6 :])
                before, start = broker_seconds(world), time.monotonic()
                probe.sendall(b"x")
                assert probe.recv(1) == b"x"
                # What the broker computed while the neighbour waited: the clock of a busy machine says nothing.
                longest = max(longest, min(broker_seconds(world) - before, time.monotonic() - start))
                with contextlib.suppress(BlockingIOError):
                    while server.recv(1 << 20):
                        pass
    assert longest <= 0.06, f"the neighbour waited for {longest:.2f} s of the broker's time"


def test_hello_in_one_byte_records_is_refused(world: World) -> None:
    """Refuse a hello that is cut into a record for every byte at its second record."""
    world.inet.records["a.example"] = [ADDRESS]
    with world.sandbox("a.example") as box, box.connect("a.example", 443) as sock:
        sock.sendall(records(handshake(body(sni(b"a.example"))), 1)[:60])
        assert sock.recv(7) == b"\x15\x03\x01\x00\x02\x02\x70"
        box.event("records that are too small", port=443)
