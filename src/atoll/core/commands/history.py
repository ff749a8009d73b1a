"""History: events in the store, and a transcript per sandbox in a file the sandbox cannot reach.

A transcript line is `<unix ms> <o|e|i> <command id> <text>`: `i` is what the host asked, a fact; `o` and `e` are what the
guest sent, its claim. Text is escaped, so that output can neither forge a line nor carry terminal control codes.
"""

import asyncio
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from atoll import errors
from atoll.core.store.records import Store
from atoll.core.store.typed import EventRow

log = logging.getLogger("atoll.history")

CAP = 8 * 1024 * 1024
ENDED_BYTES = 512 * 1024 * 1024  # of transcripts of one owner's sandboxes that have ended
PER_COMMAND = 1024 * 1024  # bytes of each stream of one command that enter the transcript
WINDOW_DEFAULT, WINDOW_MOST = 64 * 1024, 256 * 1024
OPEN_FILES = 64
MAX_LINE = 4096
MASKED_FROM = 4
MASKED_LINE_FROM = 8  # of one line of a longer value
ENDINGS = ("ended", "stopped", "command")  # events that are recorded also when only the reserve is left

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\\\ud800-\udfff]")


_ESCAPES = str.maketrans(
    {char: char.encode("unicode_escape").decode() for char in map(chr, range(0xE000)) if _CONTROL.match(char)}
)


Event = dict[str, Any]  # `seq`, `sandbox_id`, `at`, `kind`, and what its kind tells


def escape(text: str) -> str:
    return text.translate(_ESCAPES) if _CONTROL.search(text) else text


class Window(TypedDict):
    """A part of a transcript, by the bytes ever written; `truncated_before`: the beginning asked for is no longer kept."""

    output: str
    offset: int
    next_offset: int
    truncated_before: bool
    eof: bool


class Writer:
    """One command's part of a transcript: whole lines, up to a bound."""

    def __init__(self, history: "History", sandbox: str, command: str) -> None:
        self._history = history
        self._sandbox = sandbox
        self._command = command
        self._partial = {"o": b"", "e": b""}
        self._left = {"o": PER_COMMAND, "e": PER_COMMAND}

    def asked(self, text: str) -> None:
        self._history.append(self._sandbox, self._line("i", text[:MAX_LINE]))

    def output(self, stream: str, data: bytes) -> None:
        left = self._left[stream]
        if left <= 0:
            return
        lines = (self._partial[stream] + data[:left]).split(b"\n")
        self._left[stream] = left - len(data)
        self._partial[stream] = lines.pop()
        if len(self._partial[stream]) > MAX_LINE or self._left[stream] <= 0:
            kept = self._history.longest_mask(self._sandbox) if self._left[stream] > 0 else 0
            cut = len(self._partial[stream]) - min(kept, MAX_LINE)  # a secret may have begun and not ended yet
            lines.append(self._partial[stream][:cut])
            self._partial[stream] = self._partial[stream][cut:]
        text = "".join(self._line(stream, line.decode("utf-8", "surrogateescape")) for line in lines)
        if self._left[stream] <= 0:
            text += self._line(stream, "(more output follows, not recorded)")
        if text:
            self._history.append(self._sandbox, text)

    def close(self) -> None:
        for stream, rest in self._partial.items():
            if rest:
                self._history.append(self._sandbox, self._line(stream, rest.decode("utf-8", "surrogateescape")))
        self._partial = {"o": b"", "e": b""}

    def _line(self, stream: str, text: str) -> str:
        return f"{int(time.time() * 1000)} {stream} {self._command} {escape(text)}\n"


class History:
    """Transcripts and events of all sandboxes."""

    def __init__(self, store: Store, directory: Path) -> None:
        self._store = store
        self._directory = directory
        directory.mkdir(mode=0o700, exist_ok=True)
        self._files: OrderedDict[str, int] = OrderedDict()
        self._news = asyncio.Event()
        self._lacking: set[str] = set()  # sandboxes whose transcript could not be written last time
        self._masks: dict[str, tuple[str, ...]] = {}  # values of secrets, which a transcript shows as ***

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    # Events

    def record(self, sandbox: str, owner: str, kind: str, **data: Any) -> None:
        self._add(sandbox, owner, kind, data, time.time())

    def record_later(self, sandbox: str, owner: str, kind: str, **data: Any) -> None:
        """Record an event behind the answer, with the time of this call."""
        at = time.time()
        self._store.later(lambda: self._add(sandbox, owner, kind, data, at))

    def _add(self, sandbox: str, owner: str, kind: str, data: Mapping[str, object], at: float) -> None:
        if self._store.low and kind not in ENDINGS:
            return  # what room is left is for endings
        self._store.add_event(sandbox, owner, kind, data, at)
        self._news.set()
        self._news = asyncio.Event()

    def events(
        self, owner: str, sandbox: str | None, limit: int, after: int | None, kind: str | None = None
    ) -> list[Event]:
        return [_shown(row) for row in self._store.events(owner, sandbox, limit=limit, after=after, kind=kind)]

    async def wait_for_news(self) -> None:
        await self._news.wait()

    # Transcripts

    def writer(self, sandbox: str, command: str) -> Writer:
        return Writer(self, sandbox, command)

    def mask(self, sandbox: str, values: Collection[str]) -> None:
        """Keep these values, the secrets of a sandbox, out of its transcript. Very short ones would blank all the rest.

        A transcript has lines, so each line of a value is kept out by itself."""
        found = {escape(value) for value in values if len(value) >= MASKED_FROM}
        found |= {escape(line) for value in values for line in value.splitlines() if len(line) >= MASKED_LINE_FROM}
        if found:
            known = found.union(self._masks.get(sandbox, ()))
            self._masks[sandbox] = tuple(sorted(known, key=len, reverse=True))  # the longest first: it may hold others

    def longest_mask(self, sandbox: str) -> int:
        """Bytes of the longest value that is kept out of a transcript."""
        return max((len(value.encode("utf-8", "surrogateescape")) for value in self._masks.get(sandbox, ())), default=0)

    def append(self, sandbox: str, text: str) -> None:
        for value in self._masks.get(sandbox, ()):
            text = text.replace(value, "***")
        try:
            fd = self._open(sandbox)
            os.write(fd, text.encode())
            if os.fstat(fd).st_size > CAP:
                self._halve(sandbox)
        except OSError as error:  # a full disk costs the transcript its newest lines, and no command its result
            if sandbox not in self._lacking:
                self._lacking.add(sandbox)
                log.error("the transcript of sandbox %s lacks lines: %s", sandbox, error.strerror)
        else:
            if sandbox in self._lacking:
                self._lacking.discard(sandbox)
                os.write(
                    fd, f"{int(time.time() * 1000)} i - (lines are missing here: the host's disk was full)\n".encode()
                )

    def window(self, sandbox: str, offset: int, limit: int) -> Window:
        """Whole lines from `offset`, which counts from the first line ever written; what the cap took is skipped."""
        size = min(limit or WINDOW_DEFAULT, WINDOW_MOST)
        gone = self._gone(sandbox)
        start = max(offset, gone)
        try:
            with open(self._path(sandbox), "rb") as file:
                end = gone + os.fstat(file.fileno()).st_size
                start = min(start, end)
                file.seek(start - gone)
                data = file.read(size)
        except FileNotFoundError:
            return {"output": "", "offset": 0, "next_offset": 0, "truncated_before": False, "eof": True}
        if start + len(data) < end and (cut := data.rfind(b"\n")) >= 0:
            data = data[: cut + 1]
        return {
            "output": data.decode("utf-8", "replace"),
            "offset": start,
            "next_offset": start + len(data),
            "truncated_before": offset < gone,
            "eof": start + len(data) >= end,
        }

    def purge(self) -> None:
        """Forget what ended long ago or is beyond what an owner may leave behind, records and transcripts, the oldest first."""
        for sandbox in self._store.purge():
            self.forget(sandbox)
        left: dict[str, int] = {}
        for owner, sandbox in self._store.ended():
            with suppress(FileNotFoundError):
                left[owner] = left.get(owner, ENDED_BYTES) - self._path(sandbox).stat().st_size
                if left[owner] < 0:
                    self.forget(sandbox)

    def forget(self, sandbox: str) -> None:
        self._masks.pop(sandbox, None)
        self._lacking.discard(sandbox)
        fd = self._files.pop(sandbox, None)
        if fd is not None:
            os.close(fd)
        self._path(sandbox).unlink(missing_ok=True)
        self._path(sandbox).with_suffix(".gone").unlink(missing_ok=True)

    def _path(self, sandbox: str) -> Path:
        return self._directory / f"{sandbox}.log"

    def _gone(self, sandbox: str) -> int:
        try:
            return int(self._path(sandbox).with_suffix(".gone").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _open(self, sandbox: str) -> int:
        fd = self._files.get(sandbox)
        if fd is None:
            fd = os.open(self._path(sandbox), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._files[sandbox] = fd
            if len(self._files) > OPEN_FILES:
                _, oldest = self._files.popitem(last=False)
                os.close(oldest)
        else:
            self._files.move_to_end(sandbox)
        return fd

    def _halve(self, sandbox: str) -> None:
        """Drop the older half, at a line. A crash in between shows lines twice at worst."""
        path = self._path(sandbox)
        os.close(self._files.pop(sandbox))
        data = path.read_bytes()
        cut = data.find(b"\n", len(data) // 2) + 1
        fresh = path.with_suffix(".new")
        fresh.write_bytes(data[cut:])
        fresh.chmod(0o600)
        path.with_suffix(".gone").write_text(str(self._gone(sandbox) + cut))
        os.replace(fresh, path)


def _shown(row: EventRow) -> Event:
    return {"seq": row["seq"], "sandbox_id": row["sandbox_id"], "at": row["at"], "kind": row["kind"], **row["data"]}


def check_window(offset: int, limit: int) -> None:
    if offset < 0 or limit < 0:
        raise errors.InvalidArgument("offset and limit must not be negative")
