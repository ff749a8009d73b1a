"""Snapshots on disk: one file each with a signed head and the list of its files, beside the store of their content.

    <32 hex of owner and name>.snap:   HMAC of the head | head (JSON, one line) | files (MessagePack, zstd)

The head holds the digest of the rest, and its HMAC is under a key of this machine: a flipped bit, a file put there by
hand and another owner's file under one's own name are refused, not restored. File names are made from hashes, so no name
of a caller reaches the file system.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

import msgspec
import zstandard

from atoll.errors import Internal, InvalidArgument, NotFound

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_MAX_LIST = 1 << 30
_MAX_HEAD = 1 << 20

FILE, DIRECTORY, SYMLINK, HARDLINK = "f", "d", "l", "h"
GONE = "w"  # of the image, and deleted since


class Entry(NamedTuple):
    """One file. `path` is relative and clean; `target` is a link's text, or for a hard link the path it equals."""

    path: bytes
    kind: str
    mode: int
    uid: int
    gid: int
    mtime: float
    size: int
    chunks: tuple[str, ...] = ()
    target: bytes = b""


class Origin(TypedDict):
    """Where a snapshot comes from. `imported`: of an archive, whose word decides nothing."""

    created_at: float
    sandbox_id: str
    tenant: str
    image: str
    full: bool
    stored_bytes: int
    skipped: list[str]
    imported: NotRequired[bool]


class Head(Origin):
    """Facts about a snapshot."""

    owner: str
    name: str
    size_bytes: int
    file_count: int


class SavedHead(Head):
    """The first line of a snapshot's file."""

    files_sha256: str


def check_name(name: str) -> str:
    if not NAME.fullmatch(name) or ".." in name or _DEVICES.fullmatch(name):
        raise InvalidArgument(
            f"{name!r:.80} is not a snapshot's name",
            hint="1 to 63 letters, digits, `_`, `.` or `-`, starting with a letter or digit",
        )
    return name


class Shelf:
    """The snapshots of this machine. Blocking; one daemon writes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in directory.glob("*.new"):  # of a crash: a snapshot counts from its rename on
            left.unlink()
        self._key = _machine_key(directory.parent / "snapshot.key")

    def save(self, head: Head, entries: Iterable[Entry]) -> None:
        """Make it exist, whole, in one step; an older one of the same owner and name is replaced."""
        packed = zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode([tuple(e) for e in entries]))
        line = json.dumps({**head, "files_sha256": hashlib.sha256(packed).hexdigest()}, separators=(",", ":")).encode()
        path = self._path(head["owner"], head["name"])
        fresh = path.with_suffix(".new")
        with open(fresh, "wb") as file:
            file.write(self._sign(line).encode() + b"\n" + line + b"\n" + packed)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def head(self, owner: str, name: str) -> SavedHead:
        head, _ = self._open(self._path(owner, name), name)
        if head["owner"] != owner or head["name"] != name:
            raise Internal(f"snapshot {name!r} is not what its place says", hint="delete it")
        return head

    def entries(self, owner: str, name: str) -> tuple[Head, list[Entry]]:
        """The verified list of files."""
        head = self.head(owner, name)
        _, packed = self._open(self._path(owner, name), name, whole=True)
        return head, _unpack(head, packed)

    def exists(self, owner: str, name: str) -> bool:
        return self._path(owner, name).exists()

    def delete(self, owner: str, name: str) -> None:
        try:
            self._path(owner, name).unlink()
        except FileNotFoundError:
            raise _unknown(name) from None

    def heads(self, owner: str) -> Iterator[Head]:
        """List the snapshots of one owner without damaged ones, which are reported when named."""
        for path in self._directory.glob("*.snap"):
            try:
                head, _ = self._open(path, "")
            except (Internal, NotFound):
                continue
            if head["owner"] == owner:
                yield head

    def referenced(self, owner: str) -> set[str]:
        """Every chunk that some snapshot of this owner needs. One that cannot be read, whose ever, keeps its content: raises."""
        found: set[str] = set()
        for path in self._directory.glob("*.snap"):
            head, packed = self._open(path, "", whole=True)
            if head["owner"] == owner:
                for entry in _unpack(head, packed):
                    found.update(entry.chunks)
        return found

    def _open(self, path: Path, name: str, *, whole: bool = False) -> tuple[SavedHead, bytes]:
        try:
            with open(path, "rb") as file:
                signature, line = file.readline(_MAX_HEAD).rstrip(b"\n"), file.readline(_MAX_HEAD).rstrip(b"\n")
                packed = file.read() if whole else b""
        except FileNotFoundError:
            raise _unknown(name) from None
        if not hmac.compare_digest(signature, self._sign(line).encode()):
            raise Internal(f"snapshot {name!r} is damaged on disk, or was not made here", hint="delete it")
        head: SavedHead = json.loads(line)
        return head, packed

    def _sign(self, line: bytes) -> str:
        return hmac.new(self._key, line, hashlib.sha256).hexdigest()

    def _path(self, owner: str, name: str) -> Path:
        check_name(name)
        return self._directory / (hashlib.sha256(f"{owner}\0{name}".encode()).hexdigest()[:32] + ".snap")


def _unpack(head: SavedHead, packed: bytes) -> list[Entry]:
    if hashlib.sha256(packed).hexdigest() != head["files_sha256"]:
        raise Internal(f"snapshot {head['name']!r} is damaged on disk", hint="delete it")
    raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=_MAX_LIST)
    return [Entry._make((*row[:7], tuple(row[7]), row[8])) for row in msgspec.msgpack.decode(raw)]


def _unknown(name: str) -> NotFound:
    return NotFound(f"no snapshot {name!r:.80}")


def _machine_key(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(32))
    except FileExistsError:
        pass
    key = path.read_bytes()
    if len(key) != 32:
        raise Internal(f"{path} is damaged")
    return key
