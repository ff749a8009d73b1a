"""Running things in a sandbox: wait for them, stream them, leave them in the background, come back to them."""

import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from atoll import accounts, errors
from atoll.accounts import MEMORY, OUTPUT
from atoll.core.access.approval_rules import Gate
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal, new_command_id
from atoll.core.access.secrets import Vault
from atoll.core.commands import languages
from atoll.core.commands.command import Running, info
from atoll.core.commands.history import History
from atoll.core.commands.output import Held, Output, PassedOn
from atoll.core.commands.sessions import ShellCommand, ShellProcess, command_call, directory_of
from atoll.core.sandboxes.state import Live
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.sqlite import Store, StoreFailed
from atoll.core.store.typed import CommandRow, CommandSpec, NewCommand
from atoll.guest import Process, ProgramNotStarted
from atoll.guest.process import ProcessRequest
from atoll.guest.wire import Message
from atoll.model import COMMAND_ID, Chunk, CommandInfo, ExecResult, ExecSpec, Gap, RunSpec, Started

MOST_SPAWNED = 512  # of one sandbox; its agent keeps records of 1024 processes
TERMINALS = 32  # that may run in the background of one sandbox
SHOWN_ARGUMENT = 4096
SHOWN_ARGUMENTS = 16_384  # of all arguments together, in the record of a command

Spec = ExecSpec | RunSpec
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
        self._directory = directory
        directory.mkdir(mode=0o700, exist_ok=True)
        sandboxes.forget_outputs = self._forget_outputs
        self._vault = vault
        self._gate = gate

    # Starting

    @verb("commands.exec")
    async def exec(self, who: Principal, ref: str, spec: Spec) -> ExecResult:
        """Run it and wait. A caller that is cancelled while waiting kills it."""
        live = await self._sandboxes.wake(who, ref)
        repeated = self._repeated(live, spec)
        if repeated is not None:
            return await self._wait_for(live, repeated)
        sealed = await self._admit(who, live, spec)
        running = await self._start(live, spec, sealed, background=False)
        if not running.ended:
            async for _ in running.consume():
                pass
        return running.result()

    @verb("commands.stream")
    async def stream(self, who: Principal, ref: str, spec: Spec) -> AsyncIterator[Started | Chunk | Gap | ExecResult]:
        """Run it and pass on its output as it comes. A slow reader slows the command and nothing else."""
        live = await self._sandboxes.wake(who, ref)
        if self._repeated(live, spec) is not None:
            assert spec.id is not None
            async for item in self.attach(who, ref, spec.id):
                yield item
            return
        sealed = await self._admit(who, live, spec)
        running = await self._start(live, spec, sealed, background=False)
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
        repeated = self._repeated(live, spec)
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
        sealed = await self._admit(who, live, spec)
        running = await self._start(live, spec, sealed, background=True)
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
        sealed = await self._admit(who, live, spec)
        running = await self._start(live, spec, sealed, background=True, output=PassedOn(awaited=True))
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
        output = self._stored_output(sandbox, found)
        try:
            return info(found, output, stdout_from, stderr_from)
        finally:
            _close(output)

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
            stored = self._stored_output(sandbox, found)
            if found["status"] in ("running", "lost") or stored is None:
                raise errors.FailedPrecondition("the output of this command is no longer kept")
            stored.finish()
            output, result = stored, _stored_result(sandbox, found, stored)
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
                _close(output)
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

    # After a restart of the daemon

    async def recover(self, live: Live) -> None:
        """Find the commands of a sandbox that outlived the daemon, and go on recording them."""
        answer = await live.client.request("procs")
        there = {p["id"]: p for p in answer.get("procs") or [] if isinstance(p, dict) and isinstance(p.get("id"), str)}
        rows: list[NewCommand] = [*self._store.running_commands(live.id)]
        for process in there.values():
            if process.get("running") is True and self._store.command(live.id, process["id"]) is None:
                rows.append(self._unrecorded(live, process))
        for row in rows:
            row["background"] = True  # its caller, if it had one, is gone and may come back
            if row["id"] not in there:
                self._store.update_command(live.id, row["id"], status="lost", ended_at=time.time())
                continue
            spawned = row["spec"].get("spawned") is True
            output = (
                PassedOn(awaited=False) if spawned else self._output(live, row["id"], row["spec"].get("kept", 0), True)
            )
            running = Running(live, row, output, self._store, self._history)
            wants_stdin = bool(row["spec"].get("stdin_stream") or row["spec"].get("pty"))
            sizes = {channel: -1 if spawned else kept.size for channel, kept in output.kept.items()}
            running.process = await Process.attach(
                live.client, row["id"], out=sizes[1], err=sizes[2], stdin=wants_stdin
            )
            running.pid = running.process.pid
            live.commands[running.id] = running
            running.task = asyncio.create_task(running.pump())

    def _unrecorded(self, live: Live, process: Message) -> NewCommand:
        """A command that was started in the very moment the daemon was killed: the agent knows it, the store does not."""
        argv = process.get("argv")
        row: NewCommand = {
            "id": process["id"],
            "argv": [str(arg)[:SHOWN_ARGUMENT] for arg in argv[:64]] if isinstance(argv, list) else [],
            "language": None,
            "background": True,
            "body": "",
            "spec": {"kept": 1024 * 1024, "stdin_stream": False, "cleanup": None, "pty": process.get("pty") is True},
            "started_at": time.time(),
        }
        self._store.add_command(live.id, row["id"], row)
        return row

    # Inside

    async def _admit(self, who: Principal, live: Live, spec: Spec) -> str | None:
        """Wait for a person where a rule of the sandbox says so. The seal of what was approved, if somebody had to."""
        if not live.spec.require_approval:
            return None
        sealed = await self._gate.command(who, live, spec)
        if live.state != "running":
            raise live.not_running()
        if self._repeated(live, spec) is not None:  # it was asked twice, and both waited
            raise errors.AlreadyExists(f"there is a command {spec.id!r} already")
        return sealed

    async def _start(
        self, live: Live, spec: Spec, sealed: str | None, *, background: bool, output: PassedOn | None = None
    ) -> Running:
        if sealed is not None:
            self._gate.check(live, spec, sealed)
        command = spec.id or new_command_id()
        cwd = spec.cwd or live.spec.workdir
        call: languages.Call | None = None
        if isinstance(spec, ShellCommand):
            call, cwd = command_call(spec, command), "/"
        elif isinstance(spec, RunSpec):
            call = languages.call(spec, command, cwd)
        kept = spec.kept
        row: NewCommand = {
            "id": command,
            "argv": _shown_argv(spec),
            "language": call.language.name if call else None,
            "background": background,
            "body": _body(spec),
            "spec": {"kept": kept, "stdin_stream": spec.stdin_stream, "cleanup": call.path if call else None,
                     **_kind(spec), **({"kept": 0, "spawned": True} if output else {})},
            "started_at": time.time(),
        }  # fmt: skip
        if command in live.commands:
            raise errors.AlreadyExists(f"there is a command {command!r} already")
        running = Running(
            live, row, output or self._output(live, command, kept, background), self._store, self._history
        )
        live.commands[command] = running

        def sent() -> None:
            """While the agent starts it: written before its start is known, and no later than any of its output."""
            if not running.recorded:
                running.recorded = True
                self._store.add_command(live.id, command, row)

        try:
            with live.use() as client:
                if call is not None and call.path is not None:
                    await client.upload("write", call.code, path=call.path, mode=0o600, create="new", user=call.user)
                process = await self._process(live, command, spec, call, cwd, sent)
            running.begin(process, spec.stdin_bytes())
        except ProgramNotStarted as refused:
            running.never_started(refused)
        except BaseException as error:
            live.commands.pop(command, None)
            with suppress(StoreFailed):  # the first error is the one to tell
                if isinstance(error, errors.OutcomeUnknown | errors.SandboxGone):
                    self._store.update_command(live.id, command, status="lost", ended_at=time.time())
                else:
                    self._store.drop_command(live.id, command)
            raise
        return running

    def _output(self, live: Live, command: str, kept: int, background: bool) -> Output:
        grant = self._grant(live.id, live.owner) if background else None
        held = None if background else self._held(live)
        return Output(kept, self._directory / live.id if background else None, command, grant, held)

    async def _process(
        self,
        live: Live,
        command: str,
        spec: Spec,
        call: languages.Call | None,
        cwd: str,
        sent: Callable[[], None],
    ) -> Process:
        request: ProcessRequest = {"cwd": cwd, "timeout_ms": spec.limit_ms or None}
        if spec.stdin is not None or spec.stdin_b64 is not None or spec.stdin_stream:
            request["stdin"] = True
        if call is not None:
            request |= {"argv": call.argv, "env": call.env or None, "user": call.user}
        else:
            assert isinstance(spec, ExecSpec)
            request |= {
                "argv": spec.argv,
                "shell": spec.command,
                "env": spec.env or None,
                "user": spec.user,
                "umask": spec.umask,
            }
            if spec.merge_stderr:
                request["merge_stderr"] = True
            if spec.pty is not None:
                request["pty"] = {k: v for k, v in msgspec.to_builtins(spec.pty).items() if v is not None}
                request["stdin"] = True
        if live.spec.secrets:
            values = self._vault.resolve(live.owner, live.spec.secrets)
            self._history.mask(live.id, values.values())
            request["env"] = {**(request.get("env") or {}), **values}
        try:
            return await Process.start(live.client, command, request, sent)
        except ProgramNotStarted:
            if call is None or call.language is not languages.BASH or isinstance(spec, ShellCommand):
                raise
            request["argv"] = ["/bin/sh", *call.argv[1:]]  # an image without bash
            return await Process.start(live.client, command, request, sent)

    def _repeated(self, live: Live, spec: Spec) -> Running | CommandRow | None:
        """The first run, when a caller asks again because the answer was lost; another request with its id is refused."""
        if spec.id is None:
            return None
        running = live.commands.get(spec.id)
        if running is None and not self._store.knows_command(live.id, spec.id):
            return None
        row = self._store.command(live.id, spec.id) if running is None else None
        body = running.body if running is not None else row["body"] if row is not None else ""
        if body != _body(spec):
            raise errors.AlreadyExists(f"there is another command {spec.id!r} already")
        return running or row

    async def _wait_for(self, live: Live, repeated: Running | CommandRow) -> ExecResult:
        if isinstance(repeated, Running):
            await repeated.done.wait()
            return repeated.result()
        output = self._stored_output(live.id, repeated)
        if output is None or not repeated["exit"]:
            raise errors.AlreadyExists(
                f"command {repeated['id']!r} has run before and its output is no longer kept",
                details={"status": repeated["status"], **(repeated["exit"] or {})},
            )
        try:
            return _stored_result(live.id, repeated, output)
        finally:
            _close(output)

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

    def _stored_output(self, sandbox: str, row: CommandRow) -> Output | None:
        """The output of a background command that ended some time ago."""
        directory = self._directory / sandbox
        if not row["exit"] or not (directory / f"{row['id']}.1").exists():
            return None
        output = Output(row["spec"].get("kept", 0), directory, row["id"])
        output.kept[1].total = max(output.kept[1].total, row["exit"].get("stdout_bytes", 0))
        output.kept[2].total = max(output.kept[2].total, row["exit"].get("stderr_bytes", 0))
        return output

    # What is kept on the host, up to the caps of the sandbox and its owner

    def count_kept(self, sandbox: str, owner: str) -> None:
        """Charge what an earlier daemon kept; what is beyond the caps goes, the oldest first."""
        held = [(path, path.stat().st_size) for path in self._kept_files(sandbox)]
        for path, size in reversed(held):
            try:
                self._sandboxes.accounts.charge(OUTPUT, size, accounts.sandbox(sandbox), accounts.owner(owner))
            except errors.Exhausted:
                path.unlink(missing_ok=True)

    def _kept_files(self, sandbox: str) -> Iterable[Path]:
        """Oldest first."""
        with suppress(FileNotFoundError):
            found = [(entry.stat().st_mtime, entry.path) for entry in os.scandir(self._directory / sandbox)]
            return [Path(path) for _, path in sorted(found)]
        return []

    def _grant(self, sandbox: str, owner: str) -> Callable[[int], int]:
        """Asks for room for output. Output of commands that ended longest ago makes room; if that is not enough, it is cut."""
        holders = (accounts.sandbox(sandbox), accounts.owner(owner))

        def grant(wanted: int) -> int:
            if self._sandboxes.space.left_lately() < wanted:
                return 0
            while True:
                try:
                    self._sandboxes.accounts.charge(OUTPUT, wanted, *holders)
                    return wanted
                except errors.Exhausted:
                    if not self._drop_oldest(sandbox, holders):
                        return 0

        return grant

    def _held(self, live: Live) -> Held:
        """The account of one foreground command's output. What ended longest ago makes room for it."""
        holders = (accounts.sandbox(live.id), accounts.owner(live.owner))
        return Held(self._sandboxes.accounts.lease(MEMORY, 0, *holders), live.forget_oldest)

    def _drop_oldest(self, sandbox: str, holders: tuple[accounts.Holder, ...]) -> bool:
        """Remove the output of the command that ended longest ago; False when there is none."""
        live = next((live for live in self._sandboxes.live.values() if live.id == sandbox), None)
        running = {c.id for c in live.commands.values() if not c.ended} if live is not None else set()
        for path in self._kept_files(sandbox):
            size = path.stat().st_size
            if path.stem not in running and size:
                path.unlink(missing_ok=True)
                self._sandboxes.accounts.release(OUTPUT, size, *holders)
                return True
        return False

    def _forget_outputs(self, sandbox: str) -> None:
        shutil.rmtree(self._directory / sandbox, ignore_errors=True)


def _stored_result(sandbox: str, row: CommandRow, output: Output) -> ExecResult:
    from atoll.model import shown

    (stdout, stdout_b64), (stderr, stderr_b64) = shown(output.kept[1].first()), shown(output.kept[2].first())
    summary = row["exit"]
    assert summary is not None
    return ExecResult(
        command_id=row["id"],
        sandbox_id=sandbox,
        stdout=stdout,
        stderr=stderr,
        stdout_b64=stdout_b64,
        stderr_b64=stderr_b64,
        truncated=summary["stdout_truncated"] or summary["stderr_truncated"],
        **summary,
    )


def _gap(channel: int, start: int, end: int) -> Gap:
    return Gap(stream="stdout" if channel == 1 else "stderr", offset=start, bytes=end - start)


def _close(output: Output | None) -> None:
    if output is not None:
        for kept in output.kept.values():
            kept.close()


def _kind(spec: Spec) -> CommandSpec:
    """What of the request decides later how its command is treated."""
    if isinstance(spec, ShellProcess):
        return {"opens": spec.opens, "user": spec.user, "cleanup": directory_of(spec.id or "")}
    if isinstance(spec, ShellCommand):
        return {"shell": spec.shell}
    return {"pty": True} if isinstance(spec, ExecSpec) and spec.pty is not None else {}


def _shown_argv(spec: Spec) -> list[str]:
    if isinstance(spec, ShellProcess):
        words = [spec.opens]
    elif isinstance(spec, RunSpec):
        words = [spec.code, *spec.args[:64]]
    else:
        words = spec.argv[:64] if spec.argv is not None else [spec.command or ""]
    shown: list[str] = []
    left = SHOWN_ARGUMENTS
    for word in words:
        shown.append(word[: min(left, SHOWN_ARGUMENT)])
        left -= len(shown[-1])
        if left <= 0:
            break
    return shown


def _body(spec: Spec) -> str:
    """What tells two requests with the same id apart."""
    if spec.id is None:
        return ""
    return hashlib.sha256(msgspec.msgpack.encode(spec)).hexdigest()
