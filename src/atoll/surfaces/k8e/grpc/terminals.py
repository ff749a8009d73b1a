"""Terminals: a command with a pty that outlives its viewers, until it is destroyed or ends by itself."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from atoll.core import Core
from atoll.core.access.principals import Principal
from atoll.errors import FailedPrecondition, InvalidArgument, NotFound
from atoll.model import Chunk, ExecResult, ExecSpec, convert
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.words import k8e as words
from atoll.words import k8e_ids as ids

from .calls import user_inside
from .execution import exit_code_of
from .sessions import check_env

ROWS, COLS = 24, 80
GRACE_MS, MAX_GRACE_MS = 5000, 60_000
_SIGNALS = {1: signal.SIGINT, 2: signal.SIGTERM, 3: signal.SIGKILL, 4: signal.SIGTSTP, 5: signal.SIGHUP}


class Terminals:
    core: Core

    async def CreateTerminal(self, who: Principal, request: Any) -> Any:
        ref = ids.session_ref(request.session_id)
        if not request.argv:
            raise InvalidArgument("argv is required")
        check_env(request.env)
        fields: dict[str, object] = {
            "argv": list(request.argv),
            "env": dict(request.env),
            "pty": {"rows": size(request.rows, ROWS), "cols": size(request.cols, COLS)},
            "background": True,
            "timeout_ms": 0,
        }
        if request.workdir:
            fields["cwd"] = request.workdir
        if user := user_inside():
            fields["user"] = user
        started = await self.core.commands.background(who, ref, convert(ExecSpec, fields))
        if started.pid is None:
            raise FailedPrecondition(f"{request.argv[0]!r:.120} could not be started")
        return pb.CreateTerminalResponse(
            terminal_id=words.terminal_id(started.sandbox_id, started.command_id), pid=started.pid
        )

    async def TerminalStream(self, who: Principal, request: Any) -> AsyncIterator[Any]:
        """All output kept so far, then what comes; a viewer that leaves changes nothing."""
        sandbox, command = ids.parse_terminal(request.terminal_id)
        async with aclosing(self.core.commands.attach(who, sandbox, command)) as items:  # type: ignore[type-var]
            async for item in items:
                if isinstance(item, Chunk):
                    yield pb.TerminalStreamResponse(data=bytes(item.data))
                elif isinstance(item, ExecResult):
                    yield pb.TerminalStreamResponse(
                        exit=pb.TerminalExit(exit_code=exit_code_of(item), signal=_name(item.signal))
                    )

    async def TerminalWrite(self, who: Principal, request: Any) -> Any:
        sandbox, command = ids.parse_terminal(request.terminal_id)
        await self.core.commands.stdin(who, sandbox, command, request.data, False)
        return pb.TerminalWriteResponse(ok=True)

    async def TerminalResize(self, who: Principal, request: Any) -> Any:
        sandbox, command = ids.parse_terminal(request.terminal_id)
        await self.core.commands.resize(who, sandbox, command, size(request.rows, ROWS), size(request.cols, COLS))
        return pb.TerminalResizeResponse(ok=True)

    async def TerminalForeground(self, who: Principal, request: Any) -> Any:
        sandbox, command = ids.parse_terminal(request.terminal_id)
        group = await self.core.commands.foreground(who, sandbox, command)
        return pb.TerminalForegroundResponse(process_group_id=group if abs(group) < 2**31 else -1)

    async def TerminalSignal(self, who: Principal, request: Any) -> Any:
        sandbox, command = ids.parse_terminal(request.terminal_id)
        number = _SIGNALS.get(request.signal)
        if number is None:
            raise InvalidArgument("signal must be INT, TERM, KILL, TSTP or HUP")
        group = await self.core.commands.foreground(who, sandbox, command)
        await self.core.commands.signal(who, sandbox, command, int(number), "foreground")
        return pb.TerminalSignalResponse(process_group_id=group if abs(group) < 2**31 else -1)

    async def TerminalDestroy(self, who: Principal, request: Any) -> Any:
        """TERM, a time to leave, KILL. For one that has ended already there is nothing to do."""
        sandbox, command = ids.parse_terminal(request.terminal_id)
        if not 0 <= request.grace_ms <= MAX_GRACE_MS:
            raise InvalidArgument(f"grace_ms must be 0 (the default) to {MAX_GRACE_MS}")
        commands = self.core.commands
        if (await commands.poll(who, sandbox, command)).status == "running":
            try:
                await commands.signal(who, sandbox, command, int(signal.SIGTERM), "tree")
                async with asyncio.timeout((request.grace_ms or GRACE_MS) / 1000):
                    await self._ended(who, sandbox, command)
            except (TimeoutError, NotFound, FailedPrecondition):
                pass  # it stays, or has just gone: the kill settles both
            await commands.kill(who, sandbox, command)
        return pb.TerminalDestroyResponse(ok=True)

    async def _ended(self, who: Principal, sandbox: str, command: str) -> None:
        async with aclosing(self.core.commands.attach(who, sandbox, command, -1, -1)) as items:  # type: ignore[type-var]
            async for _ in items:
                pass


def size(value: int, default: int) -> int:
    return default if value <= 0 else value


def _name(number: int | None) -> str:
    if not number:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
