"""A tar reader for archives an attacker wrote.

It reads a forward-only stream and hands out one entry at a time. Unlike the standard library's reader it never holds
more than a few kilobytes of header: long names and pax records have a hard limit, sizes cannot be negative, sparse
files are refused, and a header with a wrong checksum ends the archive with an error instead of a guess.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from atoll.errors import ImageError

BLOCK = 512
MAX_HEADER_BYTES = 1 << 20
_MAX_EXTENSIONS = 8
_CHUNK = 1 << 18

REGULAR, HARDLINK, SYMLINK, CHARACTER, BLOCKDEV, DIRECTORY, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
_KNOWN = frozenset({REGULAR, HARDLINK, SYMLINK, CHARACTER, BLOCKDEV, DIRECTORY, FIFO})
_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK, _GNU_SPARSE = b"x", b"g", b"L", b"K", b"S"


class Entry(NamedTuple):
    """One member: names are bytes exactly as the archive has them, nothing is normalised."""

    name: bytes
    kind: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime: float
    link: bytes


class TarReader:
    """Reads entries from `read(n)`, a function that returns up to n bytes and b"" at the end."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._left = 0  # unread bytes of the current entry's body
        self._padding = 0

    def entries(self) -> Iterator[Entry]:
        """Every member in order; the body of one must be read, or is skipped, before the next."""
        records: dict[str, bytes] = {}
        extensions = 0
        while True:
            self._skip_body()
            header = self._exactly(BLOCK, at_start=True)
            if not header or header == bytes(BLOCK):
                return
            entry = _parse_header(header)
            kind = entry.kind
            self._left, self._padding = entry.size, -entry.size % BLOCK
            if kind in (_PAX, _GNU_NAME, _GNU_LINK):
                extensions += 1
                if extensions > _MAX_EXTENSIONS:
                    raise ImageError("the archive has too many extended headers in a row")
                body = self._header_body(entry.size)
                if kind == _PAX:
                    records.update(_parse_pax(body))
                else:
                    records["path" if kind == _GNU_NAME else "linkpath"] = body.split(b"\0", 1)[0]
                continue
            if kind == _PAX_GLOBAL:
                continue
            entry = _apply(entry, records)
            records, extensions = {}, 0
            if entry.kind != REGULAR:
                entry = entry._replace(size=0)
            self._left, self._padding = entry.size, -entry.size % BLOCK
            yield entry

    def chunks(self) -> Iterator[bytes]:
        """The body of the current entry."""
        while self._left:
            data = self._read(min(self._left, _CHUNK))
            if not data:
                raise ImageError("the archive ends in the middle of a file")
            self._left -= len(data)
            yield data

    def _skip_body(self) -> None:
        for _ in self.chunks():
            pass
        if self._padding:
            self._exactly(self._padding)
            self._padding = 0

    def _header_body(self, size: int) -> bytes:
        if size > MAX_HEADER_BYTES:
            raise ImageError(f"the archive has a header of {size} bytes; {MAX_HEADER_BYTES} are accepted")
        return b"".join(self.chunks())

    def _exactly(self, count: int, at_start: bool = False) -> bytes:
        parts: list[bytes] = []
        left = count
        while left:
            data = self._read(left)
            if not data:
                if at_start and left == count:
                    return b""
                raise ImageError("the archive is cut off")
            parts.append(data)
            left -= len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _parse_header(header: bytes) -> Entry:
    stored = _number(header[148:156])
    if stored != sum(header[:148]) + 8 * 32 + sum(header[156:]):
        raise ImageError("the archive has a header with a wrong checksum")
    kind = header[156:157]
    if kind in (b"\0", b"7"):
        kind = REGULAR
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return Entry(
        name=name,
        kind=kind,
        mode=_number(header[100:108]) & 0o7777,
        uid=_number(header[108:116]),
        gid=_number(header[116:124]),
        size=_number(header[124:136]),
        mtime=float(_number(header[136:148], signed=True)),
        link=header[157:257].split(b"\0", 1)[0],
    )


def _apply(entry: Entry, records: dict[str, bytes]) -> Entry:
    """Merge pax and GNU records into the header they precede.

    Only now is the name whole: a header holds its first 100 bytes, which may end in a slash by chance.
    """
    if entry.kind == _GNU_SPARSE or any(key.startswith("GNU.sparse.") for key in records):
        raise ImageError("the archive has a sparse file, which no image layer needs")
    if entry.kind not in _KNOWN:
        raise ImageError(f"the archive has an entry of unknown type {entry.kind!r}")
    name = records.get("path", entry.name)
    link = records.get("linkpath", entry.link)
    if b"\0" in name or b"\0" in link:
        raise ImageError("the archive has a name with a NUL byte")
    kind = DIRECTORY if entry.kind == REGULAR and name.endswith(b"/") else entry.kind
    return entry._replace(
        name=name,
        kind=kind,
        uid=_decimal(records, "uid", entry.uid),
        gid=_decimal(records, "gid", entry.gid),
        size=_decimal(records, "size", entry.size),
        mtime=_time(records.get("mtime"), entry.mtime),
        link=link,
    )


def _parse_pax(body: bytes) -> dict[str, bytes]:
    records: dict[str, bytes] = {}
    position = 0
    while position < len(body):
        space = body.find(b" ", position, position + 12)
        digits = body[position:space] if space > position else b""
        length = int(digits) if digits.isdigit() else 0
        record = body[position : position + length]
        if len(record) != length or length <= space - position + 2 or not record.endswith(b"\n"):
            raise ImageError("the archive has a broken extended header")
        key, equals, value = record[space - position + 1 : -1].partition(b"=")
        if not equals:
            raise ImageError("the archive has a broken extended header")
        records[key.decode("utf-8", "replace")] = value
        position += length
    return records


def _number(field: bytes, signed: bool = False) -> int:
    """A numeric field: octal text, or base-256 when the top bit is set."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big", signed=False) & ((1 << (8 * len(field) - 1)) - 1)
        negative = field[0] == 0xFF
        if negative:
            value = int.from_bytes(field, "big", signed=True)
        if (negative and not signed) or value > 1 << 62:
            raise ImageError("the archive has an impossible number in a header")
        return value
    text = field.split(b"\0", 1)[0].strip(b" ")
    if not text:
        return 0
    if not all(0x30 <= byte <= 0x37 for byte in text):
        raise ImageError("the archive has a number that is not octal")
    return int(text, 8)


def _decimal(records: dict[str, bytes], key: str, default: int) -> int:
    text = records.get(key)
    if text is None:
        return default
    if not text.isdigit() or len(text) > 18:
        raise ImageError(f"the archive has an impossible {key} in an extended header")
    return int(text)


def _time(text: bytes | None, default: float) -> float:
    if text is None:
        return default
    try:
        return float(text[:40])
    except ValueError:
        raise ImageError("the archive has an impossible time in an extended header") from None
