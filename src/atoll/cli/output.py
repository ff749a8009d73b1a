"""What the CLI prints: JSON and errors in one place, and text made safe for terminals.

Names, messages and logs may come from inside a sandbox. Printed as they are, they could retitle or type into the
operator's terminal, so control characters are shown escaped; JSON is pure ASCII anyway.
"""

from __future__ import annotations

import os
import sys

from ..client.codec import dumps
from ..surfaces.k8e.words import EXHAUSTED, FAILED, OK, UNREACHABLE

__all__ = ["EXHAUSTED", "FAILED", "OK", "UNREACHABLE"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..errors import AtollError

USAGE, TIMED_OUT, OWN_FAILURE = 2, 124, 125  # those of the other verbs
INTERRUPTED, BROKEN_PIPE = 130, 141


def print_json(value: Any) -> None:
    write(1, (dumps(value) + "\n").encode("ascii"))


def write(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """All of it, unbuffered: what was printed is out even if we are killed next."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            import select

            select.select([], [descriptor], [], 1.0)


def say(text: str) -> None:
    """A line for a person, on stderr."""
    write(2, (safe(text) + "\n").encode("utf-8", "replace"))


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


def error_object(error: AtollError) -> dict[str, Any]:
    detail = error.message + (f" ({error.hint})" if error.hint else "")
    found: dict[str, Any] = {"ok": False, "error": error.code, "detail": detail, "retry": error.retry}
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
    if as_json:
        print_json(error_object(error))
        return k8e_exit(error)
    say(f"{'Error' if os.path.basename(sys.argv[0]) == 'agentkernel' else 'atoll'}: {error.message}")
    hint = error.hint or ("`atoll list` shows yours" if error.message.startswith("no sandbox ") else "")
    if hint:
        say(f"  {hint}")
    return OWN_FAILURE


def silence() -> None:
    """After a broken pipe: nothing more to say, and nothing may fail at exit because of it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    sys.stdout = None
