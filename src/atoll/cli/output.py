"""Print the CLI's output: JSON and errors in one place, and text made safe for terminals.

Names, messages and logs may come from inside a sandbox. Printed as they are, they could retitle or type into the
operator's terminal, so control characters are shown escaped; JSON is pure ASCII anyway.
"""

from __future__ import annotations

import os
import sys

from ..client.codec import dumps
from ..words.k8e import EXHAUSTED, FAILED, OK, UNREACHABLE

__all__ = ["EXHAUSTED", "FAILED", "OK", "UNREACHABLE"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..errors import AtollError

USAGE, TIMED_OUT, OWN_FAILURE = 2, 124, 125  # those of the other verbs
INTERRUPTED, BROKEN_PIPE = 130, 141
NAMES = ("atoll", "k8e", "k8e-sandbox", "k8e-sandbox-cli", "agentkernel", "iii-worker")


def program_name() -> str:
    """Return the name this program was called by, as hints and help use it."""
    name = os.path.basename(sys.argv[0])
    return name if name in NAMES else "atoll"


class _Manner:
    """How this call prints: `json` when --json was given; `collected` is then what a verb for people wrote to stdout."""

    json = False
    collected: list[bytes] | None = None


def begin_output(as_json: bool, collect: bool) -> None:
    """Settle the manner of this call. With `collect`, text on stdout is kept back for `end_output`."""
    _Manner.json = as_json
    _Manner.collected = [] if as_json and collect else None


def end_output(code: int) -> None:
    """With --json, a verb that printed text and no JSON of its own is told as one object."""
    kept, _Manner.collected = _Manner.collected, None
    if kept is not None:
        text = b"".join(kept).decode("utf-8", "replace")
        print_json({"ok": code == 0, "exit_code": code, "stdout": text})


def for_people() -> bool:
    """Return whether standard output is a terminal and JSON was not asked for."""
    return not _Manner.json and os.isatty(1)


def print_json(value: Any) -> None:
    """Print an answer: JSON for programs, and where it was asked for; lines and tables for a person at a terminal."""
    _Manner.collected = None
    if for_people():
        from .views import show_value

        show_value(value)
        return
    write(1, (dumps(value) + "\n").encode("ascii"))


_error_stream = [1]


def errors_to_stderr() -> None:
    """From here on an error's JSON goes to stderr: standard output carries a command's or a file's own bytes."""
    _error_stream[0] = 2


def print_error(value: Mapping[str, object]) -> None:
    """Print an error of a `sandbox` verb: JSON for programs, two lines for a person at a terminal."""
    if os.isatty(_error_stream[0]) and not _Manner.json:
        say(f"{program_name()}: {value['detail']}")
        return
    write(_error_stream[0], (dumps(value) + "\n").encode("ascii"))


def write(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """All of it, unbuffered: what was printed is out even if we are killed next."""
    if descriptor == 1 and _Manner.collected is not None:
        _Manner.collected.append(bytes(data))
        return
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            import select

            select.select([], [descriptor], [], 1.0)


def say(text: str) -> None:
    """A line for a person, on stderr."""
    write(2, (safe(in_own_name(text)) + "\n").encode("utf-8", "replace"))


def in_own_name(text: str) -> str:
    """Return a text whose command lines begin with the name this program was called by."""
    name = program_name()
    if name == "atoll" or "atoll" not in text:
        return text
    import re

    from .verbs import VERBS

    first = "|".join(sorted({verb.name.split()[0] for verb in VERBS}))
    return re.sub(rf"(?<![\w/.-])atoll(?= (?:{first}|<command>)\b|: )", name, text)


def tell(text: str) -> None:
    """A line for a person, on stdout."""
    write(1, (safe(text) + "\n").encode("utf-8", "replace"))


def safe(text: str) -> str:
    """Control characters but newline and tab as \\xNN; direction marks and other invisible ones as \\uNNNN."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join([c if c in "\n\t" or c.isprintable() else _escaped(c) for c in text])


def safe_bytes(data: bytes) -> bytes:
    """The same for bytes on their way to a terminal: whole lines of UTF-8, everything else escaped."""
    return safe(data.decode("utf-8", "backslashreplace").replace("\r\n", "\n")).encode("utf-8", "replace")


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def error_object(error: AtollError) -> Mapping[str, object]:
    detail = in_own_name(error.message + (f" ({error.hint})" if error.hint else ""))
    found: dict[str, object] = {"ok": False, "error": error.code, "detail": detail, "retry": error.retry}
    if error.details:
        found["details"] = error.details
    return found


def k8e_exit(error: AtollError) -> int:
    if error.code == "daemon_unreachable":
        return UNREACHABLE
    return EXHAUSTED if error.http_status == 429 else FAILED


def _in_flags(error: AtollError) -> None:
    """A field of the request that was out of its bounds, by the flag the person typed."""
    field, said, rest = error.message.partition(" must be ")
    field = field.removeprefix("sandbox.").partition("[")[0]
    if error.code == "invalid_argument" and said and field in _FLAGS:
        flag, example = _FLAGS[field]
        error.message = f"{flag} must be {rest}"
        error.hint = error.hint or f"for example {flag} {example}"


_FLAGS = {
    "limits.memory_mb": ("--memory", "512"), "limits.cpus": ("--cpus", "2"), "limits.pids": ("--pids", "256"),
    "limits.files": ("--files", "1024"), "limits.disk_mb": ("--disk", "2048"), "limits.shm_mb": ("--shm", "128"),
    "lifetime_s": ("--lifetime", "3600"),
    "idle_timeout_s": ("--idle-timeout", "1800"), "host_ports": ("--host-access", "8000"),
}  # fmt: skip


def report(error: AtollError, as_json: bool) -> int:
    """Print the error in the manner of the verb; the exit code."""
    _in_flags(error)
    _Manner.collected = None
    if as_json or _Manner.json:
        print_error(error_object(error))
        return k8e_exit(error) if as_json else OWN_FAILURE
    name = program_name()
    say(f"{'Error' if name == 'agentkernel' else name}: {error.message}")
    hint = error.hint or (f"`{name} list` shows yours" if error.message.startswith("no sandbox ") else "")
    if hint:
        say(f"  {hint}")
    return OWN_FAILURE


def silence() -> None:
    """After a broken pipe: nothing more to say, and nothing may fail at exit because of it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    sys.stdout = None
