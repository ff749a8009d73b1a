"""Files of a sandbox as tool results: text as text, images as images, other bytes as such, large ones in parts."""

from collections.abc import Mapping

from atoll import errors
from atoll.surfaces.mcp import content
from atoll.surfaces.mcp.client import Call

WORKSPACE = "/workspace"
MOST = 4 * 1024 * 1024
MAX_LISTED = 10_000


class Piece:
    """Bytes of a file from `offset`; `size` is the whole file's. A file that was too large has its middle left out."""

    def __init__(self, raw: bytes, offset: int, size: int, tail: bytes | None = None) -> None:
        self.raw = raw
        self.offset = offset
        self.size = size
        self.tail = tail

    def text(self, most: int) -> str | None:
        """None when it is no text."""
        if self.tail is not None:
            omitted = self.size - len(self.raw) - len(self.tail)
            return content.join_halves(self.raw, omitted, self.tail)
        raw = content.whole_start(self.raw) if self.offset else self.raw
        if self.offset + len(self.raw) < self.size:
            raw = content.whole_end(raw)
        try:
            return None if b"\0" in raw else content.cut(raw.decode(), most)
        except UnicodeDecodeError:
            return None


def absolute(path: str) -> str:
    return path if path.startswith("/") else f"{WORKSPACE}/{path}"


async def read(call: Call, ref: str, path: str, offset: int, limit: int | None) -> Piece:
    raw, size = await _bytes(call, ref, path, offset, limit or MOST + 1)
    if limit is not None or len(raw) <= MOST:
        return Piece(raw, offset, max(size, offset + len(raw)))
    head = content.whole_end(raw[: content.KEPT // 2])
    if b"\0" in head or not _is_text(head):
        raise errors.TooLarge(f"{path!r:.200} has {size} bytes", hint="read it in parts: offset and limit")
    tail, _ = await _bytes(call, ref, path, max(0, size - content.KEPT // 2), content.KEPT // 2)
    return Piece(head, 0, max(size, len(raw)), tail)


async def _bytes(call: Call, ref: str, path: str, offset: int, limit: int) -> tuple[bytes, int]:
    pieces, got = [], 0
    async with call.core.files.read(call.who, ref, path, offset or None, limit) as (stat, download):
        async for piece in download:
            pieces.append(bytes(piece))
            got += len(piece)
            if got >= limit:
                break
    size = stat.get("size")
    return b"".join(pieces)[:limit], size if isinstance(size, int) else 0


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def entry(one: Mapping[str, object]) -> Mapping[str, object]:
    modified, size = one.get("mtime"), one.get("size")
    return {
        "path": content.clean(str(one.get("path", ""))),
        "modified": int(modified) if isinstance(modified, int | float) else 0,
        "size": size if isinstance(size, int) else 0,
    }
