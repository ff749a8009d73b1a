"""Tables and colours for people at a terminal; nothing of it when the output goes to a program."""

from __future__ import annotations

import os
import time

from .output import safe, say, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .grammar import Arguments

COLOURS = {
    "Active": 32, "running": 32, "ok": 32,
    "Paused": 33, "creating": 33, "paused": 33, "stopped": 33, "note": 33,
    "Terminating": 90, "ended": 90, "FAIL": 31,
}  # fmt: skip
WIDEST = 60


def for_people(arguments: Arguments) -> bool:
    """Whether standard output is a terminal and JSON was not asked for."""
    return not arguments.values.get("json") and os.isatty(1)


def coloured(text: str, word: str | None = None) -> str:
    """The text in the colour of its meaning, where colours are wanted."""
    code = COLOURS.get(word or text.strip())
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" or not os.isatty(1)
    return text if code is None or plain else f"\033[{code}m{text}\033[0m"


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """Columns as wide as they need to be. Cells are made safe first: names may come from inside a sandbox."""
    if not rows:
        say(empty)
        return
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(head), *(len(row[place]) for row in cells)) for place, head in enumerate(heads)]
    lines = ["  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True)).rstrip()]
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        padded[-1] = padded[-1].rstrip()
        lines.append("  ".join(coloured(cell) for cell in padded))
    write(1, ("\n".join(lines) + "\n").encode("utf-8", "replace"))


def record(fields: Sequence[tuple[str, Any]]) -> None:
    """One thing, a line for each of its fields; empty ones are left out."""
    given = [(name, value) for name, value in fields if value not in (None, "", [], {})]
    width = max(len(name) for name, _ in given) + 2
    shown = [(name, _block(value, width) if _has_lines(value) else _cell(value, 10_000)) for name, value in given]
    text = "\n".join(f"{name.ljust(width)}{coloured(value)}" for name, value in shown)
    write(1, (text + "\n").encode("utf-8", "replace"))


def age(seconds: float | None) -> str:
    """How long ago an instant was, in the largest unit that fits."""
    if not seconds:
        return "-"
    return span(time.time() - seconds)


def span(seconds: float) -> str:
    left = max(0, int(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if left >= 2 * size:
            return f"{left // size}{unit}"
    return f"{left}s"


def clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def plain(value: Any) -> str:
    """Return a value as a person writes it: no braces, quotes or True."""
    if isinstance(value, dict):
        if set(value) == {"value", "enforced"}:
            return plain(value["value"]) + ("" if value["enforced"] else " (not enforced)")
        parts = []
        for key, item in value.items():
            if item not in (None, "", [], {}):
                inner = plain(item)
                grouped = isinstance(item, dict) and set(item) != {"value", "enforced"}
                parts.append(f"{key}=({inner})" if grouped else f"{key}={inner}")
        return " ".join(parts)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.10g}"
    return "-" if value is None else str(value)


def _has_lines(value: Any) -> bool:
    return isinstance(value, str) and "\n" in value.strip("\n")


def _block(text: str, width: int) -> str:
    """Return lines of text below each other, in the column of the values."""
    return ("\n" + " " * width).join(safe(text).rstrip("\n").split("\n"))


def _cell(value: Any, widest: int = WIDEST) -> str:
    if value is None or value == "":
        return "-"
    text = safe(plain(value)).replace("\n", " ").replace("\t", " ")
    return text if len(text) <= widest else text[: widest - 1] + "…"
