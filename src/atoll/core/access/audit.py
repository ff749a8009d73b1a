"""The audit log: who did what to which sandbox, when, from where, with what result.

JSON lines, appended and never rewritten. Each line carries the hash of the line before it, so that an edit, a removed or an
inserted line breaks the chain at that place and `verify` names it. A cut at the very end cannot be seen from the file alone:
the newest hash is therefore also kept in `audit.head`, written after each append. A daemon that starts on a log shorter than
its head says so in a record of its own (`audit.gap`), which every later `verify` reports.
"""

import asyncio
import errno
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger("atoll.audit")

GENESIS = "0" * 64
_ROTATE_BYTES = 64 << 20
_MAX_TEXT = 2048
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode  # one form only: it is what is hashed


class Verdict(NamedTuple):
    """What `verify` found: how many records hold, and the first place that does not."""

    ok: bool
    records: int
    problem: str = ""


def _digest(previous: str, body: str) -> str:
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()


def _short(value: Any) -> Any:
    """Keep records bounded: text that a caller or a guest chose may be any length."""
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        return value[:_MAX_TEXT] + f"...({len(value)} characters)"
    if isinstance(value, dict):
        return {str(k): _short(v) for k, v in list(value.items())[:64]}
    if isinstance(value, list | tuple):
        return [_short(v) for v in list(value)[:64]]
    return value


class Audit:
    """One writer per state directory. A record that cannot be written stops the action: `record` raises."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.RLock()
        self._due: list[dict[str, Any]] = []  # ends that are being answered
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = directory / "audit.jsonl"
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._head_fd = os.open(directory / "audit.head", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._seq, self._head = self._resume()
        self._compare()

    def record(self, who: str, action: str, sandbox: str = "", result: str = "ok", **record: Any) -> int:
        """Append one record, as `_add` takes it; it is in the file when this returns."""
        with self._lock:
            self._catch_up()
            return self._add(who, action, sandbox, result, **record)

    def record_end(self, **record: Any) -> None:
        """Append how an action ended that has its record already, behind the answer that is just being given: before
        anything else is recorded, read or verified. A daemon killed in between leaves an action whose end is not known."""
        self._due.append({**record, "at": time.time()})
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
                self._add(**ended)
            except BaseException:
                self._due.insert(0, ended)
                raise

    @property
    def seq(self) -> int:
        """The number of the newest record."""
        with self._lock:
            self._catch_up()
        return self._seq

    def files(self) -> list[Path]:
        """All segments, oldest first."""
        old = sorted(self._directory.glob("audit.*.jsonl"), key=lambda p: int(p.name.split(".")[1]))
        return [*old, self._path]

    def read(self, *, sandbox: str = "", who: str = "", after: int = 0) -> Iterator[dict[str, Any]]:
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
        **details: Any,
    ) -> int:
        """`of` is the number of the record whose end this tells."""
        body = _encode(
            {
                "seq": self._seq + 1,
                "at": round(time.time() if at is None else at, 3),
                "who": who,
                "action": action,
                "sandbox": sandbox,
                "result": result,
                "source": source,
                **({"of": of} if of else {}),
                "details": _short(details),
            }
        )
        head = _digest(self._head, body)
        line = f'{{"hash":"{head}","record":{body}}}\n'.encode()
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
            os.ftruncate(self._fd, self._size)
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

    def _resume(self) -> tuple[int, str]:
        """Go on after the last whole line; half a line of a crash is cut off, it was never acknowledged."""
        for path in reversed(self.files()):
            with open(path, "rb") as file:
                file.seek(max(0, os.path.getsize(path) - (1 << 18)))
                tail = file.read()
            if path == self._path and tail and not tail.endswith(b"\n"):
                whole = tail.rfind(b"\n") + 1
                os.ftruncate(self._fd, self._size - len(tail) + whole)
                self._size -= len(tail) - whole
                tail = tail[:whole]
            lines = tail.splitlines()
            if lines:
                last = json.loads(lines[-1])
                return int(last["record"]["seq"]), str(last["hash"])
        return 0, GENESIS


def verify(directory: Path) -> Verdict:
    """Check a log directory: sequence, hashes, and that the newest hash is the one that was written last."""
    head, seq, gap = GENESIS, 0, ""
    segments = sorted(directory.glob("audit.*.jsonl"), key=lambda p: int(p.name.split(".")[1]))
    for path in [*segments, directory / "audit.jsonl"]:
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
    newest = directory / "audit.head"
    said = newest.read_text().split() if newest.exists() else []
    if said and (int(said[0]), said[1]) != (seq, head):
        return Verdict(False, seq, f"the log ends at record {seq}, but {int(said[0])} were written")
    return Verdict(not gap, seq, gap)
