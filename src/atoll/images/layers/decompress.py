"""The bytes of a layer, decompressed and hashed while they are read.

A layer is gzip, zstd or plain tar, told apart by its first bytes. What comes out is counted: a stream that inflates
beyond the limits ends with an error long before it fills a disk, and memory use does not depend on the input.
"""

import hashlib
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

import zstandard

from atoll.errors import ImageError
from atoll.images.layers.limits import Limits

_CHUNK = 1 << 18
_OUTPUT = 1 << 20
_ZSTD_WINDOW = 128 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_XZ, _BZIP2 = b"\xfd7zXZ", b"BZh"


class LayerStream:
    """Reads one layer; `digest` after `drain()` is the digest of everything that came out."""

    def __init__(self, source: BinaryIO, limits: Limits) -> None:
        self._source = _Counted(source)
        self._limits = limits
        self._pieces = _decompressed(self._source)
        self._buffer = memoryview(b"")
        self._hash = hashlib.sha256()
        self.produced = 0

    @property
    def consumed(self) -> int:
        """How many compressed bytes have been read so far."""
        return self._source.count

    def read(self, count: int) -> bytes:
        """Up to `count` bytes, b"" at the end."""
        while not self._buffer:
            try:
                piece = next(self._pieces, b"")
            except (zlib.error, zstandard.ZstdError) as error:
                raise ImageError(f"the layer is not readable: {error}") from error
            if not piece:
                return b""
            self.produced += len(piece)
            self._check()
            self._hash.update(piece)
            self._buffer = memoryview(piece)
        data = bytes(self._buffer[:count])
        self._buffer = self._buffer[count:]
        return data

    def drain(self) -> None:
        """Read to the end: what follows the last entry is part of the digest too."""
        while self.read(_CHUNK):
            pass

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def _check(self) -> None:
        limits = self._limits
        if self.produced > limits.unpacked_bytes:
            raise ImageError(f"the layer unpacks to more than {limits.unpacked_bytes} bytes")
        if self.produced > limits.ratio_from and self.produced > limits.ratio * max(self.consumed, 1):
            raise ImageError(f"the layer unpacks to more than {limits.ratio} times its size")


class _Counted:
    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self.count = 0

    def read(self) -> bytes:
        data = self._source.read(_CHUNK)
        self.count += len(data)
        return data


def _decompressed(source: _Counted) -> Iterator[bytes]:
    first = source.read()
    while first and len(first) < 6:
        more = source.read()
        if not more:
            break
        first += more
    if first.startswith(_GZIP):
        return _gunzip(first, source)
    if first.startswith(_ZSTD):
        return _unzstd(first, source)
    if first.startswith(_XZ) or first.startswith(_BZIP2):
        raise ImageError("the layer is compressed in a way images do not use; gzip, zstd and plain tar are read")
    return _plain(first, source)


def _plain(first: bytes, source: _Counted) -> Iterator[bytes]:
    data = first
    while data:
        yield data
        data = source.read()


def _gunzip(first: bytes, source: _Counted) -> Iterator[bytes]:
    """gzip, also of several members one after another; zero padding after the last is ignored."""
    data = first
    while True:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            if not data:
                data = source.read()
                if not data:
                    raise ImageError("the layer ends in the middle of its compressed data")
            piece = member.decompress(data, _OUTPUT)
            data = member.unconsumed_tail
            if piece:
                yield piece
        data = member.unused_data.lstrip(b"\0")
        while not data:
            data = source.read()
            if not data:
                return
            data = data.lstrip(b"\0")


def _unzstd(first: bytes, source: _Counted) -> Iterator[bytes]:
    context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    reader = context.stream_reader(cast(BinaryIO, _Joined(first, source)), read_size=_CHUNK, read_across_frames=True)
    while True:
        piece = reader.read(_OUTPUT)
        if not piece:
            return
        yield piece


class _Joined:
    """The peeked first bytes and the rest as one readable object, the shape zstandard asks for."""

    def __init__(self, first: bytes, source: _Counted) -> None:
        self._first = first
        self._source = source

    def read(self, size: int) -> bytes:
        if self._first:
            data, self._first = self._first[:size], self._first[size:]
            return data
        return self._source.read()
