"""What the contract tests share: a place where sandboxes live, and how a program is run in one."""

import asyncio
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from atoll.backends.contract import Backend, Box, BoxSpec, Image, NetworkEvents, Record
from atoll.backends.local.layers import Rootfs
from atoll.backends.local.network import Links, Loopback
from atoll.backends.local.paths import new_id
from atoll.backends.local.pool import Settings
from atoll.backends.local.runtimes.base import Runtime
from atoll.guest.process import Process
from atoll.model import Policy
from lab.backend import NOTHING, PATIENCE, SMALL, census, image_of, local_backend
from lab.microvm import emulated, share_made
from lab.plain_backend import PlainBackend
from lab.toy_runtime import Toy

if TYPE_CHECKING:
    from lab.kubernetes import TestCluster

PLACES = ("container", "gvisor", "toy", "plain", "microvm")
IN_CLUSTER = {"kubernetes": "container", "kubernetes-gvisor": "gvisor"}  # place: runtime
ENV = {"PATH": "/usr/bin:/bin"}


@dataclass
class Place:
    """A backend with a home of its own, and the runtime that is tried on it."""

    home: Path
    name: str
    rootfs: Rootfs
    probes: Path  # the answers of the probes of an earlier test
    backend: Any = None
    made: list[Record] = field(default_factory=list)

    @property
    def local(self) -> bool:
        return self.name != "plain"

    @property
    def plain(self) -> bool:
        """Sandboxes are processes without limits, disks or marks."""
        return self.name == "plain"

    @property
    def freezes(self) -> bool:
        return True

    @property
    def runtime(self) -> str:
        return self.name if self.local else "container"

    async def open(self, *, links: bool = False) -> Backend:
        """A backend on the same home, as the next daemon makes it. With `links` it can enforce a policy."""
        if self.local:
            self.home.mkdir(exist_ok=True)
            if self.name == "microvm":
                share_made(self.home, self.probes.parent)
            if self.probes.exists():
                shutil.copy(self.probes, self.home / "probes.json")
            self.backend = local_backend(
                self.home,
                runtimes=_runtimes(self.name),
                links=Links(self.home) if links else Loopback(),
                pool=Settings(0, 0) if self.name == "microvm" else Settings(1, 1),
            )
        else:
            self.backend = PlainBackend(self.home)
        await self.backend.start(NetworkEvents())
        await self.backend.pick(self.runtime)
        if self.local:
            shutil.copy(self.home / "probes.json", self.probes)
        return self.backend  # type: ignore[no-any-return]

    async def connected(self) -> Policy:
        """Open the backend again so that it can enforce a policy; one with an interface that leads nowhere."""
        if self.backend.capabilities(self.runtime).policy == "none" and self.local:
            pytest.skip("no network: the runtime enforces no list of hosts")
        await self.backend.close()
        backend = await self.open(links=True)
        if not (status := await backend.network()).works:
            pytest.skip(f"no network: {status.why}")
        return Policy(network="hosts")

    def spec(self, **fields: Any) -> BoxSpec:
        image = image_of(self.rootfs) if self.local else Image("host")
        base = BoxSpec(new_id(), image, self.runtime, limits=SMALL, boot={"env": ENV}, base_env=ENV)
        return replace(base, **fields)

    async def create(self, spec: BoxSpec | None = None, **fields: Any) -> Box:
        box: Box = await self.backend.create(spec or self.spec(**fields))
        self.made.append(box.record)
        return box

    async def clear(self) -> None:
        """Destroy everything. The pool is closed first, because it would fill itself again."""
        if self.local:
            await self.backend.pool.close()
        for record in self.made:
            await self.backend.destroy(record)
        await self.backend.sweep(set())

    def nothing_left(self) -> bool:
        if self.local:
            return census(self.backend) == NOTHING
        return not list(self.home.iterdir())


def _runtimes(name: str) -> tuple[Runtime, ...] | None:
    """Those that the registry does not have; None: the registry's."""
    if name == "toy":
        return (Toy(),)
    return (emulated(),) if name == "microvm" else None


@dataclass
class PlaceInCluster(Place):
    """A gateway of the test cluster. Its sandboxes live in pods of one pool."""

    cluster: "TestCluster | None" = None

    @property
    def local(self) -> bool:
        return False

    @property
    def freezes(self) -> bool:
        return False

    @property
    def runtime(self) -> str:
        return IN_CLUSTER[self.name]

    async def open(self, *, links: bool = False) -> Backend:
        from atoll.backends.kubernetes import Carried, KubernetesBackend

        assert self.cluster is not None
        networks = Carried(self.home / "gateway") if links else None
        self.backend = KubernetesBackend(self.cluster.settings(), networks)
        await self.backend.start(NetworkEvents())
        await self.backend.pick(self.runtime)
        return self.backend  # type: ignore[no-any-return]

    async def connected(self) -> Policy:
        """Open the gateway again, with a broker beside it."""
        await self.backend.close()
        backend = await self.open(links=True)
        status = await backend.network()
        assert status.works, status.why
        return Policy(network="hosts")

    def spec(self, **fields: Any) -> BoxSpec:
        base = BoxSpec(new_id(), Image("host"), self.runtime, limits=SMALL, boot={"env": ENV}, base_env=ENV)
        return replace(base, **fields)

    def nothing_left(self) -> bool:
        assert self.cluster is not None
        return self.cluster.nothing_left()


async def run(box: Box, *argv: str, name: str = "", **fields: Any) -> tuple[int | None, str]:
    """Run a program to its end: exit code and output."""
    async with asyncio.timeout(PATIENCE):
        ask = {"argv": list(argv), **fields}
        process = await Process.start(box.client, name or f"t{time.monotonic_ns()}", ask)
        output = b"".join([data async for _, data in process])
    assert process.exit is not None
    return process.exit.code, output.decode(errors="replace")
