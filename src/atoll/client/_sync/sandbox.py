"""`Sandbox`: a sandbox for blocking programs.

    with Sandbox() as sandbox:
        result = sandbox.run("print('hello')")

`async_sandbox.py` is the same face for asyncio; a test holds the two together.
"""

import builtins
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, Unpack

from atoll.errors import FailedPrecondition, NotFound, SandboxGone

from .. import calls
from ..links import open_link
from ..options import CreateOptions, StartOptions, check_create
from ..results import CommandInfo, Event, ExecResult, Output, ProcessInfo, SandboxInfo, Started
from .driver import Exchange, Link
from .files import Files
from .tunnel import Tunnel, open_tunnel
from .workspaces import Workspaces


class Sandbox(Workspaces):
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
        self._link = open_link(home, endpoint, api_key)
        self._where = (home, endpoint, api_key)
        self._ref: str | None = None
        self._owned = True
        self._creating = threading.Lock()
        self.files = Files(self)

    @classmethod
    def create(
        cls,
        *,
        home: str | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
        **options: Unpack[CreateOptions],
    ) -> Self:
        """A new sandbox, running. Destroy it when done, or use it in `with`."""
        sandbox = cls(home=home, endpoint=endpoint, api_key=api_key, **options)
        sandbox._target()
        return sandbox

    @classmethod
    def connect(
        cls, ref: str, *, home: str | None = None, endpoint: str | None = None, api_key: str | None = None
    ) -> Self:
        """An existing sandbox by id, name or alias. Leaving its context does not destroy it."""
        sandbox = cls(home=home, endpoint=endpoint, api_key=api_key)
        found = sandbox._link.call(calls.info(ref))
        sandbox._ref, sandbox._owned = found["id"], False
        return sandbox

    @classmethod
    def list(
        cls,
        *,
        state: str = "active",
        name: str | None = None,
        home: str | None = None,
        endpoint: str | None = None,
        api_key: str | None = None,
    ) -> builtins.list[SandboxInfo]:
        """The caller's sandboxes: `active`, `all`, `running`, `stopped` or `ended` ones."""
        link = open_link(home, endpoint, api_key)
        try:
            answer = link.call(calls.list_sandboxes(state, name))
        finally:
            link.close()
        return [SandboxInfo(item) for item in answer["sandboxes"]]

    def __enter__(self) -> Self:
        self._target()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._owned:
                self.destroy()
        finally:
            self.close()

    @property
    def id(self) -> str:
        """The sandbox's id; asking for it creates the sandbox if need be."""
        return self._target()[0]

    def _target(self) -> tuple[str, Link]:
        if self._ref is None:
            with self._creating:
                if self._ref is None:  # of several users at once, the first creates
                    made = self._link.call(calls.create(self._options))
                    self._ref = str(made["id"])
        return self._ref, self._link

    def info(self) -> SandboxInfo:
        ref, link = self._target()
        return SandboxInfo(link.call(calls.info(ref)))

    def destroy(self) -> None:
        """End it and all that runs in it. Doing so twice is harmless."""
        if self._ref is None:
            return
        with suppress(SandboxGone, NotFound):
            self._link.call(calls.destroy(self._ref))

    def close(self) -> None:
        """Close this object's connections; the sandbox lives on."""
        self._link.close()

    def restart(self) -> SandboxInfo:
        """Start a stopped sandbox again."""
        return self._lifecycle("start")

    def stop(self) -> SandboxInfo:
        """End its processes, keep its disk."""
        return self._lifecycle("stop")

    def pause(self) -> SandboxInfo:
        """Freeze every process in it."""
        return self._lifecycle("pause")

    def resume(self) -> SandboxInfo:
        """Thaw what pause froze."""
        return self._lifecycle("resume")

    def extend(self, lifetime: float | None = None, *, idle_timeout: float | None = None) -> SandboxInfo:
        """Move its end: so many seconds from now, and so many without use."""
        return self._lifecycle("extend", {"lifetime_s": lifetime, "idle_timeout_s": idle_timeout})

    def _lifecycle(self, verb: str, fields: Mapping[str, Any] | None = None) -> SandboxInfo:
        ref, link = self._target()
        return SandboxInfo(link.call(calls.lifecycle(ref, verb, fields)))

    def allow_hosts(
        self, hosts: Sequence[str] | None = None, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> builtins.list[str]:
        """Change at once what it may reach: another list ([] is no host), or more, or less; nothing: the default list."""
        ref, link = self._target()
        return [str(host) for host in link.call(calls.change_hosts(ref, hosts, add, remove))["hosts"]]

    def expose(self, port: int, *, host: str = "127.0.0.1") -> str:
        """A URL for a port inside, HTTP and WebSockets; whoever has it needs nothing else."""
        ref, link = self._target()
        return str(link.call(calls.expose(ref, port, host))["url"])

    def unexpose(self, port: int) -> bool:
        """Take the URL away; false when there was none."""
        ref, link = self._target()
        return bool(link.call(calls.unexpose(ref, port))["ok"])

    def exposed(self) -> builtins.list[dict[str, Any]]:
        """Ports that have a URL: port, host, url, site_url and started_at of each."""
        ref, link = self._target()
        return builtins.list(link.call(calls.get(calls.sandbox_path(ref, "exposures")))["exposures"])

    def run(
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
        ref, link = self._target()
        call = calls.start(
            ref, code, language=language, args=args, cwd=cwd, env=env, stdin=stdin, timeout=timeout,
            output_limit=output_limit,
        )  # fmt: skip
        return ExecResult(link.call(call))

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        umask: int | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = calls.DEFAULT_TIMEOUT,
        output_limit: int | None = None,
    ) -> ExecResult:
        """Run a program (a list) or a shell line (a string) and wait."""
        ref, link = self._target()
        call = calls.start(
            ref, command, cwd=cwd, env=env, user=user, umask=umask, stdin=stdin, timeout=timeout,
            output_limit=output_limit,
        )  # fmt: skip
        return ExecResult(link.call(call))

    def stream(
        self, command: str | Sequence[str], **options: Unpack[StartOptions]
    ) -> Iterator[Started | Output | Event | ExecResult]:
        """Run and give the output as it comes; the last item is the ExecResult. Closing the iterator kills the command.

        With `language` the command is code.
        """
        ref, link = self._target()
        exchange = link.open(calls.start(ref, command, frames=True, **options))
        try:
            yield from _values(exchange)
        finally:
            exchange.close()

    def start(self, command: str | Sequence[str], **options: Unpack[StartOptions]) -> "Command":
        """Start without waiting; with `language` the command is code. It goes on when this program ends."""
        ref, link = self._target()
        options.setdefault("timeout", None)
        call = calls.start(ref, command, background=True, **options)
        started = link.call(call)
        return Command(self, str(started["command_id"]), started.get("pid"))

    def command(self, command_id: str) -> "Command":
        """A handle on a command that was started earlier, by anyone who may use this sandbox."""
        ref, link = self._target()
        found = link.call(calls.poll(ref, command_id))
        return Command(self, str(found["command_id"]), found.get("pid"))

    def commands(self) -> builtins.list[CommandInfo]:
        ref, link = self._target()
        answer = link.call(calls.get(calls.sandbox_path(ref, "commands")))
        return [CommandInfo(item) for item in answer["commands"]]

    def processes(self) -> builtins.list[ProcessInfo]:
        """What runs inside now."""
        ref, link = self._target()
        answer = link.call(calls.get(calls.sandbox_path(ref, "processes")))
        return [ProcessInfo(item) for item in answer["processes"]]

    def pty(
        self,
        command: str | Sequence[str] = ("bash", "-l"),
        *,
        rows: int = 24,
        cols: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> "Pty":
        """A command on a terminal. Closing the Pty kills it."""
        ref, link = self._target()
        call = calls.start(
            ref, command, cwd=cwd, env=env, user=user, timeout=timeout, pty=(rows, cols), stdin_stream=True, frames=True
        )
        exchange = link.open(call)
        exchange.raise_for_status()
        return Pty(self, str(call.command_id), exchange)

    def forward(self, port: int) -> Tunnel:
        """One TCP connection to a port inside."""
        ref, link = self._target()
        return open_tunnel(link, ref, port)

    def log(self, *, offset: int | None = None, limit: int | None = None) -> dict[str, Any]:
        """A window of the transcript: output, offset, next_offset, eof."""
        ref, link = self._target()
        query = {"offset": offset, "limit": limit}
        answer: dict[str, Any] = link.call(calls.get(calls.sandbox_path(ref, "log"), query))
        return answer

    def events(self, *, limit: int | None = None, after: int | None = None) -> builtins.list[dict[str, Any]]:
        """What happened to the sandbox, oldest first."""
        ref, link = self._target()
        answer = link.call(calls.get(calls.sandbox_path(ref, "events"), {"limit": limit, "after": after}))
        return list(answer["events"])


class Command:
    """A command that runs, or ran, in the background."""

    def __init__(self, sandbox: Sandbox, command_id: str, pid: int | None = None) -> None:
        self._sandbox = sandbox
        self.id = command_id
        self.pid = pid

    def poll(self, *, stdout_from: int | None = None, stderr_from: int | None = None) -> CommandInfo:
        """Its state now, with the output kept so far (from the given offsets)."""
        ref, link = self._sandbox._target()
        return CommandInfo(link.call(calls.poll(ref, self.id, stdout_from, stderr_from)))

    def attach(self, *, stdout: int = 0, stderr: int = 0) -> Iterator[Started | Output | Event | ExecResult]:
        """Its output from these offsets on, then the ExecResult. Closing the iterator does not harm the command."""
        ref, link = self._sandbox._target()
        exchange = link.open(calls.attach(ref, self.id, stdout, stderr))
        try:
            yield from _values(exchange)
        finally:
            exchange.close()

    def wait(self) -> ExecResult:
        """Wait for its end; `stdout` and `stderr` are what was kept of them."""
        seen = self.poll()
        while seen.running:
            for _ in self.attach(stdout=seen.stdout_bytes, stderr=seen.stderr_bytes):
                pass
            seen = self.poll()
        return ExecResult(seen.wire)

    def output(self) -> str:
        """What it has written to stdout so far, as far as it is kept."""
        return self.poll().stdout

    def stdin(self, data: bytes | str, *, eof: bool = False) -> None:
        """Write to its standard input (it must have been started with `stdin_stream=True`)."""
        ref, link = self._sandbox._target()
        link.call(calls.send_stdin(ref, self.id, data.encode() if isinstance(data, str) else data, eof))

    def signal(self, number: int, *, group: str | None = None) -> None:
        ref, link = self._sandbox._target()
        link.call(calls.signal(ref, self.id, number, group))

    def kill(self) -> None:
        """End it with everything it started."""
        ref, link = self._sandbox._target()
        link.call(calls.kill(ref, self.id))


class Pty:
    """A terminal inside the sandbox: iterate for its output, `result` is set at the end."""

    def __init__(self, sandbox: Sandbox, command_id: str, exchange: Exchange) -> None:
        self._sandbox = sandbox
        self._exchange = exchange
        self._values = _values(exchange)
        self.id = command_id
        self.result: ExecResult | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[bytes]:
        return self._output()

    def _output(self) -> Iterator[bytes]:
        for value in self._values:
            if isinstance(value, Output):
                yield value.data
            elif isinstance(value, ExecResult):
                self.result = value

    def write(self, data: bytes | str) -> None:
        """Type something."""
        ref, link = self._sandbox._target()
        link.call(calls.send_stdin(ref, self.id, data.encode() if isinstance(data, str) else data))

    def resize(self, rows: int, cols: int) -> None:
        ref, link = self._sandbox._target()
        link.call(calls.resize(ref, self.id, rows, cols))

    def wait(self) -> ExecResult:
        """Read on to the end and return how it ended."""
        for _ in self:
            pass
        if self.result is None:
            raise FailedPrecondition("the terminal was closed before it ended")
        return self.result

    def kill(self) -> None:
        ref, link = self._sandbox._target()
        link.call(calls.kill(ref, self.id))

    def close(self) -> None:
        """Let go of it; what still runs on it is killed."""
        self._values.close()
        self._exchange.close()


def _values(exchange: Exchange) -> Generator[Started | Output | Event | ExecResult, None, None]:
    try:
        exchange.raise_for_status()
        for value in exchange.frames():
            yield ExecResult(value) if isinstance(value, dict) else value
    finally:
        exchange.close()
