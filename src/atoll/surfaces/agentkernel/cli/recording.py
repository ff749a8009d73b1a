"""Terminal sessions on file: asciicast v2, written while they happen and replayed byte for byte.

The format holds text, output is bytes. UTF-8 passes as it is, also when a character is cut between two pieces; any other
byte is kept as a lone surrogate (`\\udcXX`), which is valid JSON and turns back into that byte when replayed here.
"""

from __future__ import annotations

import codecs
import json
import os
import time

from atoll.cli.output import say, write
from atoll.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any

    from atoll.cli.grammar import Arguments


class Recorder:
    """Writes one session. Each event is in the file before the next is read, so that a crash loses nothing."""

    def __init__(self, path: str, cols: int, rows: int, command: str, title: str) -> None:
        self.path = path
        self._begin = time.monotonic()
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._file: IO[str] = os.fdopen(descriptor, "w", encoding="ascii", buffering=1)
        head = {
            "version": 2, "width": cols, "height": rows, "timestamp": int(time.time()), "command": command,
            "title": title, "env": {"TERM": os.environ.get("TERM") or "xterm"},
        }  # fmt: skip
        self._file.write(json.dumps(head) + "\n")

    def output(self, data: bytes) -> None:
        text = self._decoder.decode(data)
        if text:
            self._write(text)

    def close(self) -> None:
        rest = self._decoder.decode(b"", final=True)
        if rest:
            self._write(rest)
        self._file.close()

    def _write(self, text: str) -> None:
        at = round(time.monotonic() - self._begin, 6)
        self._file.write(json.dumps([at, "o", text]) + "\n")


def recording_path(given: str, name: str) -> str:
    """Where a recording goes: the file named, a file of its own in the directory named, or in the usual place."""
    own = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.cast"
    if not given:
        from atoll.client.spawn import home_directory

        from .words import called_agentkernel

        home = (
            os.path.join(os.path.expanduser("~"), ".agentkernel")
            if called_agentkernel() and not os.environ.get("ATOLL_HOME")
            else home_directory()
        )
        given = os.path.join(home, "recordings")
        os.makedirs(given, mode=0o700, exist_ok=True)
    return os.path.join(given, own) if os.path.isdir(given) else given


def replay(arguments: Arguments) -> int:
    if not arguments.speed > 0 or not arguments.max_idle >= 0:
        raise InvalidArgument("--speed must be above 0 and --max-idle not below it")
    path = arguments.rest[0]
    try:
        with open(path, encoding="utf-8") as file:
            return _play(path, file, arguments.speed, arguments.max_idle)
    except OSError as failure:
        raise InvalidArgument(f"{path}: {failure.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not a recording: not UTF-8") from None


def _play(path: str, file: IO[str], speed: float, max_idle: float) -> int:
    head = _line(path, 1, file.readline())
    if not isinstance(head, dict) or head.get("version") != 2:
        raise InvalidArgument(f"{path} is not an asciicast of version 2")
    say(f"--- replay of {os.path.basename(path)}, {head.get('width')}x{head.get('height')} ---")
    now, events = 0.0, 0
    for number, line in enumerate(file, 2):
        if not line.strip():
            continue
        event = _line(path, number, line)
        if not isinstance(event, list) or len(event) != 3 or not isinstance(event[2], str):
            raise InvalidArgument(f"{path} line {number} is not an event")
        at, kind, text = event
        if isinstance(at, bool) or not isinstance(at, (int, float)) or at != at:
            raise InvalidArgument(f"{path} line {number} has no time")
        if kind != "o":
            continue
        pause = min(max(at - now, 0.0), max_idle)
        if pause:
            time.sleep(pause / speed)
        now, events = at, events + 1
        write(1, text.encode("utf-8", "surrogateescape"))
    say(f"--- end of replay, {events} events, {now:.1f} s ---")
    return 0


def _line(path: str, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidArgument(f"{path} line {number} is not JSON") from None
