"""The files of a build, from an uploaded archive: an index in memory, contents in files that are only numbered.

No name of the archive ever becomes a name on this machine, so none can lead anywhere. The archive may be plain, gzip or
zstd; what comes out of it is counted while it is written, and charged through `grow` before it takes space.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from atoll import tar_reader as tar
from atoll.errors import DiskFull, InvalidArgument, TooLarge
from atoll.images.build.ignore import Ignore
from atoll.images.layers.decompress import LayerStream
from atoll.images.layers.limits import Limits

IGNORE_FILE = ".dockerignore"
MAX_MATCHES = 20_000_000  # entries times patterns of an ignore file
_MAX_LINKS = 40
_MAX_IGNORE = 256 << 10


class Readable(Protocol):
    """Bytes that come piece by piece."""

    def read(self, count: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Node:
    """A file, directory or link that a build copies. `content` is where its bytes are."""

    path: str  # without a slash in front
    kind: str  # "f", "d" or "l"
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: float = 0.0
    size: int = 0
    link: str = ""
    digest: str = ""  # of a context's file
    content: "Path | bytes | Readable" = b""


class Context:
    """An index of what was uploaded. `read` fills it once; links are resolved inside it and nowhere else."""

    def __init__(self, directory: Path, limits: Limits, grow: Callable[[int], None] = lambda size: None) -> None:
        self._directory = directory
        self._limits = limits
        self._grow = grow
        self._ignore = Ignore()
        self.nodes: dict[str, Node] = {}
        self._below: dict[str, set[str]] | None = None

    def read(self, source: BinaryIO, prefix: str = "") -> None:
        """Take over an archive, below a directory of its own when there is a prefix."""
        stream = LayerStream(source, self._limits)
        reader = tar.TarReader(stream.read)
        entries = 0
        try:
            for entry in reader.entries():
                entries += 1
                if entries > self._limits.entries:
                    raise TooLarge(f"a build's context has at most {self._limits.entries} files")
                self._add(entry, reader, prefix)
        except OSError as error:
            raise DiskFull(f"the build's context cannot be kept: {error.strerror}") from error
        self._apply_ignore()

    def _add(self, entry: tar.Entry, reader: tar.TarReader, prefix: str) -> None:
        path = plain_path(os.fsdecode(entry.name), self._limits)
        if not path:
            return
        path = f"{prefix}/{path}" if prefix else path
        for above in _parents(path):
            if (found := self.nodes.get(above)) is None:
                self.nodes[above] = Node(above, "d", 0o755, mtime=entry.mtime)
            elif found.kind != "d":
                raise InvalidArgument(f"the context has a file below something that is no directory: {path!r:.200}")
        mode = entry.mode & 0o7777
        if entry.kind == tar.DIRECTORY:
            self.nodes[path] = Node(path, "d", mode, mtime=entry.mtime)
        elif entry.kind == tar.SYMLINK:
            link = os.fsdecode(entry.link)
            if not link or len(link) >= self._limits.path_bytes:
                raise InvalidArgument(f"the context has a link with an impossible target: {path!r:.200}")
            self.nodes[path] = Node(path, "l", 0o777, mtime=entry.mtime, link=link)
        elif entry.kind == tar.HARDLINK:
            first = plain_path(os.fsdecode(entry.link), self._limits)
            source = self.nodes.get(f"{prefix}/{first}" if prefix else first)
            if source is None or source.kind != "f":
                raise InvalidArgument(f"the context has a hard link to no file of it: {path!r:.200}")
            self.nodes[path] = Node(path, "f", mode, 0, 0, entry.mtime, source.size, "", source.digest, source.content)
        elif entry.kind == tar.REGULAR:
            content, digest = self._keep(reader)
            self.nodes[path] = Node(path, "f", mode, 0, 0, entry.mtime, entry.size, "", digest, content)
        # Devices, fifos and sockets are no files of a project.

    def _keep(self, reader: tar.TarReader) -> tuple[Path, str]:
        place = self._directory / f"{len(self.nodes)}-{os.urandom(4).hex()}"
        sums = hashlib.sha256()
        with open(place, "xb", opener=_private) as file:
            for chunk in reader.chunks():
                self._grow(len(chunk))
                sums.update(chunk)
                file.write(chunk)
        return place, sums.hexdigest()

    def _apply_ignore(self) -> None:
        found = self.nodes.get(IGNORE_FILE)
        if found is None or not isinstance(found.content, Path) or found.size > _MAX_IGNORE:
            if found is not None and found.size > _MAX_IGNORE:
                raise TooLarge(f"{IGNORE_FILE} is larger than {_MAX_IGNORE} bytes")
            return
        self._ignore = Ignore(found.content.read_text("utf-8", "replace"))
        if len(self._ignore) * len(self.nodes) > MAX_MATCHES:
            raise TooLarge(f"{IGNORE_FILE} has too many patterns for a context of {len(self.nodes)} files")

    # What copying asks

    def resolve(self, path: str) -> str | None:
        """Return the path with every link on the way followed; None when there is nothing. A link out is an error."""
        todo = [part for part in path.split("/") if part not in ("", ".")]
        here: list[str] = []
        links = 0
        while todo:
            part = todo.pop(0)
            if part == "..":
                if not here:
                    raise InvalidArgument(f"{path!r:.200} leads out of the context")
                here.pop()
                continue
            node = self._visible("/".join((*here, part)))
            if node is None:
                return None
            if node.kind != "l":
                here.append(part)
                continue
            links += 1
            if node.link.startswith("/") or links > _MAX_LINKS:
                raise InvalidArgument(f"{path!r:.200} is a link that leads out of the context")
            todo = [one for one in node.link.split("/") if one not in ("", ".")] + todo
        return "/".join(here)

    def node(self, path: str) -> Node | None:
        """Return what is at a path without following it; the root is a directory."""
        return Node("", "d", 0o755) if not path else self._visible(path)

    def below(self, path: str) -> Iterator[Node]:
        """Yield everything below a directory, parents first, names in order. Links are not followed."""
        for name in sorted(self._children().get(path, ())):
            full = f"{path}/{name}" if path else name
            node = self.nodes[full]
            if node.kind == "d":
                inner = list(self.below(full))
                if inner or not self._ignore.leaves_out(full):
                    yield node
                    yield from inner
            elif not self._ignore.leaves_out(full):
                yield node

    def names(self, path: str) -> list[str]:
        """Return the names in a directory that are not ignored."""
        found = sorted(self._children().get(path, ()))
        return [name for name in found if self._visible(f"{path}/{name}" if path else name) is not None]

    def _visible(self, path: str) -> Node | None:
        node = self.nodes.get(path)
        if node is None or not self._ignore.leaves_out(path):
            return node
        return node if node.kind == "d" and any(True for _ in self.below(path)) else None

    def _children(self) -> dict[str, set[str]]:
        if self._below is None:
            self._below = {}
            for path in self.nodes:
                above, _, name = path.rpartition("/")
                self._below.setdefault(above, set()).add(name)
        return self._below


def plain_path(name: str, limits: Limits) -> str:
    """Return a path of an archive without `.` and slashes in front; InvalidArgument for one that climbs out."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise InvalidArgument(f"the context has a path that climbs out: {name!r:.200}")
    if len(parts) > limits.depth or len(name) > limits.path_bytes or any(len(os.fsencode(p)) > 255 for p in parts):
        raise InvalidArgument(f"the context has a path that is too long or too deep: {name!r:.200}")
    return "/".join(parts)


def _parents(path: str) -> Iterator[str]:
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR)
