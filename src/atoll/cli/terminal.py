"""`atoll attach` and `atoll exec -t`: this terminal becomes one in the sandbox, and is itself again afterwards."""

from __future__ import annotations

import os
import signal
import sys
import termios
import tty

from ..client import calls
from ..client.results import Output, Started
from ..errors import AtollError
from .execute import beside, exit_code, feed_stdin
from .output import OWN_FAILURE, say, write
from .session import open_link, reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from ..client._sync.driver import Link
    from ..surfaces.agentkernel.cli.recording import Recorder
    from .grammar import Arguments

SHELL = "if command -v bash >/dev/null 2>&1; then exec bash -l; else exec sh -l; fi"


def attach(arguments: Arguments) -> int:
    """A login shell, or the given command, on this terminal."""
    argv = arguments.rest[1:]
    options: dict[str, Any] = {"env": dict(arguments.env), "cwd": arguments.workdir, "user": arguments.user}
    recorder = None
    if arguments.record is not None:
        from ..surfaces.agentkernel.cli.recording import Recorder, recording_path

        name = arguments.rest[0]
        rows, cols = _size()
        recorder = Recorder(recording_path(arguments.record, name), cols, rows, " ".join(argv) or "shell", name)
    link, ref = open_link(arguments), reference(arguments.rest[0])
    if arguments.allow_host:
        from .network import add_hosts

        add_hosts(link, ref, arguments)
    try:
        return on_terminal(link, ref, argv or SHELL, {**options, "timeout": None}, recorder)
    finally:
        if recorder is not None:
            recorder.close()
            say(f"Recorded in {recorder.path}")


def on_terminal(
    link: Link, ref: str, command: str | list[str], options: dict[str, Any], recorder: Recorder | None = None
) -> int:
    """Run it on a PTY inside, with this terminal in raw mode; the exit code."""
    rows, cols = _size()
    env = {"TERM": os.environ.get("TERM") or "xterm", **options.pop("env", {})}
    call = calls.start(ref, command, pty=(rows, cols), stdin_stream=True, frames=True, env=env, **options)
    exchange = link.open(call)
    exchange.raise_for_status()
    with _RawMode(), _Resizing(beside(link), ref, str(call.command_id)) as resizing:
        for value in exchange.frames():
            if isinstance(value, Output):
                write(1, value.data)
                if recorder is not None:
                    recorder.output(value.data)
            elif isinstance(value, Started):
                resizing.begin()
                feed_stdin(beside(link), ref, str(call.command_id))
            elif isinstance(value, dict):
                return exit_code(value)
    return OWN_FAILURE


def _size() -> tuple[int, int]:
    for descriptor in (0, 1, 2):
        try:
            size = os.get_terminal_size(descriptor)
            return size.lines or 24, size.columns or 80  # a terminal nobody gave a size says 0
        except OSError:
            continue
    return 24, 80


class _RawMode:
    """Standard input in raw mode, put back whatever happens: also when we are told to end."""

    def __enter__(self) -> None:
        self._saved = termios.tcgetattr(0) if os.isatty(0) else None
        self._handlers = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        if self._saved is not None:
            tty.setraw(0, termios.TCSADRAIN)

    def __exit__(self, *_: object) -> None:
        if self._saved is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, self._saved)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


class _Resizing:
    """While in use, a change of this terminal's size is passed on, over a connection of its own."""

    def __init__(self, link: Link, ref: str, command_id: str) -> None:
        self._link = link
        self._ref = ref
        self._command = command_id
        self._previous: Any = None

    def __enter__(self) -> _Resizing:
        return self

    def begin(self) -> None:
        """The command runs: from here on changes can be passed on, and one may have happened already."""
        if self._previous is None:
            self._previous = signal.signal(signal.SIGWINCH, self._changed)
            self._changed()

    def _changed(self, *_: object) -> None:
        try:
            self._link.call(calls.resize(self._ref, self._command, *_size()))
        except AtollError:
            pass  # it has just ended

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGWINCH, self._previous)
