"""The audit log: who did what to which sandbox, when, from where, with what result.

JSON lines, appended and never rewritten. Each line carries the hash of the line before it, so that an edit, a removed or an
inserted line breaks the chain at that place and `verify` names it. A cut at the very end cannot be seen from the file alone:
the newest hash is therefore also kept in `audit.head`, written after each append. A daemon that starts on a log shorter than
its head says so in a record of its own (`audit.gap`), which every later `verify` reports.

A record is at most a few KiB and the log at most `keep` bytes. The oldest segment goes when there are more: a record says so
(`audit.retired`, with the last hash of what went), `audit.anchor` has the same, and `verify` begins there. On a full disk the
log has blocks of its own for endings (`reserve.py`); an ending that does not fit even there is owed, and written later.
"""

import asyncio
import errno
import functools
import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from atoll.core.store.reserve import Headroom

log = logging.getLogger("atoll.audit")

GENESIS = "0" * 64
KEEP = 1 << 30
MAX_DETAILS = 3 << 10  # bytes of one record that its caller chose
MAX_OWED = 10_000  # records of endings that wait for room
_ROTATE_BYTES = 64 << 20
_KEPT_FOR_ENDINGS, _STEP = 2 << 20, 1 << 20
_MAX_TEXT = 2048
_NARROWER = ((_MAX_TEXT, 64), (256, 32), (64, 16), (32, 4))  # characters of a text, items of a list
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode  # one form only: it is what is hashed


class Entry(TypedDict):
    """One record. `of`: the number of the record whose end this one tells."""

    seq: int
    at: float
    who: str
    action: str
    sandbox: str
    result: str
    source: str
    of: NotRequired[int]
    details: dict[str, object]


class Verdict(NamedTuple):
    """The result of `verify`: how many records hold, and the first place that does not."""

    ok: bool
    records: int
    problem: str = ""


def _digest(previous: str, body: str) -> str:
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()


def _short(value: Any, text: int, items: int) -> Any:
    if isinstance(value, str) and len(value) > text:
        return value[:text] + f"...({len(value)} characters)"
    if isinstance(value, dict):
        return {str(k)[:64]: _short(v, text, items) for k, v in list(value.items())[:64]}
    if isinstance(value, list | tuple):
        return [_short(v, text, items) for v in list(value)[:items]]
    return value


def _bounded(details: Mapping[str, object]) -> Mapping[str, object]:
    """The details in at most `MAX_DETAILS` bytes. What was cut is named by its size and hash: it can be shown later."""
    whole = ""
    for text, items in _NARROWER:
        kept: dict[str, object] = _short(details, text, items)
        said = _encode(kept)
        if whole:
            kept["cut"] = {"bytes": len(whole), "sha256": hashlib.sha256(whole.encode()).hexdigest()}
        if len(said) <= MAX_DETAILS:
            return kept
        whole = whole or said
    return {"cut": kept["cut"]}


class Owed:
    """The record of an ending that waits for room; `seq` is its number once it is written."""

    __slots__ = ("record", "seq")

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.seq = 0


class Audit:
    """One writer per state directory. A record that cannot be written stops the action: `record` raises. Only an ending
    goes on (`record_or_owe`)."""

    def __init__(self, directory: Path, keep: int = KEEP) -> None:
        self._directory = directory
        self._keep = keep
        self._lock = threading.RLock()
        self._due: list[Callable[[], int]] = []  # ends that are being answered
        self._owed: deque[Owed] = deque()  # endings that were done and could not be written down yet
        self._dropped = 0  # of those, the ones beyond MAX_OWED
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = directory / "audit.jsonl"
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._headroom = Headroom(self._fd, _KEPT_FOR_ENDINGS, _STEP)
        self._head_fd = os.open(directory / "audit.head", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._seq, self._head = self._resume()
        self._compare()

    def record(self, who: str, action: str, sandbox: str = "", result: str = "ok", **record: Any) -> int:
        """Append one record, as `_add` takes it; it is in the file when this returns."""
        with self._lock:
            self._catch_up()
            return self._add(who, action, sandbox, result, **record)

    def record_or_owe(self, **record: Any) -> "Owed | int":
        """Append the record of an ending, from the reserve if need be. One that does not fit is owed, and written later."""
        try:
            with self._lock:
                self._catch_up()
                return self._add(**record, ending=True)
        except OSError as error:
            log.error("%s of %s goes on without a record: %s", record["action"], record["sandbox"], error.strerror)
            owed = Owed({**record, "at": time.time(), "late": True})
            if len(self._owed) < MAX_OWED:
                self._owed.append(owed)
            else:
                self._dropped += 1
            return owed

    def settle(self) -> None:
        """Write what is owed, if there is room again."""
        self._end_turn()

    def record_end(self, **record: Any) -> None:
        """Append how an action ended that has its record already, behind the answer that is just being given: before
        anything else is recorded, read or verified. A daemon killed in between leaves an action whose end is not known."""
        self._due.append(functools.partial(self._add, **record, at=time.time(), ending=True))
        asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        try:
            with self._lock:
                self._catch_up()
        except OSError as error:  # the next action finds out too, and is refused
            log.error("the audit log cannot be written: %s", error)

    def _catch_up(self) -> None:
        while self._due:
            ended = self._due.pop(0)
            try:
                ended()
            except BaseException:
                self._due.insert(0, ended)
                raise
        while self._owed:
            self._owed[0].seq = self._add(**self._owed[0].record)
            self._owed.popleft()
        if self._dropped:
            self._add("atoll", "audit.dropped", result="lost", records=self._dropped)
            self._dropped = 0

    @property
    def seq(self) -> int:
        """The number of the newest record."""
        with self._lock:
            self._catch_up()
        return self._seq

    def files(self) -> list[Path]:
        """All segments, oldest first."""
        return [*_segments(self._directory), self._path]

    def read(self, *, sandbox: str = "", who: str = "", after: int = 0) -> Iterator[Entry]:
        self._end_turn()
        for path in self.files():
            with open(path, encoding="utf-8") as lines:
                for line in lines:
                    if not line.endswith("\n"):
                        break  # it is being written
                    record = json.loads(line)["record"]
                    if record["seq"] > after and sandbox in ("", record["sandbox"]) and who in ("", record["who"]):
                        yield record

    def verify(self) -> Verdict:
        """Walk the whole chain."""
        with self._lock:
            self._catch_up()
            return verify(self._directory)

    def close(self) -> None:
        self._end_turn()
        os.close(self._fd)
        os.close(self._head_fd)

    def _add(
        self,
        who: str,
        action: str,
        sandbox: str = "",
        result: str = "ok",
        *,
        source: str = "",
        of: int = 0,
        at: float | None = None,
        ending: bool = False,
        **details: Any,
    ) -> int:
        """`of` is the number of the record whose end this tells; `ending` may use what is kept for endings."""
        body = _encode(
            {
                "seq": self._seq + 1,
                "at": round(time.time() if at is None else at, 3),
                "who": who[:256],
                "action": action,
                "sandbox": sandbox[:256],
                "result": result,
                "source": source[:256],
                **({"of": of} if of else {}),
                "details": _bounded(details),
            }
        )
        head = _digest(self._head, body)
        line = f'{{"hash":"{head}","record":{body}}}\n'.encode()
        self._headroom.take(self._size, len(line), ending=ending)
        self._append(line)
        self._seq, self._head = self._seq + 1, head
        self._size += len(line)
        self._write_head()
        if self._size > _ROTATE_BYTES:
            self._rotate()
        return self._seq

    def _append(self, line: bytes) -> None:
        """All of it or nothing: on a full disk half a line would spoil the next record too."""
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, "the audit log could not be written")
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            self._headroom.lost()
            raise

    def _write_head(self) -> None:
        os.pwrite(self._head_fd, f"{self._seq:020d} {self._head}\n".encode(), 0)

    def _compare(self) -> None:
        """The log as it is found against the head as it was left. A head one behind is a crash between the two writes."""
        said = os.pread(self._head_fd, 200, 0).split()
        written = int(said[0]) if said and said[0].isdigit() else 0
        if written > self._seq or (written == self._seq and said and said[1].decode() != self._head):
            self.record("atoll", "audit.gap", result="damaged", found=self._seq, expected=written)
        elif written < self._seq:
            self._write_head()

    def _rotate(self) -> None:
        os.close(self._fd)
        self._path.rename(self._directory / f"audit.{self._seq}.jsonl")
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = 0
        self._headroom.moved(self._fd)
        self._retire()

    def _retire(self) -> None:
        """Remove the oldest segments beyond what is kept, each after a record that says so."""
        segments = _segments(self._directory)
        total = sum(path.stat().st_size for path in segments)
        for oldest in segments:
            if total <= self._keep:
                return
            total -= oldest.stat().st_size
            last = json.loads(_tail(oldest).splitlines()[-1])
            through, head = int(last["record"]["seq"]), str(last["hash"])
            self._add("atoll", "audit.retired", through=through, hash=head)
            fresh = self._directory / "audit.anchor.new"
            fresh.write_text(f"{through} {head}\n")
            os.replace(fresh, self._directory / "audit.anchor")
            oldest.unlink()

    def _resume(self) -> tuple[int, str]:
        """Go on after the last whole line; half a line of a crash is cut off, it was never acknowledged."""
        for path in reversed(self.files()):
            tail = _tail(path)
            if path == self._path and tail and not tail.endswith(b"\n"):
                whole = tail.rfind(b"\n") + 1
                os.ftruncate(self._fd, self._size - len(tail) + whole)
                self._size -= len(tail) - whole
                tail = tail[:whole]
            lines = tail.splitlines()
            if lines:
                last = json.loads(lines[-1])
                return int(last["record"]["seq"]), str(last["hash"])
        return _anchor(self._directory)


def _tail(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - (1 << 18)))
        return file.read()


def _anchor(directory: Path) -> tuple[int, str]:
    """The number and hash of the last record that was retired; the beginning of all where none was."""
    try:
        said = (directory / "audit.anchor").read_text().split()
        return int(said[0]), said[1]
    except (FileNotFoundError, IndexError, ValueError):
        return 0, GENESIS


def _segments(directory: Path) -> list[Path]:
    """The closed segments that count, oldest first. A retired one may still be there after a crash."""
    retired, _ = _anchor(directory)
    found = sorted(directory.glob("audit.*.jsonl"), key=lambda path: int(path.name.split(".")[1]))
    return [path for path in found if int(path.name.split(".")[1]) > retired]


def verify(directory: Path) -> Verdict:
    """Check a log directory: sequence, hashes, and that the newest hash is the one that was written last."""
    seq, head = anchor = _anchor(directory)
    gap, vouched = "", anchor == (0, GENESIS)
    for path in [*_segments(directory), directory / "audit.jsonl"]:
        if not path.exists():
            continue
        with open(path, encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path.name} line {number}"
                try:
                    entry = json.loads(line)
                    record, claimed = entry["record"], entry["hash"]
                    body = _encode(record)
                except (ValueError, KeyError, TypeError):
                    return Verdict(False, seq, f"{where} is not a record")
                if record.get("seq") != seq + 1:
                    return Verdict(False, seq, f"{where}: expected record {seq + 1}, found {record.get('seq')}")
                head, seq = _digest(head, body), seq + 1
                if claimed != head:
                    return Verdict(False, seq - 1, f"{where}: record {seq} was changed")
                if record.get("action") == "audit.gap":
                    gap = f"{where}: records were lost before it: {record['details']}"
                if record.get("action") == "audit.retired" and record.get("who") == "atoll":
                    vouched |= (record["details"]["through"], record["details"]["hash"]) == anchor
    newest = directory / "audit.head"
    said = newest.read_text().split() if newest.exists() else []
    if said and (int(said[0]), said[1]) != (seq, head):
        return Verdict(False, seq, f"the log ends at record {seq}, but {int(said[0])} were written")
    if not vouched:
        return Verdict(
            False, seq, f"the log begins after record {anchor[0]}, and no record says what became of the others"
        )
    return Verdict(not gap, seq, gap)
