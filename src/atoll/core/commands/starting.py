"""Starting a command, and finding one again: once for each id, approved where a rule says so, recorded as it starts."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from atoll import errors
from atoll.core.access.approval_rules import Gate
from atoll.core.access.principals import Principal, new_command_id
from atoll.core.access.secrets import Vault
from atoll.core.commands import languages
from atoll.core.commands.command import Running
from atoll.core.commands.history import History
from atoll.core.commands.kept_outputs import KeptOutputs
from atoll.core.commands.output import PassedOn
from atoll.core.commands.sessions import ShellCommand, ShellProcess, command_call, directory_of
from atoll.core.sandboxes.state import Live
from atoll.core.store.database import StoreFailed
from atoll.core.store.records import Store
from atoll.core.store.typed import CommandRow, CommandSpec, NewCommand
from atoll.guest import Process, ProgramNotStarted
from atoll.guest.process import ProcessRequest
from atoll.guest.wire import Message
from atoll.model import ExecSpec, RunSpec

SHOWN_ARGUMENT = 4096
SHOWN_ARGUMENTS = 16_384  # of all arguments together, in the record of a command

Spec = ExecSpec | RunSpec


class Starter:
    """Starts the commands of every sandbox."""

    def __init__(self, store: Store, history: History, outputs: KeptOutputs, vault: Vault, gate: Gate) -> None:
        self._store = store
        self._history = history
        self._outputs = outputs
        self._vault = vault
        self._gate = gate

    def repeated(self, live: Live, spec: Spec) -> Running | CommandRow | None:
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

    async def admit(self, who: Principal, live: Live, spec: Spec) -> str | None:
        """Wait for a person where a rule of the sandbox says so. The seal of what was approved, if somebody had to."""
        if not live.spec.require_approval:
            return None
        sealed = await self._gate.command(who, live, spec)
        if live.state != "running":
            raise live.not_running()
        if self.repeated(live, spec) is not None:  # it was asked twice, and both waited
            raise errors.AlreadyExists(f"there is a command {spec.id!r} already")
        return sealed

    async def start(
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
            live, row, output or self._outputs.begin(live, command, kept, background), self._store, self._history
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
                PassedOn(awaited=False)
                if spawned
                else self._outputs.begin(live, row["id"], row["spec"].get("kept", 0), True)
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


def _kind(spec: Spec) -> CommandSpec:
    """Return the fields of a request that decide later how its command is treated."""
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
    """Return the digest that tells two requests with the same id apart."""
    if spec.id is None:
        return ""
    return hashlib.sha256(msgspec.msgpack.encode(spec)).hexdigest()
