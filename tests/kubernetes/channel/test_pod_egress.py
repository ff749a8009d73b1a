"""What programs of a pod reach: names and connections over the egress channel, judged by the broker beside the gateway."""

import asyncio
import os
import socket
import struct
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from lab.internet import BROKER_UID, DNS_SERVER, Internet, _join, dns_query, new_net, wait_for
from lab.pods import CLAIM, POD, POD_UID, PORT, Pod

from atoll.backends.kubernetes.channel.egress import EgressChannel
from atoll.egress import CarriedEgress, EgressPolicy
from atoll.guest import Process

SITE, OTHER = "203.0.113.10", "203.0.113.20"


class World:
    """An activated pod with its egress channel, and an internet that only the broker can reach."""

    def __init__(self, pod: Pod, inet: Internet, egress: CarriedEgress) -> None:
        self.pod, self.inet, self.egress = pod, inet, egress
        self.channel: EgressChannel | None = None

    async def open(self) -> None:
        secrets = tuple(self.pod.key.hello_secret(CLAIM, POD_UID, side) for side in ("host", "agent"))
        place = (POD, PORT, self.pod.fingerprint)
        self.channel = EgressChannel(self.egress, "box", self.pod.key, place, secrets)  # type: ignore[arg-type]
        await asyncio.wait_for(self.channel.connected.wait(), 60)

    async def inside(self, work: Any) -> Any:
        """Act as a program of the pod while the gateway goes on."""
        return await asyncio.to_thread(self.pod.inside, work)

    async def ask(self, name: str) -> tuple[int, list[str]]:
        """Code and addresses of an answer of the pod's resolver."""

        def once() -> tuple[int, list[str]]:
            packet = dns_query(name.encode())
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.settimeout(60)
                sock.sendto(packet, ("127.0.0.1", 53))
                reply = sock.recv(4096)
            assert reply[:2] == packet[:2]
            (count,) = struct.unpack("!H", reply[6:8])
            return reply[3] & 15, [socket.inet_ntoa(reply[end - 4 : end]) for end in range(len(reply), 0, -16)[:count]]

        return await self.inside(once)

    async def run(self, name: str, *argv: str) -> tuple[int | None, bytes]:
        client = self.pod.client()
        try:
            process = await Process.start(client, name, {"argv": list(argv)})
            output = b"".join([data async for _, data in process])
            return (process.exit.code if process.exit else None), output
        finally:
            await client.close()


@pytest.fixture
async def world(pod: Pod) -> AsyncIterator[World]:
    directory = tempfile.TemporaryDirectory(prefix="atoll-pod-egress-")
    os.chmod(directory.name, 0o711)
    host, net = new_net(), new_net()
    _join(host, net)
    inet = Internet(net, Path(directory.name))
    inet.records.update({"a.example": [SITE], "b.example": [OTHER], "six.example": ["2001:db8::7"]})
    state = Path(directory.name, "state")
    egress = await CarriedEgress.start(state, BROKER_UID, host_net=host, servers=[(DNS_SERVER, 53)], hosts_file="")
    made = World(pod, inet, egress)
    try:
        assert (await pod.order(pod.activation()))["resolver"] is True
        await egress.join("box", EgressPolicy.of(["a.example", "a.example:9000", "six.example"]))
        await made.open()
        yield made
    finally:
        if made.channel is not None:
            await made.channel.close()
        await egress.close()
        inet.close()
        os.close(host)
        os.close(net)
        directory.cleanup()


async def test_ordinary_programs_reach_allowed_names_alone(world: World) -> None:
    """curl without settings: plain and TLS; another name does not resolve, and that is noted."""
    code, body = await world.run("plain", "/usr/bin/curl", "-sS", "http://a.example/x")
    assert (code, body) == (0, b"hello from a.example")
    ca = Path(world.pod._directory.name, "ca.pem")
    ca.write_text(world.inet.ca)
    code, body = await world.run(
        "tls", "/usr/bin/curl", "-sS", "-k", "--cacert", str(ca), "--http0.9", "-m", "20", "https://a.example/"
    )
    assert b"tls:GET / HTTP/1.1" in body
    assert world.inet.names_sent == [(SITE, "a.example")]
    code, body = await world.run("denied", "/usr/bin/curl", "-sS", "http://b.example/")
    assert code == 6, body  # could not resolve
    event = await asyncio.to_thread(wait_for, "refusal", lambda: world.egress.events("box"))
    assert (event[0].name, event[0].reason) == ("b.example", "not an allowed host")
    assert "b.example" not in world.inet.queries
    counters = await world.egress.counters("box")
    assert counters["hosts"]["a.example"]["connections"] == 2 and counters["refused"] >= 1


async def test_addresses_stand_for_others(world: World) -> None:
    """Answers are loopback addresses that the broker alone understands; what it did not give out leads nowhere."""
    code, (address,) = await world.ask("a.example")
    assert code == 0 and address.startswith("127.") and 64 <= int(address.split(".")[1]) < 128
    assert await world.ask("b.example") == (3, [])

    def attempt(host: str, port: int, data: bytes) -> bytes:
        with socket.create_connection((host, port), timeout=60) as sock:
            sock.sendall(data)
            return sock.recv(4096)

    get = b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n"
    assert b"200 OK" in await world.inside(lambda: attempt(address, 80, get % b"a.example"))
    assert b"403" in await world.inside(lambda: attempt(address, 80, get % b"b.example"))
    six = (await world.ask("six.example"))[1][0]
    assert b"200 OK" in await world.inside(lambda: attempt(six, 80, get % b"six.example"))
    with pytest.raises(ConnectionRefusedError):
        await world.inside(lambda: attempt(address, 5432, b""))
    with pytest.raises(OSError):
        await world.inside(lambda: attempt(SITE, 80, get % b"a.example"))  # no route
    assert (OTHER, 80) not in world.inet.dialled


async def test_much_goes_through_and_a_refusal_is_a_reset(world: World) -> None:
    """Megabytes arrive whole past every window; a port that the list shuts later resets what is open and what comes."""
    _, (address,) = await world.ask("a.example")

    def fetch(size: int) -> int:
        with socket.create_connection((address, 9000), timeout=60) as sock:
            sock.sendall(b"%d\n" % size)
            got = 0
            while data := sock.recv(65536):
                got += len(data)
            return got

    sizes = await asyncio.gather(*(world.inside(lambda: fetch(3 << 20)) for _ in range(4)))
    assert sizes == [3 << 20] * 4
    await world.egress.update("box", EgressPolicy.of(["b.example"]))
    with pytest.raises(OSError):
        await world.inside(lambda: fetch(1))
    assert (await world.ask("a.example"))[0] == 3


async def test_without_a_gateway_nothing_passes_and_later_all_does(world: World) -> None:
    """The channel closed: names fail and connections are reset. Open again: they work, also when the broker was killed."""
    _, (address,) = await world.ask("a.example")
    assert world.channel is not None
    await world.channel.close()

    def attempt() -> bytes:
        with socket.create_connection((address, 80), timeout=60) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n")
            return sock.recv(4096)

    assert (await world.ask("a.example"))[0] == 2
    with pytest.raises(ConnectionResetError):
        await world.inside(attempt)
    await world.open()
    assert b"200 OK" in await world.inside(attempt)
    os.kill(world.egress.broker_pid, 9)
    deadline = asyncio.get_running_loop().time() + 120
    while (await world.ask("a.example"))[0] != 0:  # a new broker, with the list, and the channel carries to it
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.1)
    assert (await world.ask("b.example")) == (3, [])


async def test_a_program_that_has_the_port_is_not_taken_for_the_host(world: World) -> None:
    """Where a program listens on all addresses of a port first, the name fails instead of leading to the program."""
    listener = await world.inside(lambda: socket.create_server(("0.0.0.0", 80)))
    with listener:
        assert (await world.ask("a.example"))[0] == 2
    assert (await world.ask("a.example"))[0] == 0
