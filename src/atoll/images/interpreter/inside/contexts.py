"""Contexts: a Jupyter kernel each, with a language, a directory and one execution at a time."""

import asyncio
import os
import queue
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from bundle import result_line
from jupyter_client.manager import AsyncKernelManager

LANGUAGES = {"python": "python3", "javascript": "javascript", "typescript": "typescript", "bash": "bash"}
ALIASES = {"py": "python", "python3": "python", "js": "javascript", "ts": "typescript", "sh": "bash"}
MOST = 64  # contexts
READY = 120.0  # seconds a kernel has to answer
HELD = 64 * 1024 * 1024  # bytes of output of one execution that wait for a slow reader; more is dropped
LATE = 5.0  # seconds the last output may come after a kernel says that it is done
LOOK = 1.0

Line = dict[str, Any]


class Refused(Exception):
    """A request that cannot be served: an HTTP status, and a text that says what to do."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def language_of(name: object) -> str:
    """Return the language that a name means."""
    if not isinstance(name, str):
        raise Refused(400, "language must be a string")
    found = ALIASES.get(name.lower(), name.lower())
    if found not in LANGUAGES:
        raise Refused(400, f"the language {name[:40]!r} is not supported; choose one of {', '.join(LANGUAGES)}")
    if found in ("javascript", "typescript") and shutil.which("node") is None:
        raise Refused(400, f"{found} needs the program `node`, which this image does not have")
    return found


class Execution:
    """Output of one cell on its way to who reads it."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[Line | None] = asyncio.Queue()
        self.held = 0
        self.dropped = 0
        self.idle = asyncio.Event()
        self.reply: asyncio.Future[Line] = asyncio.get_running_loop().create_future()

    def add(self, line: Line, size: int) -> None:
        """Keep a line for the reader; beyond the bound it is counted and dropped."""
        if self.held + size > HELD:
            self.dropped += size
            return
        self.held += size
        line["_size"] = size
        self.lines.put_nowait(line)


class Context:
    """A kernel."""

    def __init__(self, language: str, cwd: str, env: dict[str, str]) -> None:
        self.id = secrets.token_hex(16)
        self.language = language
        self.cwd = cwd
        self.env = dict(env)  # what the kernel was started with
        self.turn = asyncio.Lock()
        self.running: dict[str, Execution] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._home = ""

    def shown(self) -> Line:
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def start(self) -> None:
        """Start the kernel and wait until it answers."""
        if not os.path.isdir(self.cwd):
            raise Refused(400, f"cwd: {self.cwd[:200]!r} is not a directory")
        self._home = tempfile.mkdtemp(prefix="kernel-")
        self.manager = AsyncKernelManager(
            kernel_name=LANGUAGES[self.language], transport="ipc", ip=os.path.join(self._home, "k"),
            connection_file=os.path.join(self._home, "connection.json"),
        )  # fmt: skip
        env = {**self.env, "ATOLL_KERNEL": self.language}
        try:
            await self.manager.start_kernel(cwd=self.cwd, env=env, stdout=-3, stderr=-3, stdin=-3)
            self.client = self.manager.client()
            self.client.start_channels(stdin=False, hb=False)
            await self.client.wait_for_ready(timeout=READY)
            await self._await_output()
        except BaseException as error:
            await self.end()
            if isinstance(error, RuntimeError):
                raise Refused(500, f"the {self.language} kernel did not start: {error}") from None
            raise
        self._readers = [asyncio.create_task(self._read_output()), asyncio.create_task(self._read_replies())]

    async def _await_output(self) -> None:
        """Wait until what the kernel prints arrives: it answers before its subscription counts, and says nothing twice."""
        end = asyncio.get_running_loop().time() + READY
        while asyncio.get_running_loop().time() < end:
            asked = self.client.kernel_info()
            with suppress(queue.Empty):
                while True:
                    message = await self.client.get_iopub_msg(timeout=0.5)
                    if message["parent_header"].get("msg_id") == asked:
                        return
        raise RuntimeError("its output does not arrive")

    async def end(self) -> None:
        """End the kernel and everything that it started in its process group."""
        for reader in self._readers:
            reader.cancel()
        self._readers = []
        if hasattr(self, "client"):
            self.client.stop_channels()
        with suppress(Exception):
            await self.manager.shutdown_kernel(now=True)
        shutil.rmtree(self._home, ignore_errors=True)

    async def restart(self) -> None:
        """Begin anew, with no variables."""
        await self.end()
        await self.start()

    async def is_alive(self) -> bool:
        return bool(await self.manager.is_alive())

    async def set_env(self, values: dict[str, str], gone: list[str]) -> None:
        """Change the environment of the kernel, and of what it starts from now on."""
        if not values and not gone:
            return
        if self.language == "python":
            code = (
                f"import os as __o; __o.environ.update({values!r}); [__o.environ.pop(n, 0) for n in {gone!r}]; del __o"
            )
        elif self.language == "bash":
            quoted = [
                f"export {name}='{value.replace(chr(39), chr(39) + chr(92) + chr(39) * 2)}'"
                for name, value in values.items()
            ]
            code = "; ".join([*quoted, *(f"unset {name}" for name in gone)])
        else:
            names = "".join(f"delete process.env[{name!r}];" for name in gone)
            code = f"Object.assign(process.env, {_js(values)}); {names} undefined"
        async for _ in self._execute(code, silent=True):
            pass

    async def run(self, code: str, env: dict[str, str]) -> AsyncIterator[Line]:
        """Execute a cell when the ones before have ended; its lines as they come. Leaving it interrupts the cell."""
        async with self.turn:
            if not await self.is_alive():
                await self.restart()
                yield _printed("stderr", "The kernel had ended and was started again: its variables are lost.\n", None)
            before = {name: self.env[name] for name in env if name in self.env}
            await self.set_env(env, [])
            try:
                async for line in self._execute(code, silent=False):
                    yield line
            finally:
                if env and await self.is_alive():
                    with suppress(Refused):
                        await self.set_env(before, [name for name in env if name not in before])

    async def _execute(self, code: str, *, silent: bool) -> AsyncIterator[Line]:
        message = self.client.execute(code, silent=silent, store_history=not silent, allow_stdin=False)
        execution = self.running[message] = Execution()
        ending = asyncio.create_task(self._await_end(execution))
        try:
            while (line := await execution.lines.get()) is not None:
                execution.held -= line.pop("_size", 0)
                yield line
            if execution.dropped:
                yield _printed(
                    "stderr", f"{execution.dropped} bytes of output were dropped: they were not read in time.\n", None
                )
        finally:
            ending.cancel()
            if not execution.reply.done():
                await asyncio.shield(self._interrupt(execution))
            self.running.pop(message, None)

    async def _await_end(self, execution: Execution) -> None:
        """Close the lines when the kernel has answered and said all, or has died."""
        while not execution.reply.done():
            await asyncio.wait([execution.reply], timeout=LOOK)
            if not execution.reply.done() and not await self.is_alive():
                execution.reply.set_result({})
                execution.lines.put_nowait({
                    "type": "error", "name": "KernelDied", "value": "the kernel has ended; its variables are lost",
                    "traceback": "KernelDied: the kernel has ended; its variables are lost",
                })  # fmt: skip
                break
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(LATE):
                    await execution.idle.wait()
        execution.lines.put_nowait(None)

    async def _interrupt(self, execution: Execution) -> None:
        """Interrupt a cell that nobody waits for any more. One that does not end is ended with its kernel."""
        for _ in range(3):
            with suppress(Exception):
                await self.manager.interrupt_kernel()
            await asyncio.wait([execution.reply], timeout=2.0)
            if execution.reply.done():
                return
        await self.restart()

    async def _read_output(self) -> None:
        while True:
            message = await self.client.get_iopub_msg()
            execution = self.running.get(message["parent_header"].get("msg_id", ""))
            if execution is None:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status":
                if content.get("execution_state") == "idle":
                    execution.idle.set()
                continue
            line = _line_of(kind, content, message["header"].get("date"))
            if line is not None:
                execution.add(line, _size(content))

    async def _read_replies(self) -> None:
        while True:
            message = await self.client.get_shell_msg()
            execution = self.running.get(message["parent_header"].get("msg_id", ""))
            if execution is not None and message["msg_type"] == "execute_reply" and not execution.reply.done():
                execution.reply.set_result(message["content"])


def _line_of(kind: str, content: Line, date: Any) -> Line | None:
    if kind == "stream":
        return _printed(str(content.get("name")), str(content.get("text")), date)
    if kind in ("execute_result", "display_data", "update_display_data"):
        return result_line(content, is_main=kind == "execute_result")
    if kind == "error":
        trace = "\n".join(str(line) for line in content.get("traceback") or ())
        return {
            "type": "error",
            "name": str(content.get("ename")),
            "value": str(content.get("evalue")),
            "traceback": trace,
        }
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": content.get("execution_count")}
    return None


def _printed(name: str, text: str, date: Any) -> Line:
    at = date if isinstance(date, datetime) else datetime.now(UTC)
    return {"type": "stderr" if name == "stderr" else "stdout", "text": text, "timestamp": at.isoformat()}


def _size(value: Any) -> int:
    """Return about how many bytes a message's content takes, without writing it out."""
    size, pending = 256, [value]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict):
            pending.extend(one.values())
            size += 64 * len(one)
        elif isinstance(one, (list, tuple)):
            pending.extend(one)
            size += 16 * len(one)
    return size


def _js(values: dict[str, str]) -> str:
    import json

    return json.dumps(values)


class Contexts:
    """All contexts of this sandbox, and the default one of each language."""

    def __init__(self, home: str, env: dict[str, str]) -> None:
        self._home = home
        self._env = dict(env)
        self._all: dict[str, Context] = {}
        self._default: dict[str, asyncio.Task[Context]] = {}

    def list(self) -> list[Line]:
        return [one.shown() for one in self._all.values()]

    async def create(self, language: object, cwd: object) -> Context:
        """Start a kernel for a new context."""
        chosen = language_of("python" if language is None else language)
        if cwd is not None and (not isinstance(cwd, str) or "\0" in cwd or len(cwd) > 4096):
            raise Refused(400, "cwd must be a path")
        if len(self._all) >= MOST:
            raise Refused(400, f"{MOST} contexts are open already; remove one")
        where = os.path.join(self._home, os.path.expanduser(cwd)) if isinstance(cwd, str) and cwd else self._home
        made = Context(chosen, where, self._env)
        self._all[made.id] = made
        try:
            async with made.turn:
                await made.start()
        except BaseException:
            self._all.pop(made.id, None)
            raise
        return made

    def find(self, context: object) -> Context:
        found = self._all.get(context) if isinstance(context, str) else None
        if found is None:
            raise Refused(404, f"Context {str(context)[:80]!r} not found")
        return found

    async def default(self, language: object = None) -> Context:
        """Return the default context of a language, made when it is first used and again when it was removed."""
        chosen = language_of("python" if language is None else language)
        task = self._default.get(chosen)
        if (
            task is not None
            and task.done()
            and (task.cancelled() or task.exception() or task.result().id not in self._all)
        ):
            task = None
        if task is None:
            task = self._default[chosen] = asyncio.create_task(self.create(chosen, None))
        return await asyncio.shield(task)

    async def remove(self, context: object) -> None:
        found = self.find(context)
        del self._all[found.id]
        await found.end()

    async def restart(self, context: object) -> None:
        found = self.find(context)
        async with _turn(found):
            found.env = dict(self._env)
            await found.restart()

    async def set_env(self, values: dict[str, str]) -> None:
        """Take the sandbox's variables: they are not known where a kernel is started ahead."""
        self._env.update(values)
        os.environ.update(values)
        for one in list(self._all.values()):
            changed = {name: value for name, value in values.items() if one.env.get(name) != value}
            if changed:
                async with one.turn:
                    await one.set_env(changed, [])
                    one.env.update(changed)

    async def each(self, work: Callable[[Context], Any]) -> None:
        for one in list(self._all.values()):
            await work(one)


class _turn:
    """The turn of a context whose running cell is interrupted for it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        waiting = asyncio.ensure_future(self._context.turn.acquire())
        while not waiting.done():
            for execution in list(self._context.running.values()):
                if not execution.reply.done():
                    with suppress(Exception):
                        await self._context.manager.interrupt_kernel()
            await asyncio.wait([waiting], timeout=2.0)
            if not waiting.done():
                with suppress(Exception):
                    await self._context.manager.signal_kernel(9)

    async def __aexit__(self, *_: object) -> None:
        self._context.turn.release()
