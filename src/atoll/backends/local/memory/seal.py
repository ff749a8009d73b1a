"""Seals the files of a saved memory into one, and opens it again.

    magic | version u8 | salt 32 | pieces

A piece is one AES-256-GCM message: length u32 | ciphertext. The key is derived from the owner's key and the salt, so no two
files share one, and the nonce is the number of the piece. Bound to every piece are the name of the memory, whether it is the
last one, and nothing else: an edited, reordered, truncated or renamed file, and one of another key, does not open.

Inside are records: index of the file u8 | offset u64 | bytes. Holes are not stored. The first piece lists the files.
"""

import json
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.errors import FailedPrecondition

MAGIC, VERSION, SALT = b"ATOLLMEM", 1, 32
PIECE = 1 << 20
MOST_FILES = 64
_RECORD = struct.Struct(">BQ")
_LENGTH = struct.Struct(">I")
_TAG = 16


class Unsealable(FailedPrecondition):
    """The file is not what was sealed: damaged, cut, another memory's, or of another key."""


def new_key() -> bytes:
    return secrets.token_bytes(32)


def seal(files: dict[str, Path], target: Path, key: bytes, name: str) -> int:
    """Write the files into one sealed file and answer its size. The target must not be there yet."""
    salt = secrets.token_bytes(SALT)
    cipher, number = _cipher(key, salt), 0
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb", buffering=0) as out:
        out.write(MAGIC + bytes([VERSION]) + salt)
        for piece, last in _with_end(_pieces(files)):
            closed = cipher.encrypt(number.to_bytes(12, "big"), piece, _bound(name, last))
            _write_all(out, _LENGTH.pack(len(closed)) + closed)
            number += 1
        return out.tell()


def unseal(source: Path, files: dict[str, Path], key: bytes, name: str) -> None:
    """Write what was sealed to these places, each new. Nothing of a file that does not open is left."""
    made: list[Path] = []
    try:
        with open(source, "rb") as sealed:
            _unseal(sealed, files, key, name, made)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise


def _unseal(sealed: BinaryIO, files: dict[str, Path], key: bytes, name: str, made: list[Path]) -> None:
    head = sealed.read(len(MAGIC) + 1 + SALT)
    if head[: len(MAGIC)] != MAGIC or len(head) < len(MAGIC) + 1 + SALT:
        raise _broken(name)
    if head[len(MAGIC)] != VERSION:
        raise Unsealable(f"the saved memory {name} has a form that this atoll does not know", hint="save it anew")
    cipher = _cipher(key, head[len(MAGIC) + 1 :])
    listing: list[int] | None = None
    try:
        for piece in _opened(sealed, cipher, name):
            if listing is None:
                listing = _make(json.loads(piece), files, made)
                continue
            index, offset = _RECORD.unpack_from(piece)
            _pwrite_all(listing[index], memoryview(piece)[_RECORD.size :], offset)
    finally:
        for fd in listing or ():
            os.close(fd)
    if listing is None:
        raise _broken(name)


def _make(listed: object, files: dict[str, Path], made: list[Path]) -> list[int]:
    """Make the files of the list, each with its size. The list was authenticated: it is ours."""
    assert isinstance(listed, list)
    fds = []
    for entry in listed:
        path = files[entry["name"]]
        fds.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        made.append(path)
        os.truncate(fds[-1], entry["size"])
    return fds


def _opened(sealed: BinaryIO, cipher: AESGCM, name: str) -> Iterator[bytes]:
    number = 0
    while True:
        raw = sealed.read(_LENGTH.size)
        length = _LENGTH.unpack(raw)[0] if len(raw) == _LENGTH.size else 0
        if not _TAG <= length <= PIECE + _RECORD.size + _TAG:
            raise _broken(name)
        closed, nonce = sealed.read(length), number.to_bytes(12, "big")
        ahead = sealed.read(1)
        if ahead:
            sealed.seek(-1, os.SEEK_CUR)
        try:
            piece = cipher.decrypt(nonce, closed, _bound(name, not ahead))
        except InvalidTag:
            raise _broken(name) from None
        yield piece
        if not ahead:
            return
        number += 1


def _pieces(files: dict[str, Path]) -> Iterator[bytes]:
    assert len(files) <= MOST_FILES
    yield json.dumps([{"name": name, "size": path.stat().st_size} for name, path in files.items()]).encode()
    for index, path in enumerate(files.values()):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for start, end in _extents(fd):
                while start < end:
                    data = os.pread(fd, min(PIECE, end - start), start)
                    if not data:
                        break
                    yield _RECORD.pack(index, start) + data
                    start += len(data)
        finally:
            os.close(fd)


def _extents(fd: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that are not holes."""
    size, offset = os.fstat(fd).st_size, 0
    while offset < size:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        offset = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, offset


def _with_end(pieces: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each piece, and whether it is the last."""
    before = next(pieces)
    for piece in pieces:
        yield before, False
        before = piece
    yield before, True


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    derived = HKDF(algorithm=hashes.SHA256(), length=32, salt=salt, info=b"atoll saved memory 1").derive(key)
    return AESGCM(derived)


def _bound(name: str, last: bool) -> bytes:
    return name.encode() + (b"\1" if last else b"\0")


def _broken(name: str) -> Unsealable:
    return Unsealable(
        f"the saved memory {name} does not open: it is damaged, was changed, or belongs to somebody else",
        hint="remove the checkpoint and save it anew",
    )


def _write_all(out: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[out.write(view) :]


def _pwrite_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
