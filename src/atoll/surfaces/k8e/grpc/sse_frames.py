"""K8E's own framing of a command's output: `data: {"pid":N}`, the output, `data: {"exit":N}`.

Each frame ends with a blank line, and a line of output is one frame. A decoder gets the output back
when it joins the frames between the first and the last with newlines.
"""

from __future__ import annotations

import json

from .text import Pieces

MOST_HELD = 64 * 1024  # characters of an unfinished line


class Frames:
    """The frames of one command. Both streams are mixed, whole lines at a time."""

    def __init__(self) -> None:
        self._text = {1: Pieces(), 2: Pieces()}
        self._partial = {1: "", 2: ""}
        self._ended_with_newline = False

    def start(self, pid: int) -> str:
        return _frame(json.dumps({"pid": pid}))

    def add(self, channel: int, data: bytes) -> str:
        """Return the frames of the lines that this piece of output completes."""
        return self._take(channel, self._text[channel].feed(data))

    def end(self, exit_code: int) -> str:
        """Return the rest of the output and the frame with the exit code."""
        rest = "".join(self._take(channel, text.feed(b"", last=True)) for channel, text in self._text.items())
        left = "".join(self._partial.values())
        if left or self._ended_with_newline:
            rest += _frame(left)
        return rest + _frame(json.dumps({"exit": exit_code}))

    def _take(self, channel: int, text: str) -> str:
        *lines, self._partial[channel] = (self._partial[channel] + text).split("\n")
        if len(self._partial[channel]) > MOST_HELD:
            lines.append(self._partial[channel])
            self._partial[channel] = ""
        if lines:
            self._ended_with_newline = True
        return "".join(_frame(line) for line in lines)


def _frame(text: str) -> str:
    return f"data: {text}\n\n"
