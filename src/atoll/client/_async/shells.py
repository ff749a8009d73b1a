"""`AsyncShell`: a shell session in an `AsyncSandbox`.

    async with await sandbox.shell() as shell:
        await shell.run("cd /tmp && export A=1")
        print((await shell.run("pwd; echo $A")).stdout)

The blocking face is generated from this one (scripts/unasync.py).
"""

import builtins
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Self

from atoll.errors import NotFound, OutcomeUnknown

from .. import calls
from ..results import Event, ExecResult, Output, ShellInfo, Started
from .driver import AsyncLink


class AsyncShells:
    """Mixed into `AsyncSandbox`, which has a target."""

    async def _target(self) -> tuple[str, AsyncLink]:
        raise NotImplementedError

    async def shell(
        self,
        language: str = "bash",
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> "AsyncShell":
        """Open a session in `bash`, `python` or `node`: directory, environment and names stay from command to command."""
        ref, link = await self._target()
        return AsyncShell(self, ShellInfo(await link.call(calls.open_shell(ref, language, cwd, env, user))))

    async def shells(self) -> "builtins.list[AsyncShell]":
        """The sessions that are open; each can be used, whoever opened it."""
        ref, link = await self._target()
        answer = await link.call(calls.get(calls.sandbox_path(ref, "shells")))
        return [AsyncShell(self, ShellInfo(item)) for item in answer["shells"]]


class AsyncShell:
    """A session. Leaving its context closes it."""

    def __init__(self, sandbox: AsyncShells, info: ShellInfo) -> None:
        self._sandbox = sandbox
        self.info = info
        self.id = info.shell_id
        self.ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(NotFound):
            await self.close()

    async def run(
        self,
        command: str,
        *,
        stdin: str | bytes | None = None,
        timeout: float | None = calls.DEFAULT_TIMEOUT,
        output_limit: int | None = None,
    ) -> ExecResult:
        """Run a command in the session, wait, and return its result.

        A command goes on when the connection is lost: it is found again, and not started twice.

        Args:
            command: what to run, in the session's language.
            stdin: its whole standard input.
            timeout: seconds after which it is interrupted, then killed; the session lives if it can. None: never.
            output_limit: bytes kept of stdout and of stderr; more is cut, and the result says so. None: 1 MiB.
        """
        ref, link = await self._sandbox._target()
        call = calls.run_in_shell(ref, self.id, command, stdin, timeout, output_limit)
        try:
            answer = await link.call(call)
        except OutcomeUnknown:
            answer = await link.call(call)  # the same id: the first run is waited for
        self.ended = bool(answer.get("shell_ended"))
        return ExecResult(answer)

    async def stream(
        self, command: str, *, stdin: str | bytes | None = None, timeout: float | None = calls.DEFAULT_TIMEOUT
    ) -> AsyncIterator[Started | Output | Event | ExecResult]:
        """Run a command and give its output as it comes. Closing the iterator leaves the command running.

        Args:
            command: what to run, in the session's language.
            stdin: its whole standard input.
            timeout: seconds after which it is interrupted, then killed; the session lives if it can. None: never.
        """
        ref, link = await self._sandbox._target()
        exchange = await link.open(calls.run_in_shell(ref, self.id, command, stdin, timeout, None, frames=True))
        try:
            await exchange.raise_for_status()
            async for value in exchange.frames():
                if isinstance(value, dict):
                    self.ended = bool(value.get("shell_ended"))
                yield ExecResult(value) if isinstance(value, dict) else value
        finally:
            exchange.close()

    async def interrupt(self) -> None:
        """SIGINT to what runs in it; the session lives."""
        ref, link = await self._sandbox._target()
        await link.call(calls.post(calls.shell_path(ref, self.id, "interrupt"), {}))

    async def close(self) -> None:
        """End it with everything it started."""
        ref, link = await self._sandbox._target()
        await link.call(calls.close_shell(ref, self.id))
        self.ended = True
