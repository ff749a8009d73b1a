"""`atoll exec`: a program in a sandbox, with its output, its input and its exit code passed through."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` imports enum, which costs more than all of this
import os
from _thread import start_new_thread  # `threading` costs four milliseconds to import, and this is a hot path

from ..client import calls
from ..client._sync.driver import Link
from ..client.results import ExecResult, Output, Started
from ..errors import AtollError
from .output import OWN_FAILURE, TIMED_OUT, safe_bytes, say, tell, write
from .session import open_link, reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..client.wire import CommandWire
    from .grammar import Arguments

PIECE = 65_536


def execute(arguments: Arguments) -> int:
    ref, argv = reference(arguments.rest[0]), arguments.rest[1:]
    link = open_link(arguments)
    if arguments.allow_host:
        from .network import add_hosts

        add_hosts(link, ref, arguments)
    options: dict[str, Any] = {
        "env": dict(arguments.env), "cwd": arguments.workdir, "user": arguments.user, "timeout": arguments.timeout,
    }  # fmt: skip
    if arguments.detach:
        started = link.call(calls.start(ref, argv, background=True, **options))
        tell(started["command_id"])
        if os.isatty(2):
            say(f"atoll: it runs on; its output: atoll sandbox exec-logs {arguments.rest[0]} {started['command_id']}")
        return 0
    if arguments.tty:
        from .terminal import on_terminal

        return on_terminal(link, ref, argv, options)
    if not arguments.interactive and _is_unread_file():
        say("hint: the file on standard input is not passed on; for that: atoll exec -i ...")
    return _through_pipes(link, ref, argv, options, arguments)


def _is_unread_file() -> bool:
    """Whether standard input is a file of which nothing was read yet: one that was meant for the program."""
    try:
        found = os.fstat(0)
        return found.st_mode & 0o170000 == 0o100000 and found.st_size > 0 and os.lseek(0, 0, os.SEEK_CUR) == 0
    except OSError:
        return False


def _through_pipes(link: Link, ref: str, argv: list[str], options: Mapping[str, Any], arguments: Arguments) -> int:
    call = calls.start(ref, argv, frames=True, stdin_stream=bool(arguments.interactive), **options)
    escaped = [not arguments.raw and os.isatty(descriptor) for descriptor in (1, 2)]
    interrupts = Interrupts(link, str(call.command_id))
    try:
        exchange = link.open(call)
        exchange.raise_for_status()
        for value in exchange.frames():
            if isinstance(value, Started):
                interrupts.begin(ref)
            if isinstance(value, Output):
                descriptor = 1 if value.stream == "stdout" else 2
                write(descriptor, safe_bytes(value.data) if escaped[descriptor - 1] else value.data)
            elif isinstance(value, Started) and arguments.interactive:
                feed_stdin(beside(link), ref, str(call.command_id))
            elif isinstance(value, dict):
                if value.get("blocked"):
                    from .network import note_blocked

                    note_blocked(value, arguments.rest[0])
                return exit_code(value)
    except (KeyboardInterrupt, BrokenPipeError):
        kill_quietly(beside(link), ref, str(call.command_id))
        raise
    finally:
        interrupts.end()
    return OWN_FAILURE


class Interrupts:
    """Ctrl-C while a command runs: the first is passed on to it as SIGINT, the second ends it.

    A handler is used instead of the exception: that could be raised in the middle of a frame, whose bytes would be lost.
    """

    def __init__(self, link: Link, command_id: str) -> None:
        self._link = link
        self._command = command_id
        self._ref = ""
        self._previous: Any = None
        self._pressed = 0

    def begin(self, ref: str) -> None:
        """The command runs in this sandbox; from here on Ctrl-C is its."""
        if not self._ref:
            self._ref = ref
            self._previous = _signal.signal(_signal.SIGINT, self._press)

    def end(self) -> None:
        if self._ref:
            self._ref = ""
            _signal.signal(_signal.SIGINT, self._previous)

    def _press(self, *_: object) -> None:
        self._pressed += 1
        if self._pressed > 1:
            raise KeyboardInterrupt
        try:
            call = calls.signal(self._ref, self._command, _signal.SIGINT)
            call.timeout = 10.0
            beside(self._link).call(call)
        except AtollError:
            return  # it has just ended
        if os.isatty(2):
            say("atoll: passed on to the program; Ctrl-C again ends it")


def exit_code(wire: CommandWire) -> int:
    result = ExecResult(wire)
    if result.timed_out:
        say("atoll: timed out")
        return TIMED_OUT
    if result.exit_code is None:
        say(f"atoll: the command did not end by itself: {result.status}")
        return OWN_FAILURE
    return result.exit_code & 255


def kill_quietly(link: Link, ref: str, command_id: str) -> None:
    try:
        kill = calls.kill(ref, command_id)
        kill.timeout = 10.0
        link.call(kill)
    except AtollError:
        pass  # it has ended, or the daemon saw us hang up


def beside(link: Link) -> Link:
    """A way of its own to the same daemon. A gateway's link carries many calls at once, so it is that one."""
    return Link(link.home, path=link.path) if type(link) is Link else link


def feed_stdin(link: Link, ref: str, command_id: str) -> None:
    """Pass our standard input on, on a connection of its own, until it or the command ends."""

    def feed() -> None:
        try:
            while piece := os.read(0, PIECE):
                link.call(calls.send_stdin(ref, command_id, piece))
            link.call(calls.send_stdin(ref, command_id, b"", eof=True))
        except (OSError, AtollError):
            pass  # nobody reads any more; how the command ended is told by its own stream

    start_new_thread(feed, ())
