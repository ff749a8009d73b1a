"""One command from its start to its recorded end."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Unpack

from atoll import errors
from atoll.core.commands.history import History, Writer
from atoll.core.commands.output import Output, OutputRefused
from atoll.core.sandboxes.state import Live
from atoll.core.store.records import Store
from atoll.core.store.typed import CommandEnd, CommandFacts, CommandSpec, Conclusion, Ended, NewCommand
from atoll.guest import Exit, Process, ProgramNotStarted
from atoll.model import Chunk, CommandInfo, ExecResult, shown

SETTLE = 15.0
TOLD = 2.0  # so long a result waits for the refusals of the network


class Running:
    """A command of a living sandbox, running or recently ended."""

    def __init__(self, live: Live, row: NewCommand, output: Output, store: Store, history: History) -> None:
        self.live = live
        self.id: str = row["id"]
        self.argv: list[str] = row["argv"]
        self.language: str | None = row["language"]
        self.background = bool(row["background"])
        self.started_at: float = row["started_at"]
        self.body: str = row["body"]
        self.spec: CommandSpec = row["spec"]
        self.output = output
        self.process: Process | None = None
        self.pid: int | None = None
        self.recorded = False  # in the store
        self.ended = False
        self.ended_at: float | None = None
        self.error: errors.AtollError | None = None
        self.summary: CommandEnd = {}
        self.lost = False  # its end was not seen
        self.done = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._store = store
        self._history = history
        self._transcript: Writer = history.writer(live.id, self.id)
        self._feeder: asyncio.Task[None] | None = None

    def begin(self, process: Process, stdin: bytes | None) -> None:
        self.process = process
        self.pid = process.pid
        if self.background:
            self._store.update_command(self.live.id, self.id, pid=process.pid)
        self._transcript.asked(" ".join(self.argv))
        if stdin is not None:
            self._feeder = asyncio.create_task(self._feed(process, stdin))

    async def consume(self) -> AsyncIterator[Chunk]:
        """Read it to its end, recording all. A reader that is cancelled here kills the command."""
        process = self.process
        assert process is not None
        try:
            skipped = {1: 0, 2: 0}
            async for channel, data in process:
                if process.missed[channel] > skipped[channel]:
                    self.output.kept[channel].skip(process.missed[channel] - skipped[channel])
                    skipped[channel] = process.missed[channel]
                offset = self.output.kept[channel].total
                self.output.add(channel, data)
                self._transcript.output("o" if channel == 1 else "e", data)
                yield Chunk(channel, data, offset)
                await self.output.room()
            for channel, count in process.missed.items():
                if count > skipped[channel]:
                    self.output.kept[channel].skip(count - skipped[channel])
            assert process.exit is not None
            if (said := await self.finish(process.exit)) is not None:
                yield said
        except OutputRefused:
            raise  # it is killed, and its end is recorded
        except errors.AtollError as error:
            self.fail(error)
            raise
        finally:
            if not self.ended:
                process.leave()
                self.task = asyncio.create_task(self._settle(process))
            if self._feeder is not None:
                self._feeder.cancel()

    async def pump(self) -> None:
        """Read a background command without anybody waiting for it."""
        with contextlib.suppress(errors.AtollError):
            async for _ in self.consume():
                pass

    async def finish(self, ended: Exit) -> Chunk | None:
        """Record the end. What is said about it at the end of stderr, if anything."""
        oom = await self._out_of_memory(ended)
        if ended.code or ended.signal:
            with contextlib.suppress(errors.AtollError, TimeoutError):
                async with asyncio.timeout(TOLD):
                    await self.live.box.traffic()  # then every refusal of its network has been told
        status: Ended = "timed_out" if ended.timed_out else "cancelled" if ended.cancelled else "completed"
        code = ended.code if ended.signal is None else 128 + ended.signal
        if code is None and status == "completed":
            status = "failed"  # its end was not seen
        for channel, total in ((1, ended.out), (2, ended.err)):
            kept = self.output.kept[channel]
            kept.total = max(kept.total, total)
        said = self._say_out_of_memory() if oom else None
        self.conclude(
            status,
            exit_code=code,
            signal=ended.signal,
            timed_out=ended.timed_out,
            oom=oom,
            duration_ms=ended.wall_ms,
            cpu_ms=(ended.user_us + ended.sys_us) // 1000,
            max_rss_kb=ended.max_rss_kb,
        )
        return said

    def _say_out_of_memory(self) -> Chunk:
        """A last line of stderr, and an event: the program itself could say nothing any more."""
        limit = self.live.box.facts.limits.memory_mb
        line = f"atoll: out of memory: a program was killed (the limit is {limit} MB)\n".encode()
        channel = 1 if self.spec.get("pty") else 2
        offset = self.output.kept[channel].total
        self.output.add(channel, line)
        self._transcript.output("o" if channel == 1 else "e", line)
        self._history.record(self.live.id, self.live.owner, "oom", command_id=self.id, limit_mb=limit)
        return Chunk(channel, line, offset)

    def never_started(self, refused: ProgramNotStarted) -> None:
        """The program is missing (127) or not executable (126): a result, as a shell would give it."""
        self._transcript.asked(" ".join(self.argv))
        line = f"atoll: {refused.message}\n".encode("utf-8", "replace")
        self.output.add(2, line)
        self._transcript.output("e", line)
        self.conclude(
            "completed", exit_code=refused.exit_code, signal=None, timed_out=False, oom=False,
            error_code=refused.guest_code,
        )  # fmt: skip

    def conclude(self, status: Ended, **summary: Unpack[Conclusion]) -> None:
        self.ended, self.ended_at = True, time.time()
        kept = self.output.kept
        self.summary = {
            "status": status,
            "duration_ms": int((self.ended_at - self.started_at) * 1000),
            "cpu_ms": 0,
            "max_rss_kb": 0,
            **summary,
            "stdout_bytes": kept[1].total,
            "stderr_bytes": kept[2].total,
            "stdout_truncated": kept[1].truncated,
            "stderr_truncated": kept[2].truncated,
            "blocked": self.live.refused_since(self.started_at),
        }
        self._store.later(self._record)
        self._close()

    def _record(self) -> None:
        status, exit_code = self.summary["status"], self.summary["exit_code"]
        self._store.update_command(
            self.live.id, self.id, status=status, ended_at=self.ended_at, exit=self.summary, pid=self.pid
        )
        self._history.record(
            self.live.id, self.live.owner, "command", command_id=self.id, status=status, exit_code=exit_code,
            duration_ms=self.summary["duration_ms"], oom=self.summary["oom"],
        )  # fmt: skip

    def fail(self, error: errors.AtollError) -> None:
        """No end was seen. If only the daemon is leaving, the next one will find the command again."""
        self.error = error
        self.ended, self.ended_at = True, time.time()
        if not isinstance(self.live.client.over, errors.Unavailable):
            lost = {"status": "lost", "ended_at": self.ended_at}
            self._store.later(lambda: self._store.update_command(self.live.id, self.id, **lost))
        self.lost = True
        self._close()

    def _close(self) -> None:
        self._transcript.close()
        self.output.finish()
        self.output.let_go()
        self.live.touch()
        self.live.finished(self)
        self.done.set()
        if self._feeder is not None:
            self._feeder.cancel()
        path = self.spec.get("cleanup")
        if path and self.live.client.over is None:
            self.task = asyncio.create_task(self._remove(path))

    async def _remove(self, path: str) -> None:
        with contextlib.suppress(errors.AtollError):
            await self.live.client.request("remove", path=path, missing_ok=True, recursive=True)

    async def _settle(self, process: Process) -> None:
        """The caller went away: the agent kills the tree; record how it ended."""
        try:
            async with asyncio.timeout(SETTLE):
                ended = await process.settle()
        except TimeoutError:
            ended = None
        if self.live.client.over is not None and ended is None:
            self.fail(self.live.client.over)
        elif ended is None:
            self.conclude("cancelled", exit_code=None, signal=None, timed_out=False, oom=False)
        else:
            await self.finish(ended)

    async def _feed(self, process: Process, stdin: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, errors.AtollError):
            if stdin:
                await process.write(stdin)
            process.close_stdin()

    async def _out_of_memory(self, ended: Exit) -> bool:
        """Whether the agent killed a program of this command for memory, or the host's own counter says that one was while this
        command was killed."""
        if ended.oom:
            return True
        killed = ended.signal == 9 or ended.code == 137
        if not killed and not (ended.code and self.live.box.capabilities.oom_shows_as_failure):
            return False
        if ended.timed_out or ended.cancelled:
            return False
        try:
            kills = (await self.live.box.usage()).oom_kills
        except (errors.AtollError, OSError):
            return False
        if kills is None or kills <= self.live.oom_kills:
            return False
        self.live.oom_kills = kills
        return True

    # Reports

    def result(self) -> ExecResult:
        if self.error is not None:
            raise self.error
        kept = self.output.kept
        stdout, stdout_b64 = shown(kept[1].first())
        stderr, stderr_b64 = shown(kept[2].first())
        return ExecResult(
            command_id=self.id,
            sandbox_id=self.live.id,
            stdout=stdout,
            stderr=stderr,
            stdout_b64=stdout_b64,
            stderr_b64=stderr_b64,
            truncated=self.summary["stdout_truncated"] or self.summary["stderr_truncated"],
            **self.summary,
        )

    def info(self, stdout_from: int = 0, stderr_from: int = 0, most: int | None = None) -> CommandInfo:
        kept = self.output.kept
        row: CommandFacts = {
            "id": self.id,
            "sandbox_id": self.live.id,
            "background": self.background,
            "spec": self.spec,
            "language": self.language,
            "argv": self.argv,
            "pid": self.pid,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "status": "lost" if self.lost else self.summary.get("status", "running"),
            "exit": self.summary,
        }
        return info(row, self.output if most != 0 else None, stdout_from, stderr_from, (kept[1].total, kept[2].total))


def info(
    row: CommandFacts,
    output: Output | None,
    stdout_from: int = 0,
    stderr_from: int = 0,
    totals: tuple[int, int] | None = None,
) -> CommandInfo:
    """A command from its record, with the output that is kept."""
    summary = row["exit"] or {}
    answer = CommandInfo(
        command_id=row["id"],
        sandbox_id=row["sandbox_id"],
        status=row["status"],
        background=bool(row["background"]),
        pty=bool(row["spec"].get("pty")),
        language=row["language"],
        argv=row["argv"],
        pid=row["pid"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        exit_code=summary.get("exit_code"),
        signal=summary.get("signal"),
        stdout_bytes=totals[0] if totals else summary.get("stdout_bytes", 0),
        stderr_bytes=totals[1] if totals else summary.get("stderr_bytes", 0),
        timed_out=bool(summary.get("timed_out")),
        oom=bool(summary.get("oom")),
        error_code=summary.get("error_code"),
        duration_ms=summary.get("duration_ms") or int(((row["ended_at"] or time.time()) - row["started_at"]) * 1000),
        cpu_ms=summary.get("cpu_ms", 0),
        max_rss_kb=summary.get("max_rss_kb", 0),
    )
    answer.truncated = bool(summary.get("stdout_truncated") or summary.get("stderr_truncated"))
    if output is not None:
        kept = output.kept
        answer.stdout_start, answer.stderr_start = min(stdout_from, kept[1].size), min(stderr_from, kept[2].size)
        answer.stdout, answer.stdout_b64 = shown(kept[1].first(answer.stdout_start))
        answer.stderr, answer.stderr_b64 = shown(kept[2].first(answer.stderr_start))
        answer.truncated = kept[1].truncated or kept[2].truncated
    return answer
