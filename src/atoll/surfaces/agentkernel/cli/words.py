"""Small words of this command line: sandbox names, durations, sizes, and the name the program was called by."""

from __future__ import annotations

import os
import sys

from atoll.cli.grammar import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_NAME = 63
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
BACKENDS = {"docker": "container", "podman": "container", "microvm": "microvm", "firecracker": "firecracker"}


def called_agentkernel() -> bool:
    return os.path.basename(sys.argv[0]) == "agentkernel"


def sandbox_name(text: str) -> str:
    """1 to 63 ASCII letters and digits, inside also `-` and `_`, never two of those in a row."""
    plain = text.replace("-", "_")
    good = text.isascii() and 0 < len(text) <= MAX_NAME and plain.replace("_", "").isalnum()
    if not good or plain[0] == "_" or plain[-1] == "_" or "__" in plain:
        raise UsageError(
            f"{text[:80]!r} is not a sandbox name",
            "1 to 63 letters and digits, with single - or _ between them",
        )
    return text


def image_name(text: str) -> str:
    allowed = text.isascii() and all(c.isalnum() or c in "._/:@-" for c in text)
    if not 1 <= len(text) <= 256 or not allowed:
        raise UsageError(f"{text[:80]!r} is not an image's name")
    return text


def duration(text: str, flag: str) -> float | None:
    """`30s`, `30m`, `1h`, `3d` in seconds; None for `0`, which is no end. A bare number is seconds."""
    number, unit = (text[:-1], text[-1]) if text and text[-1] in _UNITS else (text, "s")
    try:
        value = float(number) * _UNITS[unit]
        if not 0 <= value < 10**9:
            raise ValueError
    except ValueError:
        raise UsageError(f"--{flag} needs a duration such as 30s, 30m, 1h or 3d, not {text!r}") from None
    return value or None


def runtime(text: str | None) -> str | None:
    """The runtime behind agentkernel's word for a backend."""
    if text is None:
        return os.environ.get("ATOLL_RUNTIME") or None
    name = BACKENDS.get(text, text)
    from atoll.backends import registry

    if name not in (*registry.names(), *registry.ELSEWHERE):
        from atoll.errors import Unsupported

        raise Unsupported(f"the backend {text!r} is not one of atoll's", hint=f"use {', '.join(registry.names())}")
    return name


def size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit in ("B", "KB") else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Columns under their heads, as wide as what is in them."""
    every = [head, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in every
    )
