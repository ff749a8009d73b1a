"""Sandboxes with a kernel of their own inside the sandbox's namespaces, whose agent dials a socket that the daemon listens on.

The launcher leaves a keeper in the sandbox's pid namespace, and below it the kernel with its file server, or the machine.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import ClassVar

from atoll.backends.contract import Capabilities
from atoll.backends.local.assembly import Assembly, passable
from atoll.backends.local.box import LocalBox, LocalRecord
from atoll.backends.local.kernel import filters
from atoll.backends.local.kernel.cgroups import Group
from atoll.backends.local.kernel.children import Status, Watched
from atoll.backends.local.memory.save import Secrets, new_secrets
from atoll.backends.local.paths import Paths
from atoll.backends.local.runtimes.dialled_channel import Door
from atoll.errors import Internal, Unavailable

DIAL_DIRECTORY = "dial"  # of the run directory; mounted read-only into the sandbox
DIAL_TARGET = "/.atoll/host"
INTERIM = "interim.json"  # of the run directory: the agent's secrets while its memory is saved
_SIGNALS = 128


def _write_down(note: Path, secrets: Secrets) -> None:
    fd = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(secrets, file)
        file.flush()
        os.fsync(file.fileno())


class DialledBox(LocalBox):
    """Held by the pidfd of its keeper, the first process of the sandbox's pid namespace."""

    def __init__(
        self,
        record: LocalRecord,
        paths: Paths,
        group: Group,
        init: Watched,
        capabilities: Capabilities,
        door: Door | None = None,
    ) -> None:
        self._door = door or Door(paths.run(record["id"]) / DIAL_DIRECTORY, record["agent_secret"])
        super().__init__(record, paths, group, init, capabilities)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._door.connect()

    @asynccontextmanager
    async def hushed(self) -> AsyncIterator[Secrets]:
        """The secrets of the save are written down first, so that the next daemon finds the agent if this one dies."""
        interim = new_secrets()
        note = self._paths.run(self.id) / INTERIM
        await asyncio.to_thread(_write_down, note, interim)
        try:
            await self.client.request("renew", **interim, quiet=True)
            self._door.close()
            self.client.drop_connection()
            yield interim
        finally:
            if not self._init.over and not self._killed:
                self._door = Door(self._paths.run(self.id) / DIAL_DIRECTORY, interim["agent_secret"])
                self.client.renew(**interim)
                await self.settle()

    async def settle(self) -> None:
        """Give an agent that was cut off for a save its own secrets back."""
        note = self._paths.run(self.id) / INTERIM
        if not note.exists():
            return
        own: Secrets = {"agent_secret": self._record["agent_secret"], "host_secret": self._record["host_secret"]}
        interim: Secrets = json.loads(note.read_text())
        for known in (interim, own):  # its own: the save was over, or had not begun
            self._take(known)
            try:
                await self.unless_it_ends(self.client.request("renew", **own))
                break
            except (Unavailable, Internal):  # nobody came, or one who knows the others
                if known is own:
                    raise
        self._take(own)
        note.unlink()

    def _take(self, secrets: Secrets) -> None:
        super()._take(secrets)
        self._door.renew(secrets["agent_secret"])

    def release(self) -> None:
        super().release()
        self._door.close()

    def _status(self, status: Status) -> Status:
        """The keeper cannot die of the signal the kernel died of, and says it by its code, as a shell does."""
        if status.code is not None and status.code > _SIGNALS:
            return Status(None, status.code - _SIGNALS)
        return status

    def _on_end(self, ended: asyncio.Future[Status]) -> None:
        super()._on_end(ended)
        self._door.close()


class DialledAssembly(Assembly):
    """Everything runs as the sandbox's own root: neither the kernel nor the file server ever has a privileged id on the host."""

    box: ClassVar[type[DialledBox]]
    _door: Door | None = None

    def abandon(self) -> None:
        if self._door is not None:
            self._door.close()

    def open_door(self) -> None:
        """Listen where the agent will dial."""
        passable(self.run / DIAL_DIRECTORY)
        # Other in every sandbox, also in those that go on from one memory: a program sees that its own generator is to be seeded again.
        generation = self.run / DIAL_DIRECTORY / "generation"
        generation.write_text(f"{token_hex(16)}\n")
        generation.chmod(0o644)
        self._door = Door(self.run / DIAL_DIRECTORY, self.secrets["agent_secret"])

    def dial(self) -> tuple[str, Callable[[], int]]:
        """Return the mount of the socket's directory."""
        flags = os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY
        return DIAL_TARGET, partial(os.open, self.run / DIAL_DIRECTORY, flags)

    def handed(self) -> int:
        """Where the launcher writes who the keeper is."""
        return self.pid_file()

    def mountpoints(self) -> list[str]:
        return ["tmp"]

    def entered(self, group: Group) -> list[str]:
        return group.doors()

    def filter(self) -> str | None:
        """Everything: the kernel inside has no filter of its own for the programs."""
        return filters.program(self.spec.seccomp, set_id=self.only_reads_the_host).hex()

    def note(self, record: LocalRecord, init: Watched) -> None:
        record["agent_first"] = True

    def living(self, record: LocalRecord, group: Group, init: Watched) -> LocalBox:
        return self.box(record, self.paths, group, init, self.engine.runtime.capabilities, self._door)
