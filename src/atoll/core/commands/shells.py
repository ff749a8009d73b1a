"""Shell sessions: open one, run commands in it one after another, interrupt, list, close.

A session is a background command of its sandbox, and so is each command in it: owned, recorded, audited and read again by the
verbs of `Commands`. This part adds their order, the interrupt, and what happens to a session whose command was killed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from weakref import WeakKeyDictionary

import msgspec

from atoll import errors
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.principals import Principal, new_command_id
from atoll.core.commands.command import Running
from atoll.core.commands.sessions import UNSHARED, ShellCommand, process_spec
from atoll.core.commands.verbs import Commands
from atoll.core.sandboxes.state import Live
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.guest import Process
from atoll.guest.process import ProcessRequest
from atoll.model import Chunk, CommandInfo, ExecResult, Gap, OpenShell, ShellInfo, ShellResult, ShellRun, Started

MOST = 16  # sessions of one sandbox
OPENING = 60.0  # seconds until a session must have said that it is ready
INTERRUPTED, KILLED, TOLD = (
    3.0,
    10.0,
    10.0,
)  # seconds to wait: after SIGINT, after SIGKILL, for the last word of a session
LOOK_BACK = 4096


class Shells(Part):
    """Every session of every sandbox. What it knows of them is in their commands, so a restarted daemon knows it too."""

    def __init__(self, sandboxes: Sandboxes, commands: Commands) -> None:
        self._sandboxes = sandboxes
        self._commands = commands
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._starting: WeakKeyDictionary[Running, asyncio.Lock] = WeakKeyDictionary()

    @verb("shells.open")
    async def open(self, who: Principal, ref: str, asked: OpenShell) -> ShellInfo:
        """Start a session and wait until it can be used."""
        live = await self._sandboxes.wake(who, ref)
        if asked.id is None and len(_sessions(live)) >= MOST:
            raise errors.Exhausted(f"{MOST} shells are open in this sandbox already", hint="close one")
        shell = asked.id or new_command_id()
        await self._commands.background(who, ref, process_spec(asked, shell))
        session = self._find(live, shell)
        try:
            async with asyncio.timeout(OPENING):
                ready = await _await_line(session, "ready", 0)
        except TimeoutError:
            ready = False
        if not ready:
            await self._commands.kill(who, ref, shell)
            said = session.output.kept[2].first(0, 2000).decode("utf-8", "replace").strip()
            if session.summary.get("exit_code") == UNSHARED:
                hint = "leave out `user`"
                raise errors.Unsupported("this user cannot have shell sessions in this sandbox", hint=hint)
            if session.summary.get("exit_code") == 127:
                raise errors.Unsupported(f"this image has no {session.spec['opens']}", hint="choose another image")
            raise errors.FailedPrecondition(f"the shell did not start: {said or 'it said nothing'}")
        return _info(session)

    @verb("shells.run")
    async def run(self, who: Principal, ref: str, shell: str, asked: ShellRun) -> ShellResult:
        """Run a command and wait. A caller that goes away leaves it running; it is found again by its id."""
        async for item in self.stream(who, ref, shell, asked):
            if isinstance(item, ShellResult):
                return item
        raise errors.OutcomeUnknown("the command has no result")

    @verb("shells.run")
    async def stream(
        self, who: Principal, ref: str, shell: str, asked: ShellRun
    ) -> AsyncIterator[Started | Chunk | Gap | ShellResult]:
        """Run a command and pass on its output as it comes."""
        command = await self.start(who, ref, shell, asked)
        async for item in self._commands.attach(who, ref, command.command_id):
            if not isinstance(item, ExecResult):
                yield item
                continue
            if (settling := self._settling.get(command.command_id)) is not None:
                await asyncio.shield(settling)
            live = self._sandboxes.live.get((who.owner, command.sandbox_id))
            ended = live is None or all(session.id != shell for session in _sessions(live))
            yield ShellResult(**msgspec.structs.asdict(item), shell_id=shell, shell_ended=ended)

    @verb("shells.run")
    async def start(self, who: Principal, ref: str, shell: str, asked: ShellRun) -> CommandInfo:
        """Start a command and let it run without a client."""
        live = await self._sandboxes.wake(who, ref)
        again = asked.id is not None and asked.id in live.commands
        session = live.commands[shell] if again and shell in live.commands else self._find(live, shell)
        async with self._starting.setdefault(session, asyncio.Lock()):
            return await self._start(who, live, session, asked, again)

    async def _start(self, who: Principal, live: Live, session: Running, asked: ShellRun, again: bool) -> CommandInfo:
        if not again and (busy := _running(session)) is not None:
            raise errors.FailedPrecondition(
                "a command is running in this shell", hint="wait for it, or interrupt it",
                details={"command_id": busy.id},
            )  # fmt: skip
        if not again:
            await self._make_idle(session)
        spec = ShellCommand(
            code=asked.command, language=session.spec["opens"], shell=session.id, user=session.spec.get("user"),
            stdin=asked.stdin, stdin_b64=asked.stdin_b64, timeout_ms=asked.timeout_ms,
            output_limit=asked.output_limit, id=asked.id or new_command_id(), background=True,
        )  # fmt: skip
        told = await self._commands.background(who, live.id, spec)
        running = live.commands.get(told.command_id)
        if running is not None and not again:
            task = self._sandboxes.tasks.spawn(self._settle(session, running))
            self._settling[running.id] = task
            task.add_done_callback(lambda _: self._settling.pop(running.id, None))
        return told

    @verb("shells.interrupt")
    async def interrupt(self, who: Principal, ref: str, shell: str) -> ShellInfo:
        """Send SIGINT to what runs in the session; the session lives. Where nothing runs, nothing is done."""
        session = self._find(await self._sandboxes.wake(who, ref), shell)
        if (running := _running(session)) is not None:
            await self._signal(session, running, "INT")
        return _info(session)

    @verb("shells.list")
    async def list(self, who: Principal, ref: str) -> list[ShellInfo]:
        """The sessions that are open."""
        row = self._sandboxes.known(who, ref)
        live = self._sandboxes.live.get((who.owner, row["id"]))
        return [_info(session) for session in _sessions(live)] if live is not None else []

    @verb("shells.close")
    async def close(self, who: Principal, ref: str, shell: str) -> ShellInfo:
        """End a session with everything it started. Doing so twice is harmless."""
        session = (await self._sandboxes.wake(who, ref)).commands.get(shell)
        if session is None or "opens" not in session.spec:
            raise _gone(shell, None)
        await self._commands.kill(who, ref, shell)
        return _info(session)

    # Inside

    def _find(self, live: Live, shell: str) -> Running:
        session = live.commands.get(shell)
        if session is None or "opens" not in session.spec or session.ended:
            raise _gone(shell, session)
        return session

    async def _settle(self, session: Running, running: Running) -> None:
        """Follow a command to its end, so that its session is idle, or has ended, when this returns."""
        ends = [asyncio.create_task(command.done.wait()) for command in (running, session)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not running.ended:  # the session told it how it ended, unless all of it was killed
                await asyncio.wait(ends[:1], timeout=INTERRUPTED)
        finally:
            for end in ends:
                end.cancel()
        with suppress(errors.AtollError):
            if not running.ended:
                await running.live.client.request("kill", id=running.id)
            elif running.summary.get("status") == "completed" and await _is_over(session, running, TOLD):
                return
            await self._make_idle(session)

    async def _make_idle(self, session: Running) -> None:
        """Where the last command was killed, for its time or otherwise: end what it started. A session that then still does not
        answer is ended."""
        commands = [c for c in session.live.commands.values() if c.spec.get("shell") == session.id]
        if not commands or session.ended or not (last := commands[-1]).ended or await _is_over(session, last, 0):
            return
        for signal, wait in (("INT", INTERRUPTED), ("KILL", KILLED)):
            await self._signal(session, last, signal)
            if await _is_over(session, last, wait):
                return
        with suppress(errors.NotFound):
            await session.live.client.request("kill", id=session.id)
        await session.done.wait()

    async def _signal(self, session: Running, running: Running, signal: str) -> None:
        """Signal the processes of a command; SIGINT goes to the shell too, and first, so that it knows why they end.

        They are the children of the shell that are younger than the command, and all below them. What earlier commands left in
        the background is older.
        """
        words = session.output.kept[1].first(0, 64).split()
        shell_pid = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        if shell_pid <= 1 or running.pid is None:
            return
        with session.live.use() as client:
            found = (await client.request("ps")).get("processes")
            parents = {p["pid"]: p["ppid"] for p in found or [] if isinstance(p, dict)}
            own = {pid for pid, parent in parents.items() if parent == shell_pid and pid > running.pid}
            while more := {pid for pid, parent in parents.items() if parent in own} - own:
                own |= more
            pids = [shell_pid, *own] if signal == "INT" else [*own]
            if not pids:
                return
            line = f"kill -{signal} {' '.join(map(str, map(int, pids)))}"
            request: ProcessRequest = {"argv": ["/bin/sh", "-c", line], "cwd": "/", "timeout_ms": 10_000}
            async for _ in await Process.start(client, new_command_id(), request):
                pass


def _sessions(live: Live) -> list[Running]:
    return [command for command in live.commands.values() if "opens" in command.spec and not command.ended]


def _running(session: Running) -> Running | None:
    commands = session.live.commands.values()
    return next((c for c in commands if c.spec.get("shell") == session.id and not c.ended), None)


def _info(session: Running) -> ShellInfo:
    running = _running(session)
    return ShellInfo(
        shell_id=session.id,
        sandbox_id=session.live.id,
        language=session.spec["opens"],
        state="ended" if session.ended else "idle" if running is None else "running",
        started_at=session.started_at,
        command_id=running.id if running is not None else None,
        exit_code=session.summary.get("exit_code"),
    )


async def _await_line(session: Running, word: str, start: int) -> bool:
    """Wait until the session has told a line that starts with `word`; False when it ended without."""
    told = "\n"
    async for channel, _, data in session.output.follow({1: start, 2: -1}):
        if channel == 1:
            told += data.decode("ascii", "replace")
            if f"\n{word} " in told and told.endswith("\n"):
                return True
    return False


async def _is_over(session: Running, running: Running, wait: float) -> bool:
    """Whether the session has told the end of this command, or has ended, within so many seconds."""
    start = max(0, session.output.kept[1].total - LOOK_BACK)
    if not wait:
        return session.ended or f"{running.id} ".encode() in session.output.kept[1].read(start)[1]
    try:
        async with asyncio.timeout(wait):
            await _await_line(session, running.id, start)
        return True
    except TimeoutError:
        return False


def _gone(shell: str, session: Running | None) -> errors.NotFound:
    if session is None:
        return errors.NotFound(f"no shell {shell!r:.80}", hint="open one; sessions end with their sandbox")
    code = session.summary.get("exit_code")
    return errors.NotFound(
        f"the shell has ended, with exit code {code}",
        hint="open another",
        details={"reason": "ended", "exit_code": code},
    )
