"""The table of agentkernel's routes, and what they work with."""

import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from atoll import errors, model, profiles
from atoll.core import Core
from atoll.core.policy.profiles import Ceiling
from atoll.core.sandboxes.provisioning import TEMPORARY
from atoll.model import Chunk, CreateSandbox, ExecResult, ExecSpec, RunOnce
from atoll.server.request import LARGE_JSON, Exchange, check_shape
from atoll.surfaces.agentkernel.http import bodies
from atoll.surfaces.agentkernel.http.admission import Admission, check_content
from atoll.words import agentkernel as words

PUBLISHED = re.compile(r"agentkernel-[a-z]+-sdk/")
MAX_OUTPUT = 16 * model.MIB
DEFAULT_IMAGE = "auto"
T = TypeVar("T")
Handler = Callable[["Served", Exchange], Awaitable[None]]

ROUTES: dict[tuple[str, str], Handler] = {}


def route(method: str, path: str) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        ROUTES[method, path] = handler
        return handler

    return add


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of the person who opened the port."""

    admission: Admission
    ceiling: Ceiling
    any_host: bool = False
    legacy_exit_errors: bool = False
    runtime: str = "auto"


class Ran(TypedDict):
    """The result of a run."""

    output: str
    stdout: str
    stderr: str
    exit_code: int | None
    duration_ms: int
    timed_out: bool
    oom_killed: bool
    truncated: bool


class Served:
    """One open door: core, and what the person who opened it chose."""

    def __init__(self, core: Core, settings: Settings) -> None:
        self.core = core
        self.settings = settings

    async def body(self, exchange: Exchange, kind: type[T]) -> T:
        raw = await exchange.body()
        check_content(exchange, raw)
        if len(raw) > LARGE_JSON:
            check_shape(raw, kind)
        return model.decode(kind, raw)

    # From its words to core's

    def once(self, request: bodies.Run) -> RunOnce:
        spec = CreateSandbox(
            name=TEMPORARY + secrets.token_hex(4),
            image=words.image_name(request.image) if request.image else DEFAULT_IMAGE,
            program=None if request.image else request.command[0][:4096],
            profile=profile(request.profile),
            mode=mode(request.compatibility_mode),
            network=request.network is not False,
            runtime=self.settings.runtime,
        )
        command = command_spec(request.command, request.env, request.cwd, request.timeout_ms)
        return RunOnce(sandbox=spec, command=command, any_host=self.settings.any_host)

    async def run(self, exchange: Exchange, request: bodies.Run) -> Ran:
        stream = self.core.once.stream(exchange.who, self.once(request), self.settings.ceiling)
        return await gather(stream)

    async def answer_run(self, exchange: Exchange, result: Ran) -> None:
        if failure := self.failure_of(exchange, result):
            await exchange.answer({"success": False, "error": failure}, 500)
            return
        await ok(exchange, result)

    def failure_of(self, exchange: Exchange, result: Ran) -> str | None:
        """Return the error that a command's failure is for this caller.

        The published clients read nothing of a result but its output, so that a failure would look like success.
        They get an error, as their own server gives them.
        """
        told = self.settings.legacy_exit_errors or PUBLISHED.match(exchange.header(b"user-agent"))
        if told and (result["exit_code"] != 0 or result["timed_out"]):
            return f"Command exited with code {result['exit_code']}: {result['output']}"
        return None


async def ok(exchange: Exchange, data: Any, status: int = 200) -> None:
    await exchange.answer({"success": True, "data": data}, status)


async def known(app: Served, exchange: Exchange, ref: str | None = None) -> model.SandboxInfo:
    try:
        info = await app.core.sandboxes.get(exchange.who, ref or sandbox_ref(exchange))
    except errors.NotFound:
        raise errors.NotFound("Sandbox not found") from None
    if info.state in ("ending", "ended"):
        raise errors.NotFound("Sandbox not found")
    return info


def sandbox_ref(exchange: Exchange) -> str:
    return words.sandbox_name(exchange.parts[1])


def profile(text: str | None) -> str | None:
    return None if text is None else profiles.profile_name(text)


def mode(text: str | None) -> str | None:
    return None if text is None else profiles.mode_name(text)


def command_spec(
    argv: list[str], env: dict[str, str] | list[str] | None, cwd: str | None, timeout_ms: int | None
) -> ExecSpec:
    fields = {"argv": argv, "env": words.environment(env), "cwd": cwd, "timeout_ms": timeout_ms or 0}
    return model.convert(ExecSpec, {**fields, "output_limit": MAX_OUTPUT})


async def gather(stream: AsyncIterator[Any]) -> Ran:
    """The result, with both streams in the order they came."""
    pieces: list[bytes] = []
    size = 0
    found: ExecResult | None = None
    async with aclosing(stream):  # type: ignore[type-var]  # only generators come here
        async for item in stream:
            if isinstance(item, Chunk) and size < MAX_OUTPUT:
                pieces.append(item.data[: MAX_OUTPUT - size])
                size += len(item.data)
            elif isinstance(item, ExecResult):
                found = item
    assert found is not None
    return {
        "output": b"".join(pieces).decode("utf-8", "replace"),
        "stdout": found.stdout,
        "stderr": found.stderr,
        "exit_code": 124 if found.timed_out else found.exit_code,
        "duration_ms": found.duration_ms,
        "timed_out": found.timed_out,
        "oom_killed": found.oom,
        "truncated": found.truncated,
    }
