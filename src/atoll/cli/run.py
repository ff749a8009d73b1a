"""`sandbox run`: the hot path. One request on a live sandbox, and nothing imported that it does not need."""

from __future__ import annotations

import os

from ..client import calls
from ..client.results import ExecResult, Output
from ..errors import AtollError, InvalidArgument, NotFound
from .output import FAILED, for_people, print_json, program_name, safe_bytes, say, write
from .session import (
    create_options,
    open_link,
    reference,
    run_id,
    setting,
    shown,
    state_of,
    tell_unheld,
    tenant_of,
    wake,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ..client._sync.driver import Link
    from ..client.options import CreateOptions
    from ..client.wire import CommandWire
    from .grammar import Arguments
    from .state import State

    Replaced = Mapping[str, object] | None  # what is told of an automatic sandbox that is gone

LOST = "the files"
MAX_CODE = 64 * 1024 * 1024


def run(arguments: Arguments) -> int:
    code = _code(arguments)
    link = open_link(arguments)
    way = _run_background if arguments.background else _run_raw if arguments.raw or for_people() else _run_json
    command = calls.new_command_id()
    replaced: Replaced = None

    def start(session: str) -> int:
        return way(link, session, _call(reference(session), code, arguments, command), arguments, replaced)

    chosen = arguments.session_id or setting("SESSION_ID")
    if chosen:
        _add_hosts(link, chosen, arguments)
        return start(chosen)
    tenant = tenant_of(arguments)
    state = state_of(arguments, tenant)
    session, _ = obtain(state, link, create_options(arguments), arguments)
    try:
        _add_hosts(link, session, arguments)
        return start(session)
    except AtollError as error:
        if error.code not in ("not_found", "sandbox_gone", "failed_precondition"):
            raise
        if error.code == "failed_precondition" and wake(link, session):
            return start(session)  # nothing ran: it was asleep
        if error.details.get("reason") == "oom":
            error.hint = (
                "its files are kept, and the next run starts it again; `create --memory MB` gives one more memory"
            )
            raise
        state.forget(session)
        if _had_begun(link, session, command):
            error.hint = "the files in it are lost, and the next run has a new sandbox; --memory gives that one more"
            raise
        say(f"{program_name()}: {error.message}; this run has a new sandbox, and {LOST} of {session} are lost")
    fresh, replaced = obtain(state, link, create_options(arguments), arguments, session)
    return start(fresh)  # nothing ran: once more in a new one


def _add_hosts(link: Link, session: str, arguments: Arguments) -> None:
    if arguments.allow_host:
        from .network import add_hosts

        add_hosts(link, session, arguments)


def _had_begun(link: Link, session: str, command: str) -> bool:
    """Whether the code was started in a sandbox that is gone now. Code is never run twice, so doubt counts as yes."""
    try:
        link.call(calls.poll(reference(session), command))
    except NotFound:
        return False
    except AtollError:
        pass
    return True


def obtain(
    state: State, link: Link, options: CreateOptions, filling: Arguments | None = None, before: str | None = None
) -> tuple[str, Replaced]:
    """Return the tenant's own sandbox, found or made, and what became of the one `before`.

    A new one has what --manifest and --git-repo of `filling` say.
    """
    current = state.current() if before is None else None
    fills = filling is not None and bool(filling.manifest or filling.git_repo)
    if current is not None:
        if fills:
            _tell_unfilled(current)
        return current, None
    if filling is not None and filling.values.get("persistent"):
        options["persistent"] = True
    entries: Mapping[str, object] | None = None
    if filling is not None and fills:
        from .workspaces import filling_of

        entries = filling_of(filling)
    from .progress import create_watched

    found = create_watched(
        link, calls.obtain_session(options, state.tenant, state.holder, before and reference(before), entries)
    )
    session = shown(found["sandbox"]["id"])
    if fills and not found["created"]:
        _tell_unfilled(session)
    if found["created"]:
        tell_unheld(found["sandbox"])
    state.remember(session)
    replaced = found.get("replaced")
    return session, replaced and {"session_id": before, "reason": replaced["reason"], "lost": replaced["lost"]}


def _tell_unfilled(session: str) -> None:
    say(f"{program_name()}: {session} was there already; --manifest and --git-repo fill only a new one")


def _code(arguments: Arguments) -> str:
    if arguments.rest:
        text: str = arguments.rest[0]
    elif os.isatty(0):
        raise InvalidArgument("no code: give it as an argument or on standard input")
    else:
        text = _standard_input()
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidArgument("the code is not valid UTF-8") from None
    return text


def _standard_input() -> str:
    pieces, size = [], 0
    while piece := os.read(0, 1 << 20):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_CODE:
            raise InvalidArgument(f"more than {MAX_CODE >> 20} MiB of code")
    return b"".join(pieces).decode("utf-8", "surrogateescape")


def _call(ref: str, code: str, arguments: Arguments, command_id: str) -> calls.Call:
    timeout, background = arguments.timeout, bool(arguments.background)
    if timeout is None and not background:
        timeout = calls.DEFAULT_TIMEOUT
    return calls.start(
        ref, code, language=arguments.lang, timeout=timeout, env=dict(arguments.env), command_id=command_id,
        background=background, frames=(arguments.raw or for_people()) and not background,
    )  # fmt: skip


def _run_json(link: Link, session: str, call: calls.Call, arguments: Arguments, replaced: Replaced) -> int:
    wire = _until_interrupted(link, session, call, lambda: link.call(call))
    print_json({**_result_object(wire, session, arguments.lang), **_more(replaced)})
    _note(wire, session)
    return _exit_code(wire)


def _run_raw(link: Link, session: str, call: calls.Call, arguments: Arguments, _: Replaced) -> int:
    def stream() -> CommandWire:
        exchange = link.open(call)
        exchange.raise_for_status()
        for value in exchange.frames():
            if isinstance(value, Output):
                descriptor = 1 if value.stream == "stdout" else 2
                write(descriptor, value.data if arguments.raw or not os.isatty(descriptor) else safe_bytes(value.data))
            elif isinstance(value, dict):
                return value
        raise AssertionError("unreachable")

    wire = _until_interrupted(link, session, call, stream)
    if ExecResult(wire).timed_out:
        say(f"atoll: timed out after {arguments.timeout or calls.DEFAULT_TIMEOUT:g} s")
    _note(wire, session)
    return _exit_code(wire)


def _run_background(link: Link, session: str, call: calls.Call, arguments: Arguments, replaced: Replaced) -> int:
    started = link.call(call)
    identity = run_id(started["sandbox_id"], started["command_id"])
    print_json({"run_id": identity, "status": "started", "session_id": session, **_more(replaced)})
    return 0


def _more(replaced: Replaced) -> Mapping[str, object]:
    return {"session_replaced": replaced} if replaced else {}


def _until_interrupted(link: Link, session: str, call: calls.Call, work: Callable[[], Any]) -> Any:
    """Wait; on Ctrl-C, or when our own output breaks, the command is killed before we go."""
    try:
        return work()
    except (KeyboardInterrupt, BrokenPipeError):
        try:
            kill = calls.kill(reference(session), str(call.command_id))
            kill.timeout = 10.0
            link.call(kill)
        except AtollError:
            pass  # it has ended, or the daemon saw us hang up
        raise


def _result_object(wire: CommandWire, session: str, language: str) -> Mapping[str, object]:
    result = ExecResult(wire)
    code = result.exit_code
    found: dict[str, object] = {
        "stdout": result.stdout,
        "stderr": result.stderr,
        "exit_code": -1 if result.timed_out or code is None else code,
        "session_id": session,
        "status": result.status,
        "duration_ms": result.duration_ms,
        "truncated": result.truncated,
        "language": language,
    }
    for name in ("stdout_b64", "stderr_b64", "oom", "blocked"):
        if wire.get(name):
            found[name] = wire[name]
    return found


def _note(wire: CommandWire, session: str) -> None:
    if wire.get("blocked"):
        from .network import note_blocked

        note_blocked(wire, session, f"{program_name()} sandbox run --allow-host {{name}} --session-id {session} ...")


def _exit_code(wire: CommandWire) -> int:
    result = ExecResult(wire)
    if result.timed_out or result.exit_code is None:
        return FAILED
    return result.exit_code & 255
