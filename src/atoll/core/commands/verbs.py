"""The verbs of commands: wait for them, stream them, leave them in the background, come back to them, act on them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from atoll import errors
from atoll.core.access.approval_rules import Gate
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal
from atoll.core.access.secrets import Vault
from atoll.core.commands import kept_outputs
from atoll.core.commands.command import Running, info
from atoll.core.commands.history import History
from atoll.core.commands.kept_outputs import KeptOutputs
from atoll.core.commands.output import PassedOn
from atoll.core.commands.sessions import ShellCommand, ShellProcess
from atoll.core.commands.starting import Spec, Starter
from atoll.core.sandboxes.state import Live
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.records import Store
from atoll.core.store.typed import CommandRow
from atoll.guest.wire import Message
from atoll.model import COMMAND_ID, Chunk, CommandInfo, ExecResult, ExecSpec, Gap, Started

MOST_SPAWNED = 512  # of one sandbox; its agent keeps records of 1024 processes
TERMINALS = 32  # that may run in the background of one sandbox

Processes = list[Message]


class Commands(Part):
    """Every command of every sandbox."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        store: Store,
        history: History,
        directory: Path,
        vault: Vault,
        gate: Gate,
    ) -> None:
        self._sandboxes = sandboxes
        self._store = store
        self._history = history
        self.outputs = KeptOutputs(sandboxes, directory)
        self.starter = Starter(store, history, self.outputs, vault, gate)

    # Starting

    @verb("commands.exec")
    async def exec(self, who: Principal, ref: str, spec: Spec) -> ExecResult:
        """Run it and wait. A caller that is cancelled while waiting kills it."""
        live = await self._sandboxes.wake(who, ref)
        repeated = self.starter.repeated(live, spec)
        if repeated is not None:
            return await self._wait_for(live, repeated)
        sealed = await self.starter.admit(who, live, spec)
        running = await self.starter.start(live, spec, sealed, background=False)
        if not running.ended:
            async for _ in running.consume():
                pass
        return running.result()

    @verb("commands.stream")
    async def stream(self, who: Principal, ref: str, spec: Spec) -> AsyncIterator[Started | Chunk | Gap | ExecResult]:
        """Run it and pass on its output as it comes. A slow reader slows the command and nothing else."""
        live = await self._sandboxes.wake(who, ref)
        if self.starter.repeated(live, spec) is not None:
            assert spec.id is not None
            async for item in self.attach(who, ref, spec.id):
                yield item
            return
        sealed = await self.starter.admit(who, live, spec)
        running = await self.starter.start(live, spec, sealed, background=False)
        yield Started(command_id=running.id, sandbox_id=live.id, pid=running.pid)
        if running.ended:
            for channel, kept in running.output.kept.items():
                if data := kept.first():
                    yield Chunk(channel, data, 0)
        else:
            output = running.consume()
            try:
                async for chunk in output:
                    yield chunk
            finally:
                await output.aclose()  # type: ignore[attr-defined]  # it is a generator
        yield running.result()

    @verb("commands.background")
    async def background(self, who: Principal, ref: str, spec: Spec) -> CommandInfo:
        """Start it and let it run without a client."""
        live = await self._sandboxes.wake(who, ref)
        repeated = self.starter.repeated(live, spec)
        if repeated is not None:
            return repeated.info() if isinstance(repeated, Running) else info(repeated, None)
        most = self._sandboxes.config.sandboxes.background_runs
        terminal = (isinstance(spec, ExecSpec) and spec.pty is not None) or isinstance(
            spec, ShellProcess | ShellCommand
        )
        if live.background_runs >= most and not terminal:
            raise errors.Exhausted(
                f"{most} commands run in the background of this sandbox already", hint="wait for one, or kill one"
            )
        if isinstance(spec, ExecSpec) and spec.pty is not None and live.terminals >= TERMINALS:
            raise errors.Exhausted(f"{TERMINALS} terminals are open in this sandbox already", hint="kill one")
        sealed = await self.starter.admit(who, live, spec)
        running = await self.starter.start(live, spec, sealed, background=True)
        if not terminal:
            self._history.record_later(live.id, live.owner, "background", command_id=running.id)
        if not running.ended:
            running.task = asyncio.create_task(running.pump())
        return running.info(most=0)

    @verb("commands.spawn")
    async def spawn(self, who: Principal, ref: str, spec: ExecSpec) -> CommandInfo:
        """Start a command that belongs to no caller. Its output goes to those who attach and is not kept."""
        live = await self._sandboxes.wake(who, ref)
        if sum(1 for one in live.commands.values() if not one.ended) >= MOST_SPAWNED:
            raise errors.Exhausted(f"{MOST_SPAWNED} commands run in this sandbox already", hint="end some")
        sealed = await self.starter.admit(who, live, spec)
        running = await self.starter.start(live, spec, sealed, background=True, output=PassedOn(awaited=True))
        if not running.ended:
            running.task = asyncio.create_task(running.pump())
        return running.info(most=0)

    # Coming back

    @verb("commands.list")
    async def list(self, who: Principal, ref: str) -> list[CommandInfo]:
        row = self._sandboxes.known(who, ref)
        live = self._sandboxes.live.get((who.owner, row["id"]))
        known = live.commands if live else {}
        return [
            known[command["id"]].info(most=0) if command["id"] in known else info(command, None)
            for command in self._store.commands(row["id"])
        ]

    @verb("commands.poll")
    async def poll(
        self, who: Principal, ref: str, command: str, stdout_from: int = 0, stderr_from: int = 0
    ) -> CommandInfo:
        """How it stands, with the output kept from those offsets on."""
        if stdout_from < 0 or stderr_from < 0:
            raise errors.InvalidArgument("offsets must not be negative")
        sandbox, found = self._find(who, ref, command)
        if isinstance(found, Running):
            return found.info(stdout_from, stderr_from)
        output = self.outputs.find(sandbox, found)
        try:
            return info(found, output, stdout_from, stderr_from)
        finally:
            kept_outputs.close(output)

    @verb("commands.attach")
    async def attach(
        self, who: Principal, ref: str, command: str, stdout: int = 0, stderr: int = 0
    ) -> AsyncIterator[Started | Chunk | Gap | ExecResult]:
        """Its output from those offsets (-1: from now on) and its result; what of it is no longer kept is told. Going away does not
        touch it."""
        sandbox, found = self._find(who, ref, command)
        running: Running | None = None
        if isinstance(found, Running):
            running, output, result = found, found.output, None
        else:
            stored = self.outputs.find(sandbox, found)
            if found["status"] in ("running", "lost") or stored is None:
                raise errors.FailedPrecondition("the output of this command is no longer kept")
            stored.finish()
            output, result = stored, kept_outputs.result_of(sandbox, found, stored)
        at = {c: output.kept[c].total if start < 0 else start for c, start in ((1, stdout), (2, stderr))}
        pid = found.pid if isinstance(found, Running) else found["pid"]
        yield Started(command_id=command, sandbox_id=sandbox, pid=pid, stdout_start=at[1], stderr_start=at[2])
        try:
            async for channel, offset, data in output.follow(at):
                if offset > at[channel]:
                    yield _gap(channel, at[channel], offset)
                at[channel] = offset + len(data)
                yield Chunk(channel, data, offset)
            if running is not None:
                await running.done.wait()
                result = running.result()
            assert result is not None
            for channel, total in ((1, result.stdout_bytes), (2, result.stderr_bytes)):
                if total > at[channel]:
                    yield _gap(channel, at[channel], total)
        finally:
            if running is None:
                kept_outputs.close(output)
        assert result is not None
        yield result

    # Acting on it

    @verb("commands.stdin")
    async def stdin(self, who: Principal, ref: str, command: str, data: AsyncIterator[bytes] | bytes, eof: bool) -> int:
        """Feed a command that was started with `stdin_stream` or a terminal; the bytes that were taken."""
        running = self._alive(who, ref, command)
        process = running.process
        if process is None or not (running.spec.get("stdin_stream") or running.spec.get("pty")):
            raise errors.FailedPrecondition("this command does not take stdin", hint="start it with stdin_stream")
        written = 0
        try:
            if isinstance(data, bytes):
                await process.write(data)
                written = len(data)
            else:
                async for piece in data:
                    await process.write(piece)
                    written += len(piece)
        except BrokenPipeError:
            raise errors.FailedPrecondition("the command has ended", details={"written": written}) from None
        if eof:
            process.close_stdin()
        return written

    @verb("commands.signal")
    async def signal(self, who: Principal, ref: str, command: str, signal: int, group: str = "tree") -> None:
        running = self._alive(who, ref, command)
        with running.live.use() as client:
            await client.request("signal", id=command, signal=signal, group=group)

    @verb("commands.kill")
    async def kill(self, who: Principal, ref: str, command: str) -> CommandInfo:
        """End it with everything it started; for one that has ended already, just how it ended."""
        _, running = self._find(who, ref, command)
        if not isinstance(running, Running):
            return info(running, None)
        if running.ended:
            return running.info(most=0)
        with running.live.use() as client:
            try:
                await client.request("kill", id=command)
            except errors.NotFound:
                pass  # it has just ended
        try:
            async with asyncio.timeout(30):
                await running.done.wait()
        except TimeoutError:
            pass
        return running.info(most=0)

    @verb("commands.resize")
    async def resize(self, who: Principal, ref: str, command: str, rows: int, cols: int) -> None:
        running = self._alive(who, ref, command)
        if not running.spec.get("pty"):
            raise errors.FailedPrecondition("this command has no terminal")
        with running.live.use() as client:
            await client.request("resize", id=command, rows=rows, cols=cols)

    @verb("commands.foreground")
    async def foreground(self, who: Principal, ref: str, command: str) -> int:
        """The process group in front on its terminal; -1 when unknown."""
        running = self._alive(who, ref, command)
        with running.live.use() as client:
            pgid = (await client.request("foreground", id=command)).get("pgid")
        return pgid if isinstance(pgid, int) else -1

    @verb("commands.processes")
    async def processes(self, who: Principal, ref: str) -> Processes:
        live = await self._sandboxes.wake(who, ref)
        with live.use() as client:
            found = (await client.request("ps")).get("processes")
        return [process for process in found if isinstance(process, dict)] if isinstance(found, list) else []

    # Inside

    async def _wait_for(self, live: Live, repeated: Running | CommandRow) -> ExecResult:
        if isinstance(repeated, Running):
            await repeated.done.wait()
            return repeated.result()
        output = self.outputs.find(live.id, repeated)
        if output is None or not repeated["exit"]:
            raise errors.AlreadyExists(
                f"command {repeated['id']!r} has run before and its output is no longer kept",
                details={"status": repeated["status"], **(repeated["exit"] or {})},
            )
        try:
            return kept_outputs.result_of(live.id, repeated, output)
        finally:
            kept_outputs.close(output)

    def _find(self, who: Principal, ref: str, command: str) -> tuple[str, Running | CommandRow]:
        live = self._sandboxes.live.get((who.owner, ref))
        sandbox: str = live.id if live is not None else self._sandboxes.known(who, ref)["id"]
        live = live or self._sandboxes.live.get((who.owner, sandbox))
        running = live.commands.get(command) if live is not None else None
        if running is not None:
            return sandbox, running
        row = self._store.command(sandbox, command) if COMMAND_ID.match(command) else None
        if row is None:
            raise errors.NotFound(f"no command {command!r:.80}")
        return sandbox, row

    def _alive(self, who: Principal, ref: str, command: str) -> Running:
        self._sandboxes.reach(who, ref)
        _, running = self._find(who, ref, command)
        if not isinstance(running, Running) or running.ended:
            raise errors.FailedPrecondition("the command has ended")
        return running


def _gap(channel: int, start: int, end: int) -> Gap:
    return Gap(stream="stdout" if channel == 1 else "stderr", offset=start, bytes=end - start)
