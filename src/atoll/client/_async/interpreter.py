"""`AsyncInterpreter`: the code interpreter of an `AsyncSandbox` made from the image `code-interpreter-v1`.

    async with AsyncSandbox(image="code-interpreter-v1") as sandbox:
        interpreter = sandbox.interpreter()
        await interpreter.run("x = 20")
        print((await interpreter.run("x + 1")).text)

The blocking face is generated from this one (scripts/unasync.py).
"""

import builtins
from collections.abc import AsyncIterator, Mapping

from .. import calls
from ..results import CellOutcome, CellResult, CodeContext, Event, Output
from .driver import AsyncLink


class AsyncInterpreters:
    """Mixed into `AsyncSandbox`, which has a target."""

    async def _target(self) -> tuple[str, AsyncLink]:
        raise NotImplementedError

    def interpreter(self) -> "AsyncInterpreter":
        """Return the interpreter of this sandbox. Nothing is asked before its first use."""
        return AsyncInterpreter(self)


class AsyncInterpreter:
    """Runs cells in Jupyter kernels: python, javascript, typescript, bash. Variables stay from cell to cell."""

    def __init__(self, sandbox: AsyncInterpreters) -> None:
        self._sandbox = sandbox

    async def run(
        self,
        code: str,
        *,
        language: str | None = None,
        context: CodeContext | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = 300.0,
        output_limit: int | None = None,
    ) -> CellOutcome:
        """Run a cell, wait, and return all that it showed. A cell that fails raises nothing: see `error` of the outcome.

        Args:
            code: what to run.
            language: python (the default), javascript, typescript or bash, in that language's default context.
            context: a context of its own, in place of a language.
            env: variables of this cell alone.
            timeout: seconds after which it is interrupted; the outcome says `timed_out`. None: never.
            output_limit: bytes of all that it may show; more is dropped, and the outcome says so. None: 16 MiB.
        """
        ref, link = await self._sandbox._target()
        call = calls.run_cell(ref, code, language, _id(context), env, timeout, output_limit)
        return CellOutcome(await link.call(call))

    async def stream(
        self,
        code: str,
        *,
        language: str | None = None,
        context: CodeContext | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = 300.0,
    ) -> AsyncIterator[Output | CellResult | CellOutcome]:
        """Run a cell and give what it shows as it comes; the outcome, without that, is the last. Closing the iterator
        interrupts the cell.

        Args:
            code: what to run.
            language: python (the default), javascript, typescript or bash, in that language's default context.
            context: a context of its own, in place of a language.
            env: variables of this cell alone.
            timeout: seconds after which it is interrupted; the outcome says `timed_out`. None: never.
        """
        ref, link = await self._sandbox._target()
        exchange = await link.open(calls.run_cell(ref, code, language, _id(context), env, timeout, frames=True))
        try:
            await exchange.raise_for_status()
            async for value in exchange.frames():
                if isinstance(value, dict):
                    yield CellOutcome(value)
                elif isinstance(value, Output):
                    yield value
                elif isinstance(value, Event) and "result" in value.data:
                    yield CellResult(value.data["result"])
        finally:
            exchange.close()

    async def create_context(self, language: str = "python", *, cwd: str | None = None) -> CodeContext:
        """Start a kernel of its own and return its context.

        Args:
            language: python, javascript, typescript or bash.
            cwd: the directory it starts in. None: /home/user.
        """
        ref, link = await self._sandbox._target()
        return CodeContext(await link.call(calls.create_context(ref, language, cwd)))

    async def contexts(self) -> "builtins.list[CodeContext]":
        """Return the contexts that are open, the default ones too."""
        ref, link = await self._sandbox._target()
        answer = await link.call(calls.get(calls.sandbox_path(ref, "contexts")))
        return [CodeContext(one) for one in answer["contexts"]]

    async def restart_context(self, context: CodeContext | str) -> None:
        """Begin a context anew, without its variables. A cell that runs in it is interrupted."""
        ref, link = await self._sandbox._target()
        await link.call(calls.post(calls.context_path(ref, _id(context) or "", "restart"), {}, repeatable=True))

    async def remove_context(self, context: CodeContext | str) -> None:
        """End a context with its kernel."""
        ref, link = await self._sandbox._target()
        await link.call(calls.Call("DELETE", calls.context_path(ref, _id(context) or ""), repeatable=True))


def _id(context: CodeContext | str | None) -> str | None:
    return context.id if isinstance(context, CodeContext) else context
