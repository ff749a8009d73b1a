"""The interpreter's server in a sandbox: it runs and has the sandbox's variables before anybody is let through to it.

A warm sandbox has it running already (`FIRST` in `sandboxes/provisioning.py`); elsewhere it is started with the first
use. What it says is a stranger's word: it is read within bounds.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from weakref import WeakKeyDictionary

import msgspec

from atoll import errors
from atoll.core.access.principals import Principal, new_command_id
from atoll.core.access.secrets import Vault
from atoll.core.commands.history import History
from atoll.core.files.ports import Ports
from atoll.core.interpreter.talk import ask
from atoll.core.policy.images import INTERPRETER
from atoll.core.sandboxes.provisioning import FIRST
from atoll.core.sandboxes.state import Live
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.guest import Process, ProgramNotStarted
from atoll.guest.process import ProcessRequest

PORT = 49999
START_MS = 180_000
SAID = 2000  # bytes that are kept of why it did not start
UNPREPARED = "this sandbox has no interpreter"


class Standing:
    """The state of one sandbox's server, as far as it is known."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.told: Mapping[str, str] | None = None  # the variables it has


class Interpreters:
    """The servers of all sandboxes."""

    def __init__(self, sandboxes: Sandboxes, ports: Ports, vault: Vault, history: History) -> None:
        self._sandboxes = sandboxes
        self._ports = ports
        self._vault = vault
        self._history = history
        self._standing: WeakKeyDictionary[Live, Standing] = WeakKeyDictionary()

    async def ready(self, who: Principal, ref: str, env: Mapping[str, str] | None = None) -> Live:
        """Return the sandbox when its interpreter can be asked. `env` is what it has besides the sandbox's variables."""
        live = await self._sandboxes.wake(who, ref)
        if live.spec.image != INTERPRETER:
            raise errors.FailedPrecondition(UNPREPARED, hint=f"create one from the image {INTERPRETER}")
        if live.spec.require_approval:  # no rule looks at cells
            raise errors.Unsupported(
                "a sandbox with approval rules has no interpreter", hint="run the code with `run`, which the rules hold"
            )
        standing = self._standing.setdefault(live, Standing())
        wanted = {**live.spec.env, **(env or {})}
        async with standing.lock:
            if standing.told == wanted and await self._answers(who, live):
                return live
            standing.told = None
            if not await self._answers(who, live):
                await self._start(live)
            await self._tell(who, live, wanted)
            standing.told = wanted
        return live

    async def ahead(self, who: Principal, ref: str, env: Mapping[str, str] | None = None) -> None:
        """Do the same with nobody waiting for it."""
        with suppress(errors.AtollError):
            await self.ready(who, ref, env)

    async def _answers(self, who: Principal, live: Live) -> bool:
        """Return whether somebody listens there."""
        try:
            async with self._ports.connect(who, live.id, PORT):
                return True
        except errors.FailedPrecondition:
            return False

    async def _start(self, live: Live) -> None:
        request: ProcessRequest = {"argv": [*FIRST.argv], "cwd": "/", "user": FIRST.user, "timeout_ms": START_MS}
        said = b""
        with live.use() as client:
            try:
                process = await Process.start(client, new_command_id(), request)
            except ProgramNotStarted as refused:
                raise errors.FailedPrecondition(f"the interpreter cannot be started: {refused.message}") from None
            async for _, data in process:
                said = (said + data)[-SAID:]
        if process.exit is None or process.exit.code != 0:
            why = said.decode("utf-8", "replace").strip() or "it said nothing"
            raise errors.FailedPrecondition(
                f"the interpreter did not start: {why}",
                hint="a sandbox needs 512 MB of memory for it; what it printed is in /tmp/interpreter.log inside",
            )

    async def _tell(self, who: Principal, live: Live, env: Mapping[str, str]) -> None:
        """Hand over the variables: a server that was started ahead does not know whose sandbox it is in."""
        values = dict(env)
        if live.spec.secrets:
            secret = self._vault.resolve(live.owner, live.spec.secrets)
            self._history.mask(live.id, secret.values())
            values |= secret
        if values:
            await ask(self._ports, who, live.id, PORT, "POST", "/environment", msgspec.json.encode({"env": values}))
