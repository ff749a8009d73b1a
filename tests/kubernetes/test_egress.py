"""The way out of pods on the real cluster: by name over the agent's channel, and none at all beside it."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from lab.contract import PlaceInCluster, run
from lab.internet import BROKER_UID, DNS_SERVER, Internet, _join, new_net
from lab.waiting import PATIENCE, eventually

from atoll.backends.contract import Box, NetworkEvents
from atoll.backends.kubernetes import Carried, KubernetesBackend
from atoll.backends.kubernetes.enforcement import choose
from atoll.egress import CarriedEgress, Egress, EgressEvent
from atoll.errors import Unsupported
from atoll.model import Policy

pytestmark = pytest.mark.kubernetes

SITE, OTHER = "203.0.113.10", "203.0.113.20"
ALLOWED = Policy(network="hosts", hosts=("a.example", "a.example:9000"))
DIAL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3); print('open')"

OVER_TLS = """
import socket, ssl
context = ssl._create_unverified_context()
with context.wrap_socket(socket.create_connection(("a.example", 443)), server_hostname="a.example") as connection:
    connection.sendall(b"GET / HTTP/1.1\\r\\nHost: a.example\\r\\n\\r\\n")
    print(b"tls:GET" in connection.recv(4096))
"""


class Elsewhere(Carried):
    """The broker dials from a network that leads to the test's internet alone."""

    host_net = -1

    def _start_egress(self) -> asyncio.Task[Egress]:
        events = self._events
        start = CarriedEgress.start(
            self._directory,
            BROKER_UID,
            lambda event: events.on_blocked(event),
            host_net=self.host_net,
            servers=[(DNS_SERVER, 53)],
            hosts_file="",
        )
        return asyncio.create_task(start)


class World:
    """A gateway with a broker, and an internet that only the broker can reach."""

    def __init__(self, place: PlaceInCluster, inet: Internet, networks: Elsewhere) -> None:
        self.place, self.inet, self.networks = place, inet, networks
        self.blocked: list[EgressEvent] = []

    async def open(self, **settings: Any) -> KubernetesBackend:
        """Close the place's gateway, and open one that has a broker."""
        assert self.place.cluster is not None
        await self.place.backend.close()
        self.place.backend = KubernetesBackend(self.place.cluster.settings(**settings), self.networks)
        await self.place.backend.start(NetworkEvents(on_blocked=self.blocked.append))
        await self.place.backend.pick(self.place.runtime)
        found: KubernetesBackend = self.place.backend
        return found


@pytest.fixture
async def world(place: PlaceInCluster) -> AsyncIterator[World]:
    directory = tempfile.TemporaryDirectory(prefix="atoll-way-out-")
    os.chmod(directory.name, 0o711)
    host, net = new_net(), new_net()
    _join(host, net)
    inet = Internet(net, Path(directory.name))
    inet.records.update({"a.example": [SITE], "b.example": [OTHER]})
    networks = Elsewhere(Path(directory.name))
    networks.host_net = host
    made = World(place, inet, networks)
    try:
        await made.open()
        yield made
        await place.clear()
    finally:
        await place.backend.close()
        await place.open()  # whoever made the place closes it
        inet.close()
        os.close(host)
        os.close(net)
        directory.cleanup()


async def curl(box: Box, *words: str) -> tuple[int | None, str]:
    return await run(box, "/usr/bin/curl", "-sS", "-m", "60", *words)


async def test_programs_without_settings_reach_allowed_names_alone(world: World) -> None:
    """Ordinary programs: curl and Python's own client, plain and over TLS. What is refused is noted."""
    box = await world.place.create(policy=ALLOWED)
    assert await curl(box, "http://a.example/x") == (0, "hello from a.example")
    assert await run(box, "/usr/bin/python3", "-c", OVER_TLS) == (0, "True\n")
    fetch = "import urllib.request; print(urllib.request.urlopen('http://a.example/y').read().decode())"
    assert await run(box, "/usr/bin/python3", "-c", fetch) == (0, "hello from a.example\n")
    assert (await curl(box, "http://b.example/"))[0] == 6, "it does not resolve"
    assert (await curl(box, "-H", "Host: b.example", "http://a.example/"))[0] == 0
    await eventually(lambda: any(event.name == "b.example" for event in world.blocked), "the refusal is told")
    assert "b.example" not in world.inet.queries and (OTHER, 80) not in world.inet.dialled
    assert (await box.traffic()).hosts["a.example"]["connections"] >= 3


async def test_beside_the_channel_there_is_no_way_out(world: World) -> None:
    """Raw addresses: this machine's listener, which the same program reaches from here, the API and another pod."""
    box, other = await world.place.create(policy=ALLOWED), await world.place.create(policy=ALLOWED)
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "10.93.0.1", 0)
    port = str(listener.sockets[0].getsockname()[1])
    here = await asyncio.create_subprocess_exec("/usr/bin/python3", "-c", DIAL, "10.93.0.1", port)
    assert await here.wait() == 0
    pod = other.identity.address  # type: ignore[attr-defined]
    for host, number in (("10.93.0.1", port), ("10.96.0.1", "443"), (pod, "2024"), (SITE, "80")):
        code, output = await run(box, "/usr/bin/python3", "-c", DIAL, host, number)
        assert code != 0 and not output.startswith("open"), (host, number)
    listener.close()


async def test_a_changed_list_counts_at_once_and_the_next_gateway_takes_over(world: World) -> None:
    box = await world.place.create(policy=ALLOWED)
    assert (await curl(box, "http://a.example/"))[0] == 0
    changed = Policy(network="hosts", hosts=("b.example",))
    await box.set_policy(changed)
    assert (await curl(box, "http://a.example/"))[0] != 0
    assert await curl(box, "http://b.example/") == (0, "hello from b.example")
    record = dict(box.record)
    await box.client.close()
    backend = await world.open()
    found = await backend.adopt(record, changed)
    assert found is not None and await backend.reconnect() == set()

    async with asyncio.timeout(PATIENCE):
        while await curl(found, "http://b.example/") != (0, "hello from b.example"):
            await asyncio.sleep(0.1)  # the channel opens by itself
    assert (await curl(found, "http://a.example/"))[0] != 0


async def test_a_dead_enforcer_is_found_by_a_canary_and_creates_are_refused(runc: PlaceInCluster) -> None:
    """Shown first with the enforcer alive: creates pass. Then new pods of the pool are open, and nobody has used one."""
    cluster = runc.cluster
    assert cluster is not None
    await runc.backend.close()
    backend = runc.backend = KubernetesBackend(cluster.settings(canary_s=1.0))
    await backend.start(NetworkEvents())
    living = await runc.create()
    with cluster.without("kube-netpol", *cluster.nodes()):
        pods = [one["metadata"]["name"] for one in cluster.get("pods") if one["metadata"]["name"] != pod_of(living)]
        cluster.kubectl("delete", "sandboxes", *pods, "--wait=true")
        await eventually(lambda: backend._enforcement._open, "a canary got out")
        claims = cluster.claims()
        with pytest.raises(Unsupported) as refused:
            await backend.create(runc.spec())
        assert refused.value.details["reason"] == "egress_unenforceable" and cluster.claims() == claims
    pods = [one["metadata"]["name"] for one in cluster.get("pods") if one["metadata"]["name"] != pod_of(living)]
    cluster.kubectl("delete", "sandboxes", *pods, "--wait=true")
    await eventually(lambda: not backend._enforcement._open, "no canary gets out any more")
    assert (await run(living, "/bin/true"))[0] == 0, "what was shut stayed shut, and lives"
    assert (await run(await runc.create(), "/bin/true"))[0] == 0
    assert len(choose(backend._candidates())) >= 2


def pod_of(box: Box) -> str:
    return str(box.facts.shown["pod"])
