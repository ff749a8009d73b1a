"""`AsyncPty`: a terminal in an `AsyncSandbox`.

    async with await sandbox.pty("top", background=True) as terminal:
        offset = await terminal.detach()
    again = await sandbox.join_pty(terminal.id, offset=offset)

The blocking face is generated from this one (scripts/unasync.py).
"""

import builtins
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Self

from atoll.errors import AtollError, FailedPrecondition

from .. import calls
from ..results import CommandInfo, Event, ExecResult, Output, Started
from .driver import AsyncExchange, AsyncLink


class AsyncTerminals:
    """Mixed into `AsyncSandbox`, which has a target."""

    async def _target(self) -> tuple[str, AsyncLink]:
        raise NotImplementedError

    async def pty(
        self,
        command: str | Sequence[str] = ("bash", "-l"),
        *,
        rows: int = 24,
        cols: int = 80,
        echo: bool = True,
        background: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> "AsyncPty":
        """A command on a terminal. Closing the AsyncPty kills it, unless it is in the background: then it goes on without us.

        Args:
            command: a list is a program with its arguments, a string a shell line.
            rows: lines of the terminal.
            cols: columns of the terminal.
            echo: whether the terminal writes back what is typed.
            background: the terminal outlives its connection and is joined again by `join_pty`.
            cwd: the directory to start in; default is the sandbox's working directory.
            env: variables on top of the sandbox's own.
            user: name or number of the user inside; default is root.
            timeout: seconds until the command is killed; None is no limit.
        """
        ref, link = await self._target()
        call = calls.start(
            ref, command, cwd=cwd, env=env, user=user, timeout=timeout, pty=(rows, cols), echo=echo, stdin_stream=True,
            background=background, frames=not background,
        )  # fmt: skip
        if background:
            await link.call(call)
            return await self.join_pty(str(call.command_id))
        exchange = await link.open(call)
        await exchange.raise_for_status()
        return AsyncPty(self, str(call.command_id), exchange)

    async def join_pty(self, pty_id: str, *, offset: int = 0) -> "AsyncPty":
        """A terminal that runs in the background, with its output from an offset on.

        Args:
            pty_id: the `id` of the AsyncPty that was left.
            offset: bytes of output to leave out, as `detach` returned it; -1 is what comes from now on.
        """
        ref, link = await self._target()
        if offset < 0:
            offset = -1
        exchange = await link.open(calls.attach(ref, pty_id, offset, -1))
        await exchange.raise_for_status()
        return AsyncPty(self, pty_id, exchange, background=True, offset=offset)

    async def ptys(self) -> "builtins.list[CommandInfo]":
        """The terminals that run, whoever opened them."""
        ref, link = await self._target()
        answer = await link.call(calls.get(calls.sandbox_path(ref, "commands")))
        found = [CommandInfo(item) for item in answer["commands"] if item.get("pty")]
        return [terminal for terminal in found if terminal.running]


class AsyncPty:
    """A terminal inside the sandbox: iterate for its output, `result` is set at the end.

    `offset` is where its output goes on after what was read; `lost` counts bytes before that which were no longer kept.
    """

    def __init__(
        self,
        sandbox: AsyncTerminals,
        command_id: str,
        exchange: AsyncExchange,
        *,
        background: bool = False,
        offset: int = 0,
    ) -> None:
        self._sandbox = sandbox
        self._exchange = exchange
        self._values = read_values(exchange)
        self._closed = False
        self.id = command_id
        self.background = background
        self.offset = offset
        self.lost = 0
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
                    self.offset += len(value.data)
                    yield value.data
                elif isinstance(value, Started):
                    self.offset = max(self.offset, value.stdout_start)
                elif isinstance(value, Event):
                    self._note(value)
                else:
                    self.result = value
        except AtollError:
            if not self._closed:  # closed while it was read: the output ends here
                raise

    def _note(self, event: Event) -> None:
        gap = event.data.get("gap")
        if isinstance(gap, dict) and gap.get("stream") == "stdout":
            self.lost += gap["bytes"]
            self.offset = gap["offset"] + gap["bytes"]

    async def write(self, data: bytes | str) -> None:
        """Type something.

        Args:
            data: what to type; text as UTF-8.
        """
        ref, link = await self._sandbox._target()
        await link.call(calls.send_stdin(ref, self.id, data.encode() if isinstance(data, str) else data))

    async def resize(self, rows: int, cols: int) -> None:
        """Tell the programs on it that the terminal has another size.

        Args:
            rows: lines.
            cols: columns.
        """
        ref, link = await self._sandbox._target()
        await link.call(calls.resize(ref, self.id, rows, cols))

    async def wait(self) -> ExecResult:
        """Read on to the end and return the result."""
        async for _ in self:
            pass
        if self.result is None:
            raise FailedPrecondition("the terminal was closed before it ended")
        return self.result

    async def signal(self, number: int, *, group: str = "foreground") -> None:
        """Send a signal to what runs in the foreground of the terminal.

        Args:
            number: of the signal, as in the module `signal`.
            group: another receiver, as for `Command.signal`.
        """
        ref, link = await self._sandbox._target()
        await link.call(calls.signal(ref, self.id, number, group))

    async def kill(self) -> None:
        """End it with everything that runs on it."""
        ref, link = await self._sandbox._target()
        await link.call(calls.kill(ref, self.id))

    async def detach(self) -> int:
        """Let go of a terminal in the background, which goes on; the offset at which `join_pty` continues."""
        if not self.background:
            raise FailedPrecondition(
                "this terminal ends with its connection", hint="open it with background=True to leave it running"
            )
        await self.close()
        return self.offset

    async def close(self) -> None:
        """Let go of it; what still runs on it is killed, unless it is in the background. Whoever reads it meanwhile sees its end."""
        self._closed = True
        self._exchange.interrupt()
        try:
            await self._values.aclose()
        except (RuntimeError, ValueError):
            return  # it is being read: the reader finds the connection closed and lets go of it
        self._exchange.close()


async def read_values(exchange: AsyncExchange) -> AsyncGenerator[Started | Output | Event | ExecResult, None]:
    """The values of a stream, and the connection closed after them."""
    try:
        await exchange.raise_for_status()
        async for value in exchange.frames():
            yield ExecResult(value) if isinstance(value, dict) else value
    finally:
        exchange.close()
