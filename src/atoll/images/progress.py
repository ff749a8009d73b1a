"""How far a pull or a build is, for whoever wants to show it."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TextIO

BUILD_TAKES = "one to five minutes"  # of Debian packages, by their number and the machine

Stage = Literal["resolve", "download", "unpack", "build", "step", "log", "done"]


@dataclass(frozen=True, slots=True)
class Progress:
    """One step: `done` of `total` bytes (0 when unknown), and one printable line about what is going on."""

    stage: Stage
    text: str
    done: int = 0
    total: int = 0


# Called from the threads that do the work, never by two at once. Raising from it gives the pull or build up.
ProgressCallback = Callable[[Progress], None]


def silent(_progress: Progress) -> None:
    """For callers who do not watch."""


def printable(text: str) -> str:
    """Text of foreign origin without the bytes that steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


class TerminalBar:
    """Draws progress on one line of a terminal; on anything else, one line every few seconds."""

    def __init__(self, stream: TextIO = sys.stderr, width: int = 28, interval: float = 0.1, pause: float = 3.0) -> None:
        self._stream = stream
        self._width = width
        self._interval = interval
        self._pause = pause
        self._terminal = stream.isatty()
        self._drawn = 0.0
        self._begin = time.monotonic()
        self._last: tuple[Stage, str] | None = None
        self._begun: set[tuple[Stage, str]] = set()  # of what goes on side by side

    def __call__(self, progress: Progress) -> None:
        step = (progress.stage, progress.text)
        if self._terminal and progress.stage in ("done", "step"):  # what came of it stays to be read
            print(f"\r\x1b[K{printable(progress.text)}", file=self._stream, flush=True)
        elif self._terminal:
            self._draw(progress)
        elif self._is_due(progress):
            self._drawn = time.monotonic()
            part = f" {_size(progress.done)}/{_size(progress.total)}" if progress.total else ""
            if progress.stage == "build":
                part = f" {self._so_far()}:"
            print(f"{progress.stage}:{part} {printable(progress.text)}", file=self._stream, flush=True)
        self._last = step
        if progress.total:
            self._begun.add(step)

    def _is_due(self, progress: Progress) -> bool:
        """Return whether this step gets a line: the beginning of a layer or stage, the end, and one every few seconds."""
        if progress.stage == "step":
            return True
        begun = (progress.stage, progress.text if progress.total else "")
        if begun not in self._begun or progress.stage == "done":
            self._begun.add(begun)
            return True
        return time.monotonic() - self._drawn >= self._pause

    def _so_far(self) -> str:
        """Return how long it has taken. How much is left nobody knows."""
        return f"{time.monotonic() - self._begin:.0f} s of {BUILD_TAKES}"

    def close(self) -> None:
        """Leave the cursor on a fresh line."""
        if self._terminal and self._last is not None and self._last[0] != "done":
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _draw(self, progress: Progress) -> None:
        now = time.monotonic()
        finished = progress.total and progress.done >= progress.total
        going_on = (progress.stage, progress.text) in self._begun or progress.stage == (self._last or ("",))[0]
        if now - self._drawn < self._interval and not finished and going_on:
            return
        self._drawn = now
        line = f"{progress.stage:<8} "
        if progress.stage == "build":
            line += f"{self._so_far()}  "
        if progress.total:
            filled = self._width * min(progress.done, progress.total) // progress.total
            line += f"[{'#' * filled}{'.' * (self._width - filled)}] {_size(progress.done)}/{_size(progress.total)} "
        print(f"\r\x1b[K{line}{printable(progress.text)[:60]}", end="", file=self._stream, flush=True)


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit in ("B", "KB") else f"{value:.1f} {unit}"
        value /= 1000
    return f"{count} B"
