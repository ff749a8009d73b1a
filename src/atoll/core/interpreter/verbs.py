"""The verbs of the interpreter: run a cell, and list, make, restart and remove contexts.

What the server inside says is hostile. Its lines are read one by one, within bounds and on account; of a line only what
core looks at is decoded, the values that a cell shows are passed on as the JSON they are.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct, UnsetType

from atoll import errors
from atoll.accounts import MEMORY
from atoll.accounts import owner as owner_account
from atoll.accounts import sandbox as sandbox_account
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.files.ports import Ports
from atoll.core.interpreter.serving import PORT, Interpreters
from atoll.core.interpreter.talk import ask, refusal, request
from atoll.core.sandboxes.state import Live
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.model import CellError, CellOutcome, CellResult, Chunk, ContextInfo, NewContext, RunCell

MOST_CONTEXTS = 1000
PRINTED = {"stdout": 1, "stderr": 2}
Item = Chunk | Mapping[str, object] | CellOutcome
T = TypeVar("T")


class _Kind(Struct):
    type: str


class _Printed(Struct):
    text: str


EACH = 256  # bytes that a shown value takes beside its line


class _Counted(Struct):
    execution_count: int | None = None


class Interpreter(Part):
    """Cells in the sandboxes of the interpreter's image."""

    def __init__(self, sandboxes: Sandboxes, ports: Ports, servers: Interpreters) -> None:
        self._sandboxes = sandboxes
        self._ports = ports
        self._servers = servers

    @verb("interpreter.run")
    async def run(self, who: Principal, ref: str, asked: RunCell) -> CellOutcome:
        """Run a cell and wait; all that it shows is in the outcome."""
        live = await self._servers.ready(who, ref)
        printed: dict[int, list[bytes]] = {1: [], 2: []}
        results: list[CellResult] = []
        async with aclosing(self._follow(who, live, asked)) as items:
            async for item in items:
                if isinstance(item, Chunk):
                    printed[item.channel].append(item.data)
                elif isinstance(item, CellResult):
                    results.append(item)
                else:
                    item.results = results
                    item.stdout, item.stderr = (b"".join(printed[at]).decode("utf-8", "replace") for at in (1, 2))
                    return item
        raise errors.OutcomeUnknown("the interpreter ended without an outcome")

    @verb("interpreter.run")
    async def stream(self, who: Principal, ref: str, asked: RunCell) -> AsyncIterator[Item]:
        """Run a cell and pass on what it shows as it comes; the outcome, without that, comes last. Leaving interrupts it."""
        live = await self._servers.ready(who, ref)
        async with aclosing(self._follow(who, live, asked)) as items:
            async for item in items:
                yield {"result": item} if isinstance(item, CellResult) else item

    @verb("interpreter.contexts")
    async def contexts(self, who: Principal, ref: str) -> list[ContextInfo]:
        """Return the contexts of a sandbox, the default ones too."""
        told = await self._ask(who, ref, "GET", "/contexts")
        return _decoded(told, list[ContextInfo])[:MOST_CONTEXTS]

    @verb("interpreter.create_context")
    async def create_context(self, who: Principal, ref: str, asked: NewContext) -> ContextInfo:
        """Start a kernel of its own."""
        fields = {"language": asked.language, "cwd": asked.cwd}
        return _decoded(await self._ask(who, ref, "POST", "/contexts", msgspec.json.encode(fields)), ContextInfo)

    @verb("interpreter.restart_context")
    async def restart_context(self, who: Principal, ref: str, context: str) -> None:
        """Begin a context anew, without its variables. A cell that runs in it is interrupted."""
        await self._ask(who, ref, "POST", f"/contexts/{_checked(context)}/restart")

    @verb("interpreter.remove_context")
    async def remove_context(self, who: Principal, ref: str, context: str) -> None:
        """End a context with its kernel."""
        await self._ask(who, ref, "DELETE", f"/contexts/{_checked(context)}")

    async def _ask(self, who: Principal, ref: str, method: str, target: str, body: bytes = b"") -> bytes:
        live = await self._servers.ready(who, ref)
        return await ask(self._ports, who, live.id, PORT, method, target, body)

    async def _follow(
        self, who: Principal, live: Live, asked: RunCell
    ) -> AsyncGenerator[Chunk | CellResult | CellOutcome, None]:
        fields = {"code": asked.code, "language": asked.language, "context_id": asked.context, "env_vars": asked.env}
        body = msgspec.json.encode(fields)
        outcome = CellOutcome(sandbox_id=live.id)
        kept, offsets = 0, {1: 0, 2: 0}
        holders = sandbox_account(live.id), owner_account(live.owner)
        end = asyncio.get_running_loop().time() + asked.timeout_ms / 1000 if asked.timeout_ms else None
        with self._sandboxes.accounts.lease(MEMORY, 0, *holders) as held:
            async with request(self._ports, who, live.id, PORT, "POST", "/execute", body) as answer:
                if answer.status != 200:
                    raise refusal(answer.status, await answer.plain())
                async with aclosing(answer.lines(held)) as lines:
                    while True:
                        try:
                            async with asyncio.timeout_at(end):
                                line = await anext(lines, None)
                        except TimeoutError:
                            outcome.timed_out = True
                            break
                        if line is None:
                            raise errors.OutcomeUnknown("the interpreter ended in the middle of a cell")
                        kind = _decoded(line, _Kind).type
                        if kind == "end_of_execution":
                            break
                        if kind == "number_of_executions":
                            outcome.execution_count = _decoded(line, _Counted).execution_count
                        elif kind in PRINTED or kind in ("result", "error"):
                            room = asked.output_limit - kept
                            outcome.truncated = outcome.truncated or len(line) > room
                            if room <= 0 or (len(line) > room and kind not in PRINTED):
                                continue  # of a value half is nothing
                            size = min(len(line) + (EACH if kind == "result" else 0), room)
                            kept += size
                            held.grow(size)
                            if kind == "error":
                                outcome.error = _decoded(line, CellError)
                            elif kind == "result":
                                yield _decoded(line, CellResult)
                            else:
                                channel = PRINTED[kind]
                                data = _decoded(line, _Printed).text.encode("utf-8", "replace")[:room]
                                yield Chunk(channel, data, offsets[channel])
                                offsets[channel] += len(data)
            yield outcome


def text_of(value: Raw | UnsetType) -> str | None:
    """Return a shown value that is a string; None for one that is not there or is something else."""
    if isinstance(value, UnsetType):
        return None
    try:
        return msgspec.json.decode(value, type=str)
    except (msgspec.DecodeError, ValueError):
        return None


def _checked(context: str) -> str:
    if not (0 < len(context) <= 64 and context.isascii() and context.isalnum()):
        raise errors.NotFound(f"no context {context!r:.80}")
    return context


def _decoded(told: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(told, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise errors.FailedPrecondition(
            "the interpreter in this sandbox says what cannot be understood", hint="end it there, or use a new sandbox"
        ) from None
