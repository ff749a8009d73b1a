"""`atoll shell`: a session in a sandbox whose directory, environment and names stay from command to command."""

from __future__ import annotations

import os
import sys

from ..client import calls
from ..client.results import Output
from ..errors import AtollError, InvalidArgument, NotFound
from .execute import beside, exit_code
from .output import safe_bytes, say, tell, write
from .session import open_link, reference
from .unfinished import ends_block, is_unfinished

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..client._sync.driver import Link
    from ..client.wire import CommandWire
    from .grammar import Arguments


def shell(arguments: Arguments) -> int:
    """Open, use or close a session; the exit code of the last command."""
    link = open_link(arguments)
    if not arguments.rest:
        if arguments.session or arguments.list or arguments.open or arguments.close:
            raise InvalidArgument("name the sandbox of the session", hint="atoll shell SANDBOX ...")
        made = link.call(calls.create({}))["id"]
        try:
            return _use(link, made, arguments)
        finally:
            link.call(calls.destroy(made))
    ref = reference(arguments.rest[0])
    if arguments.list:
        for found in link.call(calls.get(calls.sandbox_path(ref, "shells")))["shells"]:
            tell(f"{found['shell_id']}  {found['language']}  {found['state']}")
        return 0
    if arguments.open:
        tell(_open(link, ref, arguments))
        return 0
    if arguments.close:
        if not arguments.session:
            raise InvalidArgument("--close needs --session")
        link.call(calls.close_shell(ref, arguments.session))
        return 0
    return _use(link, ref, arguments)


def _open(link: Link, ref: str, arguments: Arguments) -> str:
    return str(link.call(calls.open_shell(ref, arguments.lang, user=arguments.user))["shell_id"])


def _use(link: Link, ref: str, arguments: Arguments) -> int:
    session = arguments.session or _open(link, ref, arguments)
    try:
        if arguments.command is not None:
            return _run(link, ref, session, arguments.command, arguments.timeout or 30)[0]
        return _converse(link, ref, session, arguments)
    finally:
        if not arguments.session:
            try:
                link.call(calls.close_shell(ref, session))
            except NotFound:
                pass  # it ended by itself


def _converse(link: Link, ref: str, session: str, arguments: Arguments) -> int:
    """Run each piece of code that is read, until the end of input or of the session."""
    code, ended = 0, False
    for piece in _typed(arguments.lang) if os.isatty(0) else _piped(arguments.lang):
        code, ended = _run(link, ref, session, piece, arguments.timeout)
        if ended:
            break
    return code


def _typed(language: str) -> Iterator[str]:
    """Yield what a person types, with line editing; a block goes on until it is complete. Ctrl-C drops what was typed."""
    import readline  # noqa: F401  # `input` edits lines and remembers them

    lines: list[str] = []
    while True:
        try:
            lines.append(input("... " if lines else f"{language}> "))
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("")
            lines.clear()
            continue
        piece = "\n".join(lines)
        if not piece.strip():
            lines.clear()
        elif not is_unfinished(language, piece):
            lines.clear()
            yield piece


def _piped(language: str) -> Iterator[str]:
    """Yield the lines of standard input, those of a block together."""
    lines: list[str] = []
    for line in sys.stdin:
        piece = "\n".join(lines)
        if lines and ends_block(language, piece, line):
            lines.clear()
            yield piece
        inside = language == "python" and not line.strip()  # a script's functions have empty lines in them
        lines.append(line.rstrip("\n"))
        piece = "\n".join(lines)
        if not piece.strip():
            lines.clear()
        elif not inside and not is_unfinished(language, piece):
            lines.clear()
            yield piece
    if lines:
        yield "\n".join(lines)  # whoever runs it says what is missing


def _run(link: Link, ref: str, session: str, line: str, timeout: float | None) -> tuple[int, bool]:
    """Run one command, its output as it comes. Ctrl-C interrupts it, and it is read to its end."""
    call = calls.run_in_shell(ref, session, line, timeout=timeout, frames=True)
    seen = {"stdout": 0, "stderr": 0}
    while True:
        try:
            exchange = link.open(call)
            exchange.raise_for_status()
            for value in exchange.frames():
                if isinstance(value, Output):
                    seen[value.stream] += len(value.data)
                    descriptor = 1 if value.stream == "stdout" else 2
                    write(descriptor, safe_bytes(value.data) if os.isatty(descriptor) else value.data)
                elif isinstance(value, dict):
                    return exit_code(value), _is_over(link, ref, session, value)
            raise AtollError("the command's output ended without a result")
        except KeyboardInterrupt:
            exchange.close()
            if os.isatty(2):
                say("")
            beside(link).call(calls.post(calls.shell_path(ref, session, "interrupt"), {}))
            call = calls.attach(ref, str(call.command_id), seen["stdout"], seen["stderr"])


def _is_over(link: Link, ref: str, session: str, result: CommandWire) -> bool:
    told = result.get("shell_ended")
    if told is None:  # read again after an interrupt: the command's own result does not say
        open_now = link.call(calls.get(calls.sandbox_path(ref, "shells")))["shells"]
        told = session not in [found["shell_id"] for found in open_now]
    return bool(told)
