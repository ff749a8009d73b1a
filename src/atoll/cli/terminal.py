"""`atoll attach` and `atoll exec -t`: this terminal becomes one in the sandbox, and is itself again afterwards."""

from __future__ import annotations

import os
import signal
import sys
from _thread import start_new_thread

from ..client import calls
from ..client.results import Event, Output, Started
from ..errors import AtollError, InvalidArgument, Unsupported
from ..words.terminal import SHELL
from .execute import PIECE, beside, exit_code, feed_stdin
from .output import OWN_FAILURE, say, tell, write
from .session import open_link, reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

    from ..client._sync.driver import Exchange, Link
    from ..client.calls import Call
    from ..surfaces.agentkernel.cli.recording import Recorder
    from .grammar import Arguments

LEAVE = b"\x10\x11"  # Ctrl-P Ctrl-Q


def attach(arguments: Arguments) -> int:
    """A login shell, or the given command, or a terminal that was kept, on this terminal."""
    name, argv = arguments.rest[0], arguments.rest[1:]
    link, ref = open_link(arguments), reference(name)
    if arguments.list:
        return _list(link, ref)
    options: dict[str, Any] = {"env": dict(arguments.env), "cwd": arguments.workdir, "user": arguments.user}
    recorder = None
    if arguments.record is not None:
        from ..surfaces.agentkernel.cli.recording import Recorder, recording_path

        rows, cols = _size()
        recorder = Recorder(recording_path(arguments.record, name), cols, rows, " ".join(argv) or "shell", name)
    if arguments.allow_host:
        from .network import add_hosts

        add_hosts(link, ref, arguments)
    try:
        if arguments.join is not None:
            if argv:
                raise InvalidArgument("--join takes no command", hint="leave it out, or leave out --join")
            return _Screen(link, ref, arguments.join, recorder, kept=name).show_kept(max(arguments.offset or 0, -1))
        options.update(timeout=None, echo=not arguments.no_echo)
        return on_terminal(link, ref, argv or SHELL, options, recorder, kept=name if arguments.keep else "")
    finally:
        if recorder is not None:
            recorder.close()
            say(f"Recorded in {recorder.path}")


def _list(link: Link, ref: str) -> int:
    for found in link.call(calls.get(calls.sandbox_path(ref, "commands")))["commands"]:
        if found["pty"] and found["status"] == "running":
            line = " ".join(found["argv"])
            tell(f"{found['command_id']}  {'a shell' if SHELL in line else line}")
    return 0


def on_terminal(
    link: Link,
    ref: str,
    command: str | list[str],
    options: dict[str, Any],
    recorder: Recorder | None = None,
    *,
    kept: str = "",
) -> int:
    """Run it on a PTY inside, with this terminal in raw mode; the exit code. `kept`: it goes on without us, and this is how the user
    calls the sandbox."""
    env = {"TERM": os.environ.get("TERM") or "xterm", **options.pop("env", {})}
    asked = {"pty": _size(), "stdin_stream": True, "env": env, **options}
    call = calls.start(ref, command, background=bool(kept), frames=not kept, **asked)
    screen = _Screen(link, ref, str(call.command_id), recorder, kept=kept)
    if not kept:
        return screen.show(call)
    link.call(call)
    return screen.show_kept(0)


class _Screen:
    """This terminal while it shows one inside."""

    def __init__(self, link: Link, ref: str, terminal: str, recorder: Recorder | None, *, kept: str) -> None:
        self._link = link
        self._ref = ref
        self._terminal = terminal
        self._recorder = recorder
        self._kept = kept
        self._offset = 0
        self._left = False

    def show_kept(self, offset: int) -> int:
        return self.show(calls.attach(self._ref, self._terminal, offset, -1))

    def show(self, call: Call) -> int:
        """Pass on what is written there and what is typed here, until it ends or is left."""
        exchange = self._link.open(call)
        exchange.raise_for_status()
        with _RawMode(), _Resizing(beside(self._link), self._ref, self._terminal) as resizing:
            try:
                for value in exchange.frames():
                    if isinstance(value, Output):
                        self._write(value.data)
                    elif isinstance(value, Started):
                        self._offset = value.stdout_start
                        resizing.begin()
                        self._feed(exchange)
                    elif isinstance(value, Event):
                        self._note(value)
                    else:
                        return exit_code(value)
            except AtollError:
                if not self._left:
                    raise
        if not self._left:
            return OWN_FAILURE
        say(f"\nLeft running: atoll attach {self._kept} --join {self._terminal} --offset {self._offset}")
        return 0

    def _write(self, data: bytes) -> None:
        write(1, data)
        self._offset += len(data)
        if self._recorder is not None:
            self._recorder.output(data)

    def _note(self, event: Event) -> None:
        gap = event.data.get("gap") or {}
        if gap.get("stream") == "stdout":
            self._offset = gap["offset"] + gap["bytes"]
            write(2, f"\r\natoll: {gap['bytes']} bytes of output are no longer kept\r\n".encode())

    def _feed(self, exchange: Exchange) -> None:
        if not self._kept:
            return feed_stdin(beside(self._link), self._ref, self._terminal)

        def leave() -> None:
            self._left = True
            exchange.interrupt()

        feed_until_left(beside(self._link), self._ref, self._terminal, leave)
        return None


def feed_until_left(link: Link, ref: str, terminal: str, leave: Callable[[], None]) -> None:
    """Pass on what is typed until Ctrl-P Ctrl-Q, or until there is no more; then `leave`."""

    def feed() -> None:
        held = b""
        try:
            while piece := os.read(0, PIECE):
                typed, found, _ = (held + piece).partition(LEAVE)
                held = LEAVE[:1] if not found and typed.endswith(LEAVE[:1]) else b""
                if typed := typed.removesuffix(held):
                    link.call(calls.send_stdin(ref, terminal, typed))
                if found:
                    break
        except (OSError, AtollError):
            return  # how the terminal ended is told by its own stream
        leave()

    start_new_thread(feed, ())


def _size() -> tuple[int, int]:
    for descriptor in (0, 1, 2):
        try:
            size = os.get_terminal_size(descriptor)
            return size.lines or 24, size.columns or 80  # a terminal nobody gave a size says 0
        except OSError:
            continue
    return 24, 80


def _modes() -> Any:
    """The two modules that change a terminal's mode; Unsupported where this system has none."""
    try:
        import termios
        import tty
    except ImportError:
        raise Unsupported("this system has no terminal that can be passed on", hint="run it without -t") from None
    return termios, tty


class _RawMode:
    """Standard input in raw mode, put back whatever happens: also when we are told to end."""

    def __enter__(self) -> None:
        termios, tty = _modes()
        self._saved = termios.tcgetattr(0) if os.isatty(0) else None
        self._handlers = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        if self._saved is not None:
            tty.setraw(0, termios.TCSADRAIN)

    def __exit__(self, *_: object) -> None:
        if self._saved is not None:
            termios, _ = _modes()
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
