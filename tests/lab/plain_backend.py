# ruff: noqa: ASYNC221, ASYNC230
"""A backend without isolation: the real guest agent as a plain process. For faults and for machines without rights only.

It exists to make boxes fail in ways a real one will not on demand; what sandboxes promise is tested on the real backend.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from atoll import errors
from atoll.backends.contract import (
    BoxFacts,
    BoxSpec,
    Capabilities,
    Ended,
    Limits,
    NetworkEvents,
    NetworkStatus,
    Record,
    RuntimeStatus,
    Traffic,
    Usage,
)
from atoll.backends.local import binaries
from atoll.config import Config
from atoll.core import Core
from atoll.core.policy.images import Chosen
from atoll.guest import GuestClient
from atoll.model import Policy
from lab import orphans

AGENT = Path(os.environ.get("ATOLL_TEST_AGENT") or binaries.guest())  # one of another machine, under emulation
DEFAULT = Capabilities()
AGENTS: set[int] = set()  # of every box of this process


class PlainImages:
    room: Callable[[], int] | None = None

    async def choose(
        self, name: str, program: str | None = None, digest: str | None = None, guest: str | None = None
    ) -> Chosen:
        if name != "host":
            raise errors.NotFound(f"no image {name!r}")
        return Chosen("host", {"PATH": "/usr/local/bin:/usr/bin:/bin"})


class PlainBox:
    def __init__(self, record: dict[str, Any], can: Capabilities = DEFAULT) -> None:
        self.id: str = record["id"]
        self.record = record
        self.frozen = False
        self.facts = BoxFacts(
            self.id, "container", limits=Limits.from_json(record["limits"]), shown={"pid": record["pid"]}
        )
        self.client = GuestClient(self.connect, host_secret=record["host_secret"], agent_secret=record["agent_secret"])
        self.capabilities = can

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.record["socket"])

    async def wait(self) -> Ended:
        while self._alive():
            await asyncio.sleep(0.02)
        return Ended("exit", "the agent is gone")

    async def kill(self) -> None:
        """The whole tree, as the end of a PID namespace would; an agent that was shot has left its part of it to us."""
        looks = 0  # in a row that found nobody: the kernel's list of children may leave some out while it changes
        while looks < 2:
            others = AGENTS - {self.record["pid"]}  # also those that were started meanwhile
            left = [*orphans.strangers(others), *([self.record["pid"]] if self._alive() else [])]
            looks = 0 if left else looks + 1
            for pid in {one for root in left for one in orphans.tree(root)}:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            await asyncio.sleep(0.005)
        AGENTS.discard(self.record["pid"])

    def _alive(self) -> bool:
        try:
            os.waitpid(self.record["pid"], os.WNOHANG)
        except ChildProcessError:
            pass
        try:
            stat = Path(f"/proc/{self.record['pid']}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat[0] != "Z" and stat[19] == self.record["started"]

    def _need_alive(self) -> None:
        if not self._alive():
            raise errors.SandboxGone(f"sandbox {self.id} has ended")

    async def freeze(self) -> None:
        self._need_alive()
        os.kill(self.record["pid"], signal.SIGSTOP)

    async def thaw(self) -> None:
        self._need_alive()
        os.kill(self.record["pid"], signal.SIGCONT)

    async def usage(self) -> Usage:
        return Usage(None, None, None, None, None, None, None)

    async def update_limits(self, limits: Limits) -> None:
        self._need_alive()

    async def save_memory(self, name: str, key: bytes = b"", *, end: bool = False) -> Record:
        raise errors.Unsupported("a plain process saves no memory", hint="choose another runtime")

    async def set_policy(self, policy: Policy) -> None:
        raise errors.FailedPrecondition("this sandbox was made without a network")

    async def traffic(self) -> Traffic:
        return Traffic()


class PlainBackend:
    """`fail_at` makes the next create fail there; `gate` holds creates back until it is set."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fail_at = ""
        self.gate: asyncio.Event | None = None
        self.destroyed: list[str] = []
        self.network_works = False  # says that lists of hosts can be enforced, although its runtime enforces none
        self.can = DEFAULT
        self.boxes: dict[str, PlainBox] = {}
        directory.mkdir(exist_ok=True)

    async def start(self, events: NetworkEvents | None = None) -> None:
        return None

    async def close(self) -> None:
        return None

    def reserve(self, spec: BoxSpec) -> str:
        return spec.id

    async def release(self, box: str) -> None:
        return None

    async def create(self, spec: BoxSpec) -> PlainBox:
        if spec.policy.network != "none" or spec.mounts or spec.workspace.kind == "shared":
            raise errors.Unsupported("a plain process has no network, no mounts and no workspace of its own")
        if spec.image.name not in ("", "host"):
            raise errors.NotFound(f"no image {spec.image.name!r}", hint="there is only host")
        if spec.id in self.boxes:
            raise errors.AlreadyExists(f"sandbox {spec.id} is there already")
        try:
            box = await self._create(spec)
            await box.client.connection()
        except BaseException:
            await asyncio.shield(self.destroy({"id": spec.id}))
            raise
        return box

    async def _create(self, spec: BoxSpec) -> PlainBox:
        if self.gate is not None:
            await self.gate.wait()
        if self.fail_at == "create":
            raise errors.Unsupported("made to fail")
        path = self.directory / f"{spec.id}.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(8)
        secret = {"host_secret": secrets.token_hex(16), "agent_secret": secrets.token_hex(16)}
        reading, writing = os.pipe()
        actions = [(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_DUP2, listener.fileno(), 9)]
        with open(self.directory / f"{spec.id}.log", "wb") as out:
            actions += [(os.POSIX_SPAWN_DUP2, out.fileno(), 1), (os.POSIX_SPAWN_DUP2, out.fileno(), 2)]
            pid = os.posix_spawn(AGENT, [str(AGENT), "agent"], {}, file_actions=actions, setsid=True)
        boot = {"sandbox": spec.id, "listen_fd": 9, **secret, **spec.boot}
        os.close(reading)
        os.write(writing, json.dumps(boot).encode())
        os.close(writing)
        listener.close()
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        if self.fail_at == "agent":
            secret["agent_secret"] = "0" * 32
        AGENTS.add(pid)
        record = {"id": spec.id, "pid": pid, "started": started, "socket": str(path), **secret}
        record["limits"] = spec.limits.to_json()
        self.boxes[spec.id] = PlainBox(record, self.can)
        return self.boxes[spec.id]

    async def adopt(self, record: Record, policy: Policy, *, keep_disk: bool = False) -> PlainBox | None:
        box = PlainBox(record)
        if not box._alive():
            await self.destroy(record)
            return None
        self.boxes[box.id] = box
        return box

    async def reconnect(self) -> set[str]:
        return set()

    async def destroy(self, record: dict[str, Any], *, keep_disk: bool = False) -> None:
        self.destroyed.append(record["id"])
        box = self.boxes.pop(record["id"], None) or (PlainBox(record) if "pid" in record else None)
        if box is not None:
            await box.client.close()
            await box.kill()
        for path in self.directory.glob(f"{record['id']}.*"):
            path.unlink()

    async def sweep(self, known: set[str], *, keep_disk: bool = False) -> list[str]:
        return []

    async def forget_memory(self, name: str) -> None:
        return None

    async def sweep_memories(self, known: set[str]) -> list[str]:
        return []

    def memory_used(self, name: str) -> int:
        return 0

    async def runtimes(self) -> list[RuntimeStatus]:
        return [RuntimeStatus("container", True)]

    def disk_used(self, box: str) -> int | None:
        return None

    async def network(self) -> NetworkStatus:
        return NetworkStatus(self.network_works, "a plain process has none of its own", off=not self.network_works)

    def prewarm(self, spec: BoxSpec, count: int = 0) -> None:
        return None

    def warm_for(self, spec: BoxSpec) -> int:
        return 0

    def warmth(self) -> dict[str, Any]:
        return {"enabled": False, "ready": 0, "floor": 0}

    async def drain(self) -> None:
        return None

    def capabilities(self, runtime: str) -> Capabilities:
        return self.can

    async def pick(self, runtime: str) -> str:
        if runtime not in ("auto", "container"):
            raise errors.Unsupported(f"no runtime {runtime!r} here")
        return "container"


@asynccontextmanager
async def plain_core(config: Config | None = None) -> AsyncIterator[Core]:
    """A core whose sandboxes are plain processes, with a home of its own. It leaves no process behind."""
    with tempfile.TemporaryDirectory(prefix="atl-", dir="/tmp") as directory, orphans.gathered():
        home = Path(directory)
        core = Core(home, PlainBackend(home / "boxes"), PlainImages(), config or Config())
        await core.start()
        try:
            yield core
        finally:
            for row in core.store.living():
                await core.sandboxes.end(row["id"], "destroyed", "", "test")
            await core.close()
