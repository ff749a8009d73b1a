"""One MCP client: who it is, the session it runs code in, and the calls it has under way. When it leaves, both go."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll import errors, profiles
from atoll.core import Core
from atoll.core.access.audited_verbs import SOURCE
from atoll.core.access.credentials import Doorkeeper
from atoll.core.access.principals import Principal
from atoll.core.policy.images import INTERPRETER
from atoll.model import Chunk, CreateSandbox, ExecResult, ObtainSession, convert
from atoll.server.request import internal
from atoll.surfaces.mcp import content
from atoll.surfaces.mcp.progress import Live, Report
from atoll.surfaces.mcp.settings import Settings
from atoll.surfaces.mcp.tools import TOOLSETS, Arguments, Handler

log = logging.getLogger("atoll.mcp")

MAX_CALLS = 256  # of one client at once; more wait
HANDLERS: dict[str, Handler] = {}


class BadArguments(Exception):
    """The arguments of a call are not what the tool takes."""


def tool(name: str) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        HANDLERS[name] = handler
        return handler

    return add


class Client:
    """A client over any transport."""

    def __init__(
        self, core: Core, who: Principal, settings: Settings, keeper: Doorkeeper | None = None, source: str = "http"
    ) -> None:
        self.core = core
        self.who = who
        self.settings = settings
        self.name = ""
        self.session: str | None = None
        self.interpreter: str | None = None  # its sandbox with an interpreter
        self.replaced: dict[str, str] | None = None  # what became of the default session before this one
        self._keeper = keeper
        self._lock = asyncio.Lock()
        self._source = f"mcp {source}"
        self._calls: set[asyncio.Task[Any]] = set()
        self._room = asyncio.Semaphore(MAX_CALLS)
        self._left = False
        self._ending: asyncio.Task[None] | None = None
        self.on_lost: Callable[[], object] = lambda: None  # called when the credential is taken away
        self._release = keeper.watch.hold(who, self._lost) if keeper is not None else lambda: None

    async def call(self, name: str, arguments: Any, report: Report | None = None) -> content.Result:
        """Do what a tool does. A failure is a result that says so; only arguments of the wrong form raise."""
        known = TOOLSETS[self.settings.toolset].get(name)
        if known is None:
            return content.failed(f"unknown tool {name!r:.120}")
        given = _read(known.takes, arguments)
        if self._left:
            return content.failed("the client has left")
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            if self._keeper is not None:
                self._keeper.recheck(self.who)
                self._keeper.admit(self.who, "read" if known.annotations["readOnlyHint"] else "write")
            SOURCE.set(self._source)
            async with self._room:
                return await HANDLERS[name](Call(self, report), given)
        except errors.AtollError as error:
            return content.failed(error.message + (f" ({error.hint})" if error.hint else ""))
        except (OSError, RuntimeError, ValueError, TypeError, AssertionError, KeyError) as bug:
            failure = internal(bug)
            return content.failed(f"{failure.message} ({failure.hint})")
        finally:
            self._calls.discard(task)

    async def default_session(self) -> str:
        """The session that code runs in: the tenant's, or this client's own; a new one when it has ended."""
        async with self._lock:
            spec = CreateSandbox(runtime=self.settings.runtime, keep=True)
            asked = ObtainSession(tenant=self.settings.tenant, before=self.session, sandbox=spec)
            found = await self.core.sessions.obtain(self.who, asked)
            self.session = found.sandbox.id
            if found.replaced is not None:
                self.replaced = {"reason": found.replaced.reason, "lost": found.replaced.lost}
            return self.session

    async def interpreter_sandbox(self) -> str:
        """Return the sandbox that cells run in: this client's own; a new one when it has ended."""
        async with self._lock:
            if self.interpreter is not None:
                try:
                    found = await self.core.sandboxes.get(self.who, self.interpreter)
                    if found.state not in ("ending", "ended"):
                        return self.interpreter
                except errors.NotFound:
                    pass
            spec = CreateSandbox(image=INTERPRETER, runtime=self.settings.runtime)
            self.interpreter = (await self.core.sandboxes.create(self.who, spec)).id
            return self.interpreter

    def _lost(self, refusal: errors.AtollError) -> None:
        self.on_lost()
        self._ending = asyncio.ensure_future(self.close())

    async def close(self) -> None:
        """The client has left: what it runs is killed, and its session destroyed unless a tenant's."""
        self._left = True
        self._release()
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=30)
        async with self._lock:
            session, self.session = self.session, None
            interpreter, self.interpreter = self.interpreter, None
        for mine in (None if self.settings.tenant else session, interpreter):
            if mine is None:
                continue
            try:
                await self.core.sandboxes.destroy(self.who, mine)
            except errors.AtollError as error:
                if not isinstance(error, errors.NotFound | errors.SandboxGone):
                    log.warning("session %s of a client that left is not gone yet: %s", mine, error)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool."""

    client: Client
    report: Report | None

    @property
    def core(self) -> Core:
        return self.client.core

    @property
    def who(self) -> Principal:
        return self.client.who

    @property
    def settings(self) -> Settings:
        return self.client.settings

    @property
    def mode(self) -> str | None:
        """The compatibility mode of a call that names none: the project's, else that of the agent that calls."""
        if self.settings.mode is not None:
            return self.settings.mode
        found = profiles.MODE_NAMES.get(self.client.name.removesuffix("-mcp-client"))
        return found if found != profiles.NATIVE else None

    async def follow(self, stream: AsyncIterator[Any]) -> content.Ended:
        """A command to its end, with its output shown live. A cancelled call closes the stream, which kills it."""
        ended = content.Ended()
        live = Live(self.report) if self.report is not None else None
        try:
            async with aclosing(stream):  # type: ignore[type-var]  # only generators come here
                async for item in stream:
                    if isinstance(item, Chunk):
                        (ended.stdout if item.channel == 1 else ended.stderr).add(item.data)
                        ended.output.add(item.data)
                        if live is not None:
                            live.add(item.channel, item.data)
                    elif isinstance(item, ExecResult):
                        ended.done = item
        finally:
            if live is not None:
                await live.close()
        return ended


def _read(kind: type[Arguments], given: Any) -> Arguments:
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise BadArguments("arguments must be an object")
    try:
        return convert(kind, {key: value for key, value in given.items() if value is not None})
    except errors.InvalidArgument as error:
        raise BadArguments(error.message) from None


def given(value: Any, default: Any = None) -> Any:
    """The value of an argument that may have been left out."""
    return default if value is msgspec.UNSET else value
