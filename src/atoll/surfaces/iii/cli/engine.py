"""`atoll iii sandbox ...`: the verbs of the stock tool, spoken to an iii engine as any client would."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from typing import TypedDict

from atoll.cli.grammar import UsageError
from atoll.cli.output import say, tell, write
from atoll.errors import DaemonUnreachable, Unsupported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from atoll.cli.grammar import Arguments

TIMED_OUT = 124
BOOT_MS, CALL_MS, GRACE_MS = 300_000, 60_000, 30_000
EXEC_MS = 300_000
FRAME = 64 * 1024
UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "": 1000}


class Executed(TypedDict):
    """The part of a run function's answer that is shown."""

    stdout: str
    stderr: str
    exit_code: int | None


class Refused(Exception):
    """A function said no; the envelope says why."""

    def __init__(self, envelope: Mapping[str, object]) -> None:
        super().__init__(envelope.get("message", ""))
        self.envelope = envelope


class Engine:
    """A client of the engine on this machine."""

    def __init__(self, port: int) -> None:
        try:
            from iii import InitOptions, register_worker
        except ImportError:
            raise Unsupported("the package iii-sdk is not installed", hint="pip install 'atoll[iii]'") from None
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except OSError as error:
            raise DaemonUnreachable(f"no iii engine answers on port {port}: {error.strerror}") from None
        options = InitOptions(
            worker_name=f"atoll-cli-{os.getpid()}", otel={"enabled": False}, enable_metrics_reporting=False
        )
        self.client = register_worker(f"ws://127.0.0.1:{port}", options)

    async def call(self, function: str, payload: Mapping[str, object], timeout_ms: int = CALL_MS) -> Any:
        from iii import InvocationError

        request = {"function_id": function, "payload": payload, "timeout_ms": timeout_ms}
        try:
            return await self.client.trigger_async(request)
        except InvocationError as error:
            raise Refused(_envelope(error.message, error.code)) from None

    def run(self, work: Coroutine[Any, Any, int]) -> int:
        return asyncio.run_coroutine_threadsafe(work, self.client._loop).result()


def _envelope(text: str, code: str) -> Mapping[str, object]:
    try:
        found = json.loads(text.removeprefix("handler error: "))
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"code": code, "message": text}


def _with_engine(arguments: Arguments, work: Callable[[Engine], Coroutine[Any, Any, int]]) -> int:
    try:
        engine = Engine(arguments.port)
    except (DaemonUnreachable, Unsupported) as error:
        say(f"error: {error.message}" + (f" ({error.hint})" if error.hint else ""))
        return 1
    try:
        return engine.run(work(engine))
    except Refused as refused:
        details = refused.envelope.get("details")
        details = details if isinstance(details, dict) else {}
        write(1, str(details.get("stdout", "")).encode())
        write(2, str(details.get("stderr", "")).encode())
        say(f"error: [{refused.envelope.get('code')}] {refused}")
        return TIMED_OUT if refused.envelope.get("code") == "S200" else 1
    finally:
        engine.client.shutdown()


def _milliseconds(text: str | None) -> int | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(ms|s|m|h|)", text)
    if found is None:
        raise UsageError(f"--timeout needs 500ms, 30s or 5m, not {text!r}")
    return int(found[1]) * UNITS[found[2]]


def _present(**fields: Any) -> Mapping[str, object]:
    return {key: value for key, value in fields.items() if value is not None and value != []}


def _show(answer: Executed) -> int:
    write(1, answer["stdout"].encode())
    write(2, answer["stderr"].encode())
    code = answer["exit_code"]
    return code if isinstance(code, int) else 1


async def _execute(engine: Engine, sandbox: str, argv: list[str], timeout: int | None, env: list[str]) -> int:
    payload = _present(sandbox_id=sandbox, argv=argv, timeout_ms=timeout, env=env)
    return _show(await engine.call("sandbox::exec", payload, (timeout or EXEC_MS) + GRACE_MS))


def run(arguments: Arguments) -> int:
    image, *argv = arguments.rest
    timeout = _milliseconds(arguments.timeout)

    async def work(engine: Engine) -> int:
        wanted = _present(image=image, cpus=arguments.cpus, memory_mb=arguments.memory)
        sandbox = (await engine.call("sandbox::create", wanted, BOOT_MS))["sandbox_id"]
        try:
            return await _execute(engine, sandbox, argv, timeout, [])
        finally:
            await engine.call("sandbox::stop", {"sandbox_id": sandbox})

    return _with_engine(arguments, work)


def create(arguments: Arguments) -> int:
    async def work(engine: Engine) -> int:
        wanted = _present(
            image=arguments.rest[0], cpus=arguments.cpus, memory_mb=arguments.memory, name=arguments.name,
            idle_timeout_secs=arguments.idle_timeout, network=arguments.network or None, env=arguments.env,
        )  # fmt: skip
        tell((await engine.call("sandbox::create", wanted, BOOT_MS))["sandbox_id"])
        return 0

    return _with_engine(arguments, work)


def execute(arguments: Arguments) -> int:
    sandbox, *argv = arguments.rest
    timeout = _milliseconds(arguments.timeout)
    return _with_engine(arguments, lambda engine: _execute(engine, sandbox, argv, timeout, arguments.env))


def list_all(arguments: Arguments) -> int:
    async def work(engine: Engine) -> int:
        tell(f"{'SANDBOX_ID':36}  {'IMAGE':12}  {'AGE_SECS':>8}  NAME")
        for one in (await engine.call("sandbox::list", {}))["sandboxes"]:
            tell(f"{one['sandbox_id']:36}  {one['image']:12}  {one['age_secs']:>8}  {one['name'] or '-'}".rstrip())
        return 0

    return _with_engine(arguments, work)


def stop(arguments: Arguments) -> int:
    async def work(engine: Engine) -> int:
        answer = await engine.call("sandbox::stop", {"sandbox_id": arguments.rest[0]})
        tell(f"stopped {answer['sandbox_id']}")
        return 0

    return _with_engine(arguments, work)


def upload(arguments: Arguments) -> int:
    sandbox, local, remote = arguments.rest

    async def work(engine: Engine) -> int:
        from iii.helpers import create_channel_async

        with sys.stdin.buffer if local == "-" else open(local, "rb") as source:  # noqa: ASYNC230
            channel = await create_channel_async(engine.client)
            ref = channel.reader_ref
            content = {"channel_id": ref.channel_id, "access_key": ref.access_key, "direction": "read"}
            wanted = _present(
                sandbox_id=sandbox, path=remote, content=content, mode=arguments.mode, parents=arguments.parents or None
            )
            writing = asyncio.ensure_future(engine.call("sandbox::fs::write", wanted, 24 * 3_600_000))
            sending = asyncio.ensure_future(_fill(channel.writer, source))
            await asyncio.wait({writing, sending}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and not sending.done():
                sending.cancel()
            answer = await writing
            say(f"{answer['bytes_written']} bytes")
        return 0

    try:
        return _with_engine(arguments, work)
    except OSError as error:
        say(f"error: {local}: {error.strerror}")
        return 1


async def _fill(writer: Any, source: Any) -> None:
    await writer._ensure_connected()
    while piece := await asyncio.to_thread(source.read, FRAME):
        await writer.write(piece)
    await writer.close_async()


def download(arguments: Arguments) -> int:
    sandbox, remote, local = arguments.rest

    async def work(engine: Engine) -> int:
        from iii.channels import ChannelReader
        from iii.iii_types import StreamChannelRef

        answer = await engine.call("sandbox::fs::read", {"sandbox_id": sandbox, "path": remote})
        reader = ChannelReader(engine.client._address, StreamChannelRef(**answer["content"]))
        faults: list[str] = []
        reader.on_message(faults.append)
        got = 0
        out = 1 if local == "-" else os.open(local, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            async for piece in reader:
                got += len(piece)
                await asyncio.to_thread(write, out, piece)
        finally:
            if out != 1:
                os.close(out)
        if faults or got < answer["size"]:
            say(f"error: [S216] the download was cut after {got} of {answer['size']} bytes {' '.join(faults)}".rstrip())
            return 1
        return 0

    try:
        return _with_engine(arguments, work)
    except OSError as error:
        say(f"error: {local}: {error.strerror}")
        return 1
