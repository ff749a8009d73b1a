"""`AsyncSandbox`: a sandbox for asyncio programs.

    async with AsyncSandbox() as sandbox:
        result = await sandbox.run("print('hello')")

The blocking face is generated from this one (scripts/unasync.py).
"""

import builtins
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, Unpack

from atoll.errors import NotFound, SandboxGone

from .. import calls
from ..links import open_async_link
from ..options import CreateOptions, StartOptions, check_create
from ..results import CommandInfo, Event, ExecResult, Output, ProcessInfo, SandboxInfo, Started
from .driver import AsyncLink, Lock, ask_id
from .files import AsyncFiles
from .interpreter import AsyncInterpreters
from .shells import AsyncShells
from .terminals import AsyncTerminals, read_values
from .tunnel import AsyncTunnel, open_tunnel
from .workspaces import AsyncWorkspaces

if TYPE_CHECKING:
    from ..wire import EventWire, ExposedWire, TranscriptWire


class AsyncSandbox(AsyncWorkspaces, AsyncShells, AsyncInterpreters, AsyncTerminals):
    """One sandbox. As a context manager it is created on entering and destroyed on leaving."""

    def __init__(
        self,
        *,
        home: str | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
        **options: Unpack[CreateOptions],
    ) -> None:
        """Describe a sandbox. It is created by entering the context, or by its first use.

        Args:
            home: directory of the daemon of this machine. None: `ATOLL_HOME`, or ~/.atoll.
            endpoint: the address of a gateway, or `unix:` and a socket's path. None: the daemon of this machine.
            api_key: the key for that gateway. None: `ATOLL_APIKEY`.
            options: as for `create`.
        """
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
        """Create a sandbox and return it, running. Destroy it when done, or use it in `async with`.

        What is left out is the operator's default. An option that this machine cannot hold is refused, never ignored.

        Args:
            home: directory of the daemon of this machine. None: `ATOLL_HOME`, or ~/.atoll.
            endpoint: the address of a gateway, or `unix:` and a socket's path. None: the daemon of this machine.
            api_key: the key for that gateway. None: `ATOLL_APIKEY`.
            name: a name of its own, unique among the caller's living sandboxes.
            runtime: `auto` (the strongest that works here), `gvisor` or `container`.
            image: what its file system starts from: `host`, a name of the catalog (`atoll image list`) or a registry reference.
            profile: how strictly it is walled in; see docs/policy.md.
            mode: a profile with a list of hosts, for one kind of work; see docs/policy.md.
            env: environment of every command.
            cpus: processors it may use, also fractions.
            memory_mb: memory of all its programs together.
            pids: how many processes and threads it may have.
            files: how many open files a process may have.
            disk_mb: size of its disk.
            shm_mb: size of /dev/shm. None: half of the memory.
            hosts: the hosts it may reach, instead of the operator's list; [] is none.
            more_hosts: hosts it may reach beside that list.
            network: False: it has no network at all.
            host_ports: ports of the host's loopback that it may reach, as host.atoll.internal.
            idle_timeout: it ends after so many seconds without use.
            lifetime: it ends so many seconds from now.
            workdir: where commands start.
            labels: any texts of the caller's, shown by `info` and `list`.
            alias: a further name, which may hold characters that `name` may not.
            mounts: directories of the host: `{"source": ..., "target": ..., "read_only": True}`. The operator must allow each source.
            volumes: volumes of yours to mount: `{"name": ..., "target": ..., "read_only": True}`.
            read_only_root: only /workspace and /tmp can be written.
            persistent: it is stopped, not ended, when it is idle or its daemon was lost, and keeps its disk.
            keep: it is stopped when idle, its disk kept for a while; the next use starts it again.
            secrets: stored secrets as variables: `{"name": ..., "key": ..., "env": ...}`.
            require_approval: operations that a person must approve each time; `command:GLOB`, `path:GLOB` or `host:GLOB`.
        """
        sandbox = cls(home=home, endpoint=endpoint, api_key=api_key, **options)
        await sandbox._target()
        return sandbox

    @classmethod
    async def connect(
        cls, ref: str, *, home: str | None = None, endpoint: str | None = None, api_key: str | None = None
    ) -> Self:
        """Return an existing sandbox. Leaving its context does not destroy it.

        Args:
            ref: its id, name or alias.
            home: directory of the daemon of this machine. None: `ATOLL_HOME`, or ~/.atoll.
            endpoint: the address of a gateway, or `unix:` and a socket's path. None: the daemon of this machine.
            api_key: the key for that gateway. None: `ATOLL_APIKEY`.
        """
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
        """Return the caller's sandboxes.

        Args:
            state: `active` ones (all but ended), `all`, or those that are `running`, `stopped` or `ended`.
            name: only those of this name.
            home: directory of the daemon of this machine. None: `ATOLL_HOME`, or ~/.atoll.
            endpoint: the address of a gateway, or `unix:` and a socket's path. None: the daemon of this machine.
            api_key: the key for that gateway. None: `ATOLL_APIKEY`.
        """
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
        """Return what the sandbox is now: state, limits, policy, end."""
        ref, link = await self._target()
        return SandboxInfo(await link.call(calls.info(ref)))

    async def destroy(self) -> None:
        """End it and all that runs in it, and delete its disk. Doing so twice is harmless."""
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
        """End its processes and keep its disk."""
        return await self._lifecycle("stop")

    async def pause(self) -> SandboxInfo:
        """Freeze every process in it."""
        return await self._lifecycle("pause")

    async def resume(self) -> SandboxInfo:
        """Thaw what `pause` froze."""
        return await self._lifecycle("resume")

    async def extend(self, lifetime: float | None = None, *, idle_timeout: float | None = None) -> SandboxInfo:
        """Move its end.

        Args:
            lifetime: seconds from now. None: as it is.
            idle_timeout: seconds without use. None: as it is.
        """
        return await self._lifecycle("extend", {"lifetime_s": lifetime, "idle_timeout_s": idle_timeout})

    async def _lifecycle(self, verb: str, fields: Mapping[str, Any] | None = None) -> SandboxInfo:
        ref, link = await self._target()
        return SandboxInfo(await link.call(calls.lifecycle(ref, verb, fields)))

    async def allow_hosts(
        self, hosts: Sequence[str] | None = None, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> builtins.list[str]:
        """Change at once which hosts it may reach, and return the new list. Connections no longer allowed are cut.

        Args:
            hosts: the new list; [] is no host. None, with neither `add` nor `remove`: the operator's list.
            add: hosts to add.
            remove: hosts to take away.
        """
        ref, link = await self._target()
        return [str(host) for host in (await link.call(calls.change_hosts(ref, hosts, add, remove)))["hosts"]]

    async def expose(self, port: int, *, host: str = "127.0.0.1") -> str:
        """Return a URL for a port inside, for HTTP and WebSockets. It holds its own secret: whoever has it may use it.

        Args:
            port: the port inside.
            host: the address of this machine to listen on.
        """
        ref, link = await self._target()
        return str((await link.call(calls.expose(ref, port, host)))["url"])

    async def unexpose(self, port: int) -> bool:
        """Take the URL of a port away, and return whether there was one.

        Args:
            port: the port inside.
        """
        ref, link = await self._target()
        return bool((await link.call(calls.unexpose(ref, port)))["ok"])

    async def exposed(self) -> "builtins.list[ExposedWire]":
        """Return the ports that have a URL: port, host, url, site_url and started_at of each."""
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
        """Run code in a language, wait, and return its result.

        Args:
            code: the program's text.
            language: `python`, `javascript`, `bash` or another one that the image has.
            args: its arguments.
            cwd: where it starts. None: the sandbox's `workdir`.
            env: variables beside those of the sandbox.
            stdin: its whole standard input.
            timeout: seconds after which it is ended, and its result says `timed_out`. None: never.
            output_limit: bytes kept of stdout and of stderr; more is cut, and the result says so. None: 1 MiB.
        """
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
        """Run a program or a shell line, wait, and return its result. A failed command raises nothing.

        Args:
            command: a list of program and arguments, or a line for the shell.
            cwd: where it starts. None: the sandbox's `workdir`.
            env: variables beside those of the sandbox.
            user: who runs it, a name or number, optionally with `:group`. None: the image's user, mostly root.
            umask: permission bits that new files do not get.
            merge_stderr: stderr comes in `stdout`, in the order in which both were written.
            stdin: its whole standard input.
            timeout: seconds after which it is ended, and its result says `timed_out`. None: never.
            output_limit: bytes kept of stdout and of stderr; more is cut, and the result says so. None: 1 MiB.
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
        """Run a command and give its output as it comes. The last item is the ExecResult.

        Closing the iterator kills the command.

        Args:
            command: a list of program and arguments, a line for the shell, or code.
            language: the command is code in this language.
            args: arguments for code.
            cwd: where it starts. None: the sandbox's `workdir`.
            env: variables beside those of the sandbox.
            user: who runs it, a name or number, optionally with `:group`. None: the image's user, mostly root.
            umask: permission bits that new files do not get.
            merge_stderr: stderr comes in `stdout`, in the order in which both were written.
            stdin: its whole standard input.
            stdin_stream: its standard input stays open for `Command.stdin`.
            timeout: seconds after which it is ended, and its result says `timed_out`. None: never.
            output_limit: bytes kept of stdout and of stderr; more is cut, and the result says so. None: 1 MiB.
        """
        ref, link = await self._target()
        exchange = await link.open(calls.start(ref, command, frames=True, **options))
        try:
            async for value in read_values(exchange):
                yield value
        finally:
            exchange.close()

    async def start(self, command: str | Sequence[str], **options: Unpack[StartOptions]) -> "AsyncCommand":
        """Start a command without waiting and return a handle on it. It goes on when this program ends.

        Args:
            command: a list of program and arguments, a line for the shell, or code.
            language: the command is code in this language.
            args: arguments for code.
            cwd: where it starts. None: the sandbox's `workdir`.
            env: variables beside those of the sandbox.
            user: who runs it, a name or number, optionally with `:group`. None: the image's user, mostly root.
            umask: permission bits that new files do not get.
            merge_stderr: stderr comes in `stdout`, in the order in which both were written.
            stdin: its whole standard input.
            stdin_stream: its standard input stays open for `Command.stdin`.
            timeout: seconds after which it is ended, and its result says `timed_out`. None: never.
            output_limit: bytes kept of stdout and of stderr; more is cut, and the result says so. None: 10 MiB.
        """
        ref, link = await self._target()
        options.setdefault("timeout", None)
        call = calls.start(ref, command, background=True, **options)
        started = await link.call(call)
        return AsyncCommand(self, str(started["command_id"]), started.get("pid"))

    async def command(self, command_id: str) -> "AsyncCommand":
        """Return a handle on a command that was started earlier, by anyone who may use this sandbox.

        Args:
            command_id: its id, as `start` and `commands` give it.
        """
        ref, link = await self._target()
        found = await link.call(calls.poll(ref, command_id))
        return AsyncCommand(self, str(found["command_id"]), found.get("pid"))

    async def commands(self) -> builtins.list[CommandInfo]:
        """Return the commands of this sandbox, those that run and those remembered."""
        ref, link = await self._target()
        answer = await link.call(calls.get(calls.sandbox_path(ref, "commands")))
        return [CommandInfo(item) for item in answer["commands"]]

    async def processes(self) -> builtins.list[ProcessInfo]:
        """Return the processes that run inside now."""
        ref, link = await self._target()
        answer = await link.call(calls.get(calls.sandbox_path(ref, "processes")))
        return [ProcessInfo(item) for item in answer["processes"]]

    async def forward(self, port: int) -> AsyncTunnel:
        """Return one TCP connection to a port inside.

        Args:
            port: the port inside.
        """
        ref, link = await self._target()
        return await open_tunnel(link, ref, port)

    async def log(self, *, offset: int | None = None, limit: int | None = None) -> "TranscriptWire":
        """Return a window of the transcript: output, offset, next_offset, eof.

        Args:
            offset: the byte to start at. None: the first that is kept.
            limit: return at most so many bytes.
        """
        ref, link = await self._target()
        query = {"offset": offset, "limit": limit}
        answer: TranscriptWire = await link.call(calls.get(calls.sandbox_path(ref, "log"), query))
        return answer

    async def events(self, *, limit: int | None = None, after: int | None = None) -> "builtins.list[EventWire]":
        """Return what happened to the sandbox, oldest first.

        Args:
            limit: return at most so many, the newest.
            after: only events with a higher number than this.
        """
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
        """Return its state now, with the output kept so far.

        Args:
            stdout_from: give stdout from this byte on. None: from the first that is kept.
            stderr_from: the same of stderr.
        """
        ref, link = await self._sandbox._target()
        return CommandInfo(await link.call(calls.poll(ref, self.id, stdout_from, stderr_from)))

    async def attach(self, *, stdout: int = 0, stderr: int = 0) -> AsyncIterator[Started | Output | Event | ExecResult]:
        """Give its output from these bytes on, then the ExecResult. Closing the iterator does not harm the command.

        Args:
            stdout: the byte of stdout to start at.
            stderr: the byte of stderr to start at.
        """
        ref, link = await self._sandbox._target()
        exchange = await link.open(calls.attach(ref, self.id, stdout, stderr))
        try:
            async for value in read_values(exchange):
                yield value
        finally:
            exchange.close()

    async def wait(self) -> ExecResult:
        """Wait for its end and return its result; `stdout` and `stderr` are what was kept of them."""
        seen = await self.poll()
        while seen.running:
            async for _ in self.attach(stdout=seen.stdout_bytes, stderr=seen.stderr_bytes):
                pass
            seen = await self.poll()
        return ExecResult(seen.wire)

    async def output(self) -> str:
        """Return what it has written to stdout so far, as far as it is kept."""
        return (await self.poll()).stdout

    async def stdin(self, data: bytes | str, *, eof: bool = False) -> None:
        """Write to its standard input. It must have been started with `stdin_stream=True`.

        Args:
            data: what to write; text as UTF-8.
            eof: close its input afterwards.
        """
        ref, link = await self._sandbox._target()
        await link.call(calls.send_stdin(ref, self.id, data.encode() if isinstance(data, str) else data, eof))

    async def signal(self, number: int, *, group: str | None = None) -> None:
        """Send it a signal.

        Args:
            number: of the signal, as in the module `signal`.
            group: who gets it: `process` (the command alone), `session`, `tree` (also all it started; the default) or
                `foreground` (of its terminal).
        """
        ref, link = await self._sandbox._target()
        await link.call(calls.signal(ref, self.id, number, group))

    async def kill(self) -> None:
        """End it with everything it started."""
        ref, link = await self._sandbox._target()
        await link.call(calls.kill(ref, self.id))
