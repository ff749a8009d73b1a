"""atoll's own tool: a terminal that stays open between calls, for programs that ask, draw or edit."""

import asyncio
from contextlib import aclosing
from typing import Any

from atoll import errors
from atoll.model import Chunk, ExecResult, ExecSpec, Gap, convert
from atoll.surfaces.mcp import content, tools
from atoll.surfaces.mcp.client import Call, given, tool
from atoll.words import k8e_ids as ids
from atoll.words.terminal import SHELL

QUIET = 0.3  # seconds without output after which an answer has all of it
END = 2**53  # an offset beyond all output
SOONEST = 0.05  # seconds in which what is there already is read


@tool("sandbox_terminal")
async def use_terminal(call: Call, asked: tools.UseTerminal) -> content.Result:
    named, terminal = given(asked.session_id), given(asked.terminal_id)
    ref = ids.session_ref(named) if named is not None else await call.client.default_session()
    commands = call.core.commands
    if asked.action == "list":
        found = [one for one in await commands.list(call.who, ref) if one.pty]
        return content.values({"terminals": [_shown(one) for one in found]})
    if asked.action == "open":
        terminal = (await commands.background(call.who, ref, _spec(asked))).command_id
    elif terminal is None:
        raise errors.InvalidArgument(f"terminal_id is needed to {asked.action}")
    elif asked.action == "close":
        ended = await commands.kill(call.who, ref, terminal)
        return content.values({"terminal_id": terminal, "state": ended.status})
    start = 0
    if asked.action in ("resize", "write"):
        start = (await commands.poll(call.who, ref, terminal, END, END)).stdout_bytes  # what comes next answers it
    if asked.action == "resize":
        await commands.resize(call.who, ref, terminal, asked.rows, asked.cols)
    elif asked.action == "write":
        typed = asked.input.encode("utf-8", "surrogatepass")
        await commands.stdin(call.who, ref, terminal, typed, False)
    screen = await _read(call, ref, terminal, given(asked.offset, start), asked.wait)
    return content.values({"terminal_id": terminal, **screen})


def _spec(asked: tools.UseTerminal) -> ExecSpec:
    command = given(asked.command, SHELL)
    fields: dict[str, Any] = {
        "command": command if isinstance(command, str) else None,
        "argv": None if isinstance(command, str) else command,
        "pty": {"rows": asked.rows, "cols": asked.cols, "echo": asked.echo},
        "cwd": given(asked.workdir),
        "user": given(asked.user),
        "env": asked.env,
        "background": True,
        "timeout_ms": 0,
    }
    return convert(ExecSpec, {key: value for key, value in fields.items() if value is not None})


async def _read(call: Call, ref: str, terminal: str, start: int, wait: float) -> dict[str, Any]:
    """Return the output from `start` on, once it pauses, is enough for one answer, or `wait` seconds are over."""
    loop = asyncio.get_running_loop()
    end, got, at, lost = loop.time() + max(wait, SOONEST), bytearray(), start, 0
    done: ExecResult | None = None
    stream = call.core.commands.attach(call.who, ref, terminal, start)
    async with aclosing(stream):  # type: ignore[type-var]  # it is a generator
        while done is None and len(got) < content.KEPT:
            try:
                async with asyncio.timeout_at(min(end, loop.time() + QUIET) if got else end):
                    item = await anext(stream)
            except (TimeoutError, StopAsyncIteration):
                break
            if isinstance(item, Chunk) and item.channel == 1:
                got += item.data
                at = item.offset + len(item.data)
            elif isinstance(item, Gap) and item.stream == "stdout":
                lost += item.bytes
                at = max(at, item.offset + item.bytes)
            elif isinstance(item, ExecResult):
                done = item
    over = max(0, len(got) - content.KEPT)
    raw = bytes(got[: content.KEPT])
    shown = raw if done is not None and not over else content.whole_end(raw)
    fields: dict[str, Any] = {
        "output": shown.decode("utf-8", "replace"),
        "offset": start,
        "next_offset": at - over - (len(raw) - len(shown)),
        "more": bool(over),
        "state": "running" if done is None or over else done.status,
    }
    if lost:
        fields["lost_bytes"] = lost
    if done is not None and not over:
        fields["exit_code"] = done.exit_code
    return fields


def _shown(one: Any) -> dict[str, Any]:
    argv = " ".join(one.argv)
    return {
        "terminal_id": one.command_id,
        "state": one.status,
        "command": "" if SHELL in argv else content.cut(argv, 200),
        "output_bytes": one.stdout_bytes,
    }
