"""`AsyncSandbox`: a sandbox for asyncio programs.

    async with AsyncSandbox() as sandbox:
        result = await sandbox.run("print('hello')")

The blocking face is generated from this one (scripts/unasync.py).
"""

import builtins
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, Unpack

from atoll.errors import AtollError, FailedPrecondition, NotFound, SandboxGone

from .. import calls
from ..links import open_async_link
from ..options import CreateOptions, StartOptions, check_create
from ..results import CommandInfo, Event, ExecResult, Output, ProcessInfo, SandboxInfo, Started
from .driver import AsyncExchange, AsyncLink, Lock, ask_id
from .files import AsyncFiles
from .shells import AsyncShells
from .tunnel import AsyncTunnel, open_tunnel
from .workspaces import AsyncWorkspaces


class AsyncSandbox(AsyncWorkspaces, AsyncShells):
    """One sandbox. As a context manager it is created on entering and destroyed on leaving."""

    def __init__(
        self,
        *,
        home: str | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
        **options: Unpack[CreateOptions],
    ) -> None:
        check_create(options)
        self._options: CreateOptions = options
        self._link = open_async_link(home, endpoint, api_key)
        self._where = (home, endpoint, api_key)
        self._ref: str | None = None
        self._owned = True
        self._creating = Lock()
        self.files = AsyncFiles(self)

    @classmethod
    async def create(
        cls,
        *,
        home: str | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
        **options: Unpack[CreateOptions],
    ) -> Self:
        """A new sandbox, running. Destroy it when done, or use it in `async with`."""
        sandbox = cls(home=home, endpoint=endpoint, api_key=api_key, **options)
        await sandbox._target()
        return sandbox

    @classmethod
    async def connect(
        cls, ref: str, *, home: str | None = None, endpoint: str | None = None, api_key: str | None = None
    ) -> Self:
        """An existing sandbox by id, name or alias. Leaving its context does not destroy it."""
        sandbox = cls(home=home, endpoint=endpoint, api_key=api_key)
        found = await sandbox._link.call(calls.info(ref))
        sandbox._ref, sandbox._owned = found["id"], False
        return sandbox

    @classmethod
    async def list(
        cls,
        *,
        state: str = "active",
        name: str | None = None,
        home: str | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
    ) -> builtins.list[SandboxInfo]:
        """The caller's sandboxes: `active`, `all`, `running`, `stopped` or `ended` ones."""
        link = open_async_link(home, endpoint, api_key)
        try:
            answer = await link.call(calls.list_sandboxes(state, name))
        finally:
            link.close()
        return [SandboxInfo(item) for item in answer["sandboxes"]]

    async def __aenter__(self) -> Self:
        await self._target()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._owned:
                await self.destroy()
        finally:
            await self.close()

    @property
    def id(self) -> str:
        """The sandbox's id. `Sandbox` creates the sandbox for it if need be; `AsyncSandbox` must have been created."""
        return self._ref or ask_id(self)

    async def _target(self) -> tuple[str, AsyncLink]:
        if self._ref is None:
            async with self._creating:
                if self._ref is None:  # of several users at once, the first creates
                    made = await self._link.call(calls.create(self._options))
                    self._ref = str(made["id"])
        return self._ref, self._link

    async def info(self) -> SandboxInfo:
        ref, link = await self._target()
        return SandboxInfo(await link.call(calls.info(ref)))

    async def destroy(self) -> None:
        """End it and all that runs in it. Doing so twice is harmless."""
        if self._ref is None:
            return
        with suppress(SandboxGone, NotFound):
            await self._link.call(calls.destroy(self._ref))

    async def close(self) -> None:
        """Close this object's connections; the sandbox lives on."""
        self._link.close()

    async def restart(self) -> SandboxInfo:
        """Start a stopped sandbox again."""
        return await self._lifecycle("start")

    async def stop(self) -> SandboxInfo:
        """End its processes, keep its disk."""
        return await self._lifecycle("stop")

    async def pause(self) -> SandboxInfo:
        """Freeze every process in it."""
        return await self._lifecycle("pause")

    async def resume(self) -> SandboxInfo:
        """Thaw what pause froze."""
        return await self._lifecycle("resume")

    async def extend(self, lifetime: float | None = None, *, idle_timeout: float | None = None) -> SandboxInfo:
        """Move its end: so many seconds from now, and so many without use."""
        return await self._lifecycle("extend", {"lifetime_s": lifetime, "idle_timeout_s": idle_timeout})

    async def _lifecycle(self, verb: str, fields: Mapping[str, Any] | None = None) -> SandboxInfo:
        ref, link = await self._target()
        return SandboxInfo(await link.call(calls.lifecycle(ref, verb, fields)))

    async def allow_hosts(
        self, hosts: Sequence[str] | None = None, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> builtins.list[str]:
        """Change at once what it may reach: another list ([] is no host), or more, or less; nothing: the default list."""
        ref, link = await self._target()
        return [str(host) for host in (await link.call(calls.change_hosts(ref, hosts, add, remove)))["hosts"]]

    async def expose(self, port: int, *, host: str = "127.0.0.1") -> str:
        """A URL for a port inside, HTTP and WebSockets; whoever has it needs nothing else."""
        ref, link = await self._target()
        return str((await link.call(calls.expose(ref, port, host)))["url"])

    async def unexpose(self, port: int) -> bool:
        """Take the URL away; false when there was none."""
        ref, link = await self._target()
        return bool((await link.call(calls.unexpose(ref, port)))["ok"])

    async def exposed(self) -> builtins.list[dict[str, Any]]:
        """Ports that have a URL: port, host, url, site_url and started_at of each."""
        ref, link = await self._target()
        return builtins.list((await link.call(calls.get(calls.sandbox_path(ref, "exposures"))))["exposures"])

    async def run(
        self,
        code: str,
        language: str = "python",
        *,
        args: Sequence[str] = (),
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = calls.DEFAULT_TIMEOUT,
        output_limit: int | None = None,
    ) -> ExecResult:
        """Run code in a language and wait. `timeout` is in seconds, None for no limit."""
        ref, link = await self._target()
        call = calls.start(
            ref, code, language=language, args=args, cwd=cwd, env=env, stdin=stdin, timeout=timeout,
            output_limit=output_limit,
        )  # fmt: skip
        return ExecResult(await link.call(call))

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        umask: int | None = None,
        merge_stderr: bool = False,
        stdin: str | bytes | None = None,
        timeout: float | None = calls.DEFAULT_TIMEOUT,
        output_limit: int | None = None,
    ) -> ExecResult:
        """Run a program (a list) or a shell line (a string) and wait.

        `merge_stderr`: both streams come in `stdout`, in the order in which they were written.
        """
        ref, link = await self._target()
        call = calls.start(
            ref, command, cwd=cwd, env=env, user=user, umask=umask, merge_stderr=merge_stderr, stdin=stdin,
            timeout=timeout, output_limit=output_limit,
        )  # fmt: skip
        return ExecResult(await link.call(call))

    async def stream(
        self, command: str | Sequence[str], **options: Unpack[StartOptions]
    ) -> AsyncIterator[Started | Output | Event | ExecResult]:
        """Run and give the output as it comes; the last item is the ExecResult. Closing the iterator kills the command.

        With `language` the command is code.
        """
        ref, link = await self._target()
        exchange = await link.open(calls.start(ref, command, frames=True, **options))
        try:
            async for value in _values(exchange):
                yield value
        finally:
            exchange.close()

    async def start(self, command: str | Sequence[str], **options: Unpack[StartOptions]) -> "AsyncCommand":
        """Start without waiting; with `language` the command is code. It goes on when this program ends."""
        ref, link = await self._target()
        options.setdefault("timeout", None)
        call = calls.start(ref, command, background=True, **options)
        started = await link.call(call)
        return AsyncCommand(self, str(started["command_id"]), started.get("pid"))

    async def command(self, command_id: str) -> "AsyncCommand":
        """A handle on a command that was started earlier, by anyone who may use this sandbox."""
        ref, link = await self._target()
        found = await link.call(calls.poll(ref, command_id))
        return AsyncCommand(self, str(found["command_id"]), found.get("pid"))

    async def commands(self) -> builtins.list[CommandInfo]:
        ref, link = await self._target()
        answer = await link.call(calls.get(calls.sandbox_path(ref, "commands")))
        return [CommandInfo(item) for item in answer["commands"]]

    async def processes(self) -> builtins.list[ProcessInfo]:
        """What runs inside now."""
        ref, link = await self._target()
        answer = await link.call(calls.get(calls.sandbox_path(ref, "processes")))
        return [ProcessInfo(item) for item in answer["processes"]]

    async def pty(
        self,
        command: str | Sequence[str] = ("bash", "-l"),
        *,
        rows: int = 24,
        cols: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> "AsyncPty":
        """A command on a terminal. Closing the AsyncPty kills it."""
        ref, link = await self._target()
        call = calls.start(
            ref, command, cwd=cwd, env=env, user=user, timeout=timeout, pty=(rows, cols), stdin_stream=True, frames=True
        )
        exchange = await link.open(call)
        await exchange.raise_for_status()
        return AsyncPty(self, str(call.command_id), exchange)

    async def forward(self, port: int) -> AsyncTunnel:
        """One TCP connection to a port inside."""
        ref, link = await self._target()
        return await open_tunnel(link, ref, port)

    async def log(self, *, offset: int | None = None, limit: int | None = None) -> dict[str, Any]:
        """A window of the transcript: output, offset, next_offset, eof."""
        ref, link = await self._target()
        query = {"offset": offset, "limit": limit}
        answer: dict[str, Any] = await link.call(calls.get(calls.sandbox_path(ref, "log"), query))
        return answer

    async def events(self, *, limit: int | None = None, after: int | None = None) -> builtins.list[dict[str, Any]]:
        """What happened to the sandbox, oldest first."""
        ref, link = await self._target()
        answer = await link.call(calls.get(calls.sandbox_path(ref, "events"), {"limit": limit, "after": after}))
        return list(answer["events"])


class AsyncCommand:
    """A command that runs, or ran, in the background."""

    def __init__(self, sandbox: AsyncSandbox, command_id: str, pid: int | None = None) -> None:
        self._sandbox = sandbox
        self.id = command_id
        self.pid = pid

    async def poll(self, *, stdout_from: int | None = None, stderr_from: int | None = None) -> CommandInfo:
        """Its state now, with the output kept so far (from the given offsets)."""
        ref, link = await self._sandbox._target()
        return CommandInfo(await link.call(calls.poll(ref, self.id, stdout_from, stderr_from)))

    async def attach(self, *, stdout: int = 0, stderr: int = 0) -> AsyncIterator[Started | Output | Event | ExecResult]:
        """Its output from these offsets on, then the ExecResult. Closing the iterator does not harm the command."""
        ref, link = await self._sandbox._target()
        exchange = await link.open(calls.attach(ref, self.id, stdout, stderr))
        try:
            async for value in _values(exchange):
                yield value
        finally:
            exchange.close()

    async def wait(self) -> ExecResult:
        """Wait for its end; `stdout` and `stderr` are what was kept of them."""
        seen = await self.poll()
        while seen.running:
            async for _ in self.attach(stdout=seen.stdout_bytes, stderr=seen.stderr_bytes):
                pass
            seen = await self.poll()
        return ExecResult(seen.wire)

    async def output(self) -> str:
        """What it has written to stdout so far, as far as it is kept."""
        return (await self.poll()).stdout

    async def stdin(self, data: bytes | str, *, eof: bool = False) -> None:
        """Write to its standard input (it must have been started with `stdin_stream=True`)."""
        ref, link = await self._sandbox._target()
        await link.call(calls.send_stdin(ref, self.id, data.encode() if isinstance(data, str) else data, eof))

    async def signal(self, number: int, *, group: str | None = None) -> None:
        ref, link = await self._sandbox._target()
        await link.call(calls.signal(ref, self.id, number, group))

    async def kill(self) -> None:
        """End it with everything it started."""
        ref, link = await self._sandbox._target()
        await link.call(calls.kill(ref, self.id))


class AsyncPty:
    """A terminal inside the sandbox: iterate for its output, `result` is set at the end."""

    def __init__(self, sandbox: AsyncSandbox, command_id: str, exchange: AsyncExchange) -> None:
        self._sandbox = sandbox
        self._exchange = exchange
        self._values = _values(exchange)
        self._closed = False
        self.id = command_id
        self.result: ExecResult | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._output()

    async def _output(self) -> AsyncIterator[bytes]:
        try:
            async for value in self._values:
                if isinstance(value, Output):
                    yield value.data
                elif isinstance(value, ExecResult):
                    self.result = value
        except AtollError:
            if not self._closed:  # closed while it was read: the output ends here
                raise

    async def write(self, data: bytes | str) -> None:
        """Type something."""
        ref, link = await self._sandbox._target()
        await link.call(calls.send_stdin(ref, self.id, data.encode() if isinstance(data, str) else data))

    async def resize(self, rows: int, cols: int) -> None:
        ref, link = await self._sandbox._target()
        await link.call(calls.resize(ref, self.id, rows, cols))

    async def wait(self) -> ExecResult:
        """Read on to the end and return how it ended."""
        async for _ in self:
            pass
        if self.result is None:
            raise FailedPrecondition("the terminal was closed before it ended")
        return self.result

    async def signal(self, number: int, *, group: str = "foreground") -> None:
        """Send a signal to what runs in the foreground of the terminal, or to another `group` as in `Command.signal`."""
        ref, link = await self._sandbox._target()
        await link.call(calls.signal(ref, self.id, number, group))

    async def kill(self) -> None:
        ref, link = await self._sandbox._target()
        await link.call(calls.kill(ref, self.id))

    async def close(self) -> None:
        """Let go of it; what still runs on it is killed. Whoever reads it meanwhile sees its end."""
        self._closed = True
        self._exchange.interrupt()
        try:
            await self._values.aclose()
        except (RuntimeError, ValueError):
            return  # it is being read: the reader finds the connection closed and lets go of it
        self._exchange.close()


async def _values(exchange: AsyncExchange) -> AsyncGenerator[Started | Output | Event | ExecResult, None]:
    try:
        await exchange.raise_for_status()
        async for value in exchange.frames():
            yield ExecResult(value) if isinstance(value, dict) else value
    finally:
        exchange.close()
