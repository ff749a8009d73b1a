"""Running commands: wait for them, stream them, leave them in the background and ask again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from atoll.core import Core
from atoll.core.access.principals import Principal
from atoll.core.commands.packages import PIP_SECONDS, pip_install
from atoll.errors import InvalidArgument
from atoll.model import Chunk, CommandInfo, ExecResult, ExecSpec, RunSpec, Started, convert
from atoll.proto.sandbox.v1 import sandbox_pb2 as pb
from atoll.words import k8e as words
from atoll.words import k8e_ids as ids

from .calls import STREAM, user_inside
from .sse_frames import Frames
from .text import Pieces, both, clean

DEFAULT_TIMEOUT = 30
MAX_TIMEOUT = 86400
_STATUS = {"cancelled": "failed", "lost": "failed"}


class Execution:
    core: Core

    async def Exec(self, who: Principal, request: Any) -> Any:
        ref, spec = ids.session_ref(request.session_id), command_of(request)
        if request.background:
            started = await self.core.commands.background(who, ref, spec)
            return pb.ExecResponse(
                session_id=request.session_id,
                run_id=words.run_id(started.sandbox_id, started.command_id),
                command_id=started.command_id,
                status="started",
                language=request.language,
            )
        done = await self.core.commands.exec(who, ref, spec)
        (out, out_bytes), (err, err_bytes) = both(done.stdout, done.stdout_b64), both(done.stderr, done.stderr_b64)
        return pb.ExecResponse(
            stdout=out,
            stderr=err,
            stdout_bytes=out_bytes,
            stderr_bytes=err_bytes,
            exit_code=exit_code_of(done),
            session_id=request.session_id,
            status=status_of(done),
            duration_ms=done.duration_ms,
            truncated=done.truncated,
            language=request.language,
            signal=done.signal or 0,
            oom=done.oom,
            command_id=done.command_id,
            blocked=[json.dumps(item, default=str) for item in done.blocked],
        )

    async def ExecStream(self, who: Principal, request: Any) -> AsyncIterator[Any]:
        """Yield the output in `chunk` and what more there is to say in fields of its own.

        On request `chunk` has K8E's frames instead.
        """
        if request.background:
            raise InvalidArgument("a stream cannot run in the background")
        kind = request.frames or STREAM.get()
        if kind not in ("", "text", "sse"):
            raise InvalidArgument(f"frames of kind {kind!r:.40} are not known", hint="`sse`, or `text`")
        ref, spec = ids.session_ref(request.session_id), command_of(request)
        if kind == "sse":
            async for answer in self._framed(who, ref, spec):
                yield answer
            return
        text = {1: Pieces(), 2: Pieces()}
        async with aclosing(self.core.commands.stream(who, ref, spec)) as items:  # type: ignore[type-var]
            async for item in items:
                if isinstance(item, Started):
                    yield pb.ExecStreamResponse(pid=item.pid or 0, command_id=item.command_id)
                elif isinstance(item, Chunk):
                    yield pb.ExecStreamResponse(
                        chunk=text[item.channel].feed(item.data), data=item.data, stream=_STREAM[item.channel]
                    )
                elif isinstance(item, ExecResult):
                    for channel, pieces in text.items():
                        if rest := pieces.feed(b"", last=True):
                            yield pb.ExecStreamResponse(chunk=rest, stream=_STREAM[channel])
                    yield _last(item)

    async def _framed(self, who: Principal, ref: str, spec: ExecSpec | RunSpec) -> AsyncIterator[Any]:
        frames = Frames()
        async with aclosing(self.core.commands.stream(who, ref, spec)) as items:  # type: ignore[type-var]
            async for item in items:
                if isinstance(item, Started):
                    yield pb.ExecStreamResponse(chunk=frames.start(item.pid or 0))
                elif isinstance(item, Chunk):
                    if text := frames.add(item.channel, item.data):
                        yield pb.ExecStreamResponse(chunk=text)
                elif isinstance(item, ExecResult):
                    yield pb.ExecStreamResponse(chunk=frames.end(exit_code_of(item)))

    async def PollRun(self, who: Principal, request: Any) -> Any:
        sandbox, command = ids.parse_run(request.run_id)
        now = await self.core.commands.poll(who, sandbox, command)
        (out, out_bytes), (err, err_bytes) = both(now.stdout, now.stdout_b64), both(now.stderr, now.stderr_b64)
        return pb.PollRunResponse(
            run_id=request.run_id,
            status=status_of(now),
            stdout=out,
            stderr=err,
            stdout_bytes=out_bytes,
            stderr_bytes=err_bytes,
            exit_code=exit_code_of(now),
            duration_ms=now.duration_ms,
            truncated=now.truncated,
            signal=now.signal or 0,
            oom=now.oom,
        )

    async def PipInstall(self, who: Principal, request: Any) -> Any:
        ref = ids.session_ref(request.session_id)
        done = await self.core.commands.exec(who, ref, pip_install(request.packages))
        (out, out_bytes), (err, err_bytes) = both(done.stdout, done.stdout_b64), both(done.stderr, done.stderr_b64)
        note = f"\ntimed out after {PIP_SECONDS} s\n" if done.timed_out else ""
        return pb.PipInstallResponse(
            output=out + err + note, exit_code=exit_code_of(done), output_bytes=out_bytes + err_bytes + note.encode()
        )

    async def GetProcesses(self, who: Principal, request: Any) -> Any:
        found = await self.core.commands.processes(who, ids.session_ref(request.session_id))
        return pb.GetProcessesResponse(processes=[_process(one) for one in found])


_STREAM = {1: "stdout", 2: "stderr"}


def command_of(request: Any) -> ExecSpec | RunSpec:
    """Translate an ExecRequest: K8E's shell command, or one of ours: code in a language, or an argv."""
    if request.timeout < 0 or request.timeout > MAX_TIMEOUT:
        raise InvalidArgument(f"timeout must be 0 (the default) to {MAX_TIMEOUT} seconds")
    seconds = request.timeout or (0 if request.background else DEFAULT_TIMEOUT)
    fields: dict[str, object] = {
        "timeout_ms": seconds * 1000,
        "background": request.background,
        "env": dict(request.env),
    }
    if request.workdir:
        fields["cwd"] = request.workdir
    if request.stdin:
        import base64

        fields["stdin_b64"] = base64.b64encode(request.stdin).decode()
    if request.output_limit:
        fields["output_limit"] = request.output_limit
    if request.command_id:
        fields["id"] = request.command_id
    forms = [bool(request.command), bool(request.command_bytes), bool(request.argv), bool(request.code)]
    if sum(forms) != 1:
        raise InvalidArgument("exactly one of command, command_bytes, argv and code is needed")
    user = request.user or user_inside()
    if request.code:
        if user:
            raise InvalidArgument("user belongs to commands, not to code in a language")
        return convert(RunSpec, {**fields, "code": request.code, "language": request.language or "bash"})
    if user:
        fields["user"] = user
    if request.argv:
        return convert(ExecSpec, {**fields, "argv": list(request.argv)})
    command = request.command or request.command_bytes.decode("utf-8", "surrogateescape")
    return convert(ExecSpec, {**fields, "command": command})


def status_of(done: ExecResult | CommandInfo) -> str:
    return _STATUS.get(done.status, done.status)


def exit_code_of(done: ExecResult | CommandInfo) -> int:
    """The command's own; -1 when it has none: it runs still, was cut off by its timeout, or is lost."""
    return -1 if done.exit_code is None or done.status == "timed_out" else done.exit_code


def _last(done: ExecResult) -> Any:
    return pb.ExecStreamResponse(
        done=True,
        exit_code=exit_code_of(done),
        status=status_of(done),
        duration_ms=done.duration_ms,
        command_id=done.command_id,
        truncated=done.truncated,
        signal=done.signal or 0,
        oom=done.oom,
        blocked=[json.dumps(item, default=str) for item in done.blocked],
    )


def _process(one: Mapping[str, object]) -> Any:
    line = one.get("cmdline")
    shown = " ".join(clean(part) for part in line) if isinstance(line, list) else clean(line or "")
    return pb.ProcessInfo(
        pid=_int32(one.get("pid")), comm=_word(one.get("comm")), state=_word(one.get("state"))[:1], cmdline=shown,
        ppid=_int32(one.get("ppid")),
    )  # fmt: skip


def _int32(value: object) -> int:
    """A number the guest claims, within the field."""
    return value if isinstance(value, int) and -(2**31) <= value < 2**31 else 0


def _word(value: object) -> str:
    return clean(value.decode("utf-8", "replace") if isinstance(value, bytes) else value or "")
