"""COPY and ADD: from a context, another stage or another image to the entries of a new layer.

Sources are looked up in an index or in layers, never by name on this machine. The destination is looked up in the image
that is being built, links followed inside it, so that a file lands where a program in a sandbox would have put it.
"""

import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from atoll import tar_reader as tar
from atoll.errors import ImageError, InvalidArgument
from atoll.images.build.context import Node, Readable, plain_path
from atoll.images.build.ignore import Pattern, match_name
from atoll.images.build.tree import Tree
from atoll.images.layers.decompress import LayerStream
from atoll.images.layers.limits import Limits
from atoll.tar_writer import WHITEOUT, TarWriter

_NOT_OF_IMAGES = ("dev", "proc", "sys", "workspace")  # the kernel's, and what every sandbox has of its own


class Source(Protocol):
    """Files to copy from: a context or an image."""

    def resolve(self, path: str) -> str | None: ...

    def node(self, path: str) -> Node | None: ...

    def names(self, path: str) -> list[str]: ...

    def below(self, path: str) -> Iterator[Node]: ...


@dataclass(frozen=True, slots=True)
class Copy:
    """An order to copy, everything expanded. Without `owner` files keep theirs (from an image) or become root's."""

    sources: tuple[str, ...]
    target: str  # absolute or relative to `workdir`
    workdir: str
    owner: tuple[int, int] | None = None
    mode: int | None = None
    unpacks: bool = False  # ADD: archives are unpacked
    inline: tuple[Node, ...] = ()  # here-documents: files of their own


MAX_MATCHED = 200_000_000  # characters that the patterns of one step may compare


class Copier:
    """Turns one COPY into entries: paths in the image, parents first."""

    def __init__(self, copy: Copy, source: Source, image: Tree, limits: Limits) -> None:
        self._copy = copy
        self._source = source
        self._image = image
        self._limits = limits
        self._made: set[str] = set()
        self._matched = 0  # characters compared, at most, for the patterns so far

    def digest(self) -> str:
        """Return the digest of what is copied, without times. It decides whether a cached layer can serve."""
        sums = hashlib.sha256()
        for top in self._tops():
            for node in (top, *(self._source.below(top.path) if top.kind == "d" else ())):
                line = (node.path, node.kind, node.mode & 0o777, node.size, node.link, node.digest)
                sums.update(repr(line).encode("utf-8", "surrogateescape"))
        for node in self._copy.inline:
            sums.update(repr((node.path, node.content)).encode())
        return sums.hexdigest()

    def write(self, out: BinaryIO) -> None:
        """Write the layer."""
        writer = TarWriter(out)
        for node in self.entries():
            fields = {"mode": node.mode, "uid": node.uid, "gid": node.gid, "mtime": node.mtime}
            if node.kind == "d":
                writer.header(node.path, tarfile.DIRTYPE, **fields)  # type: ignore[arg-type]  # numbers, by name
            elif node.kind == "l":
                writer.header(node.path, tarfile.SYMTYPE, link=node.link, **fields)  # type: ignore[arg-type]
            else:
                with _opened(node) as file:
                    writer.file(node.path, file.read, node.size, **fields)
        writer.close()

    def write_directories(self, path: str, out: BinaryIO) -> None:
        """Write a layer of one directory with those above it."""
        writer = TarWriter(out)
        for node in self._above(f"{self._image.place(path)}/x"):
            fields = {"mode": node.mode, "uid": node.uid, "gid": node.gid, "mtime": node.mtime}
            writer.header(node.path, tarfile.DIRTYPE, **fields)  # type: ignore[arg-type]  # numbers, by name
        writer.close()

    def entries(self) -> Iterator[Node]:
        """Yield the entries of the layer."""
        tops = [*self._tops(), *self._copy.inline]
        target = self._copy.target
        into = target.endswith("/") or target in (".", "..") or len(tops) > 1
        place = self._image.place(target if target.startswith("/") else f"{self._copy.workdir}/{target}")
        there = self._image.node(place) if place else Node("", "d", 0o755)
        if len(tops) > 1 and not self._copy.target.endswith("/") and not (there is not None and there.kind == "d"):
            raise InvalidArgument("several files can only be copied into a directory: end its name with a slash")
        into = into or (there is not None and there.kind == "d")
        for top in tops:
            if top.kind == "d":
                yield from self._whole(top, place)
                continue
            archive = self._copy.unpacks and _is_archive(top)
            if archive:
                yield from self._unpacked(top, place)
                continue
            name = f"{place}/{os.path.basename(top.path)}".lstrip("/") if into else place
            yield from self._above(name)
            yield self._own(top, name)

    # Sources

    def _tops(self) -> list[Node]:
        """Return the files and directories that are named, patterns and links resolved."""
        found: list[Node] = []
        for text in self._copy.sources:
            pattern = Pattern(text.lstrip("/"))
            names = [text] if pattern.is_plain else list(self._matching("", pattern.parts))
            nodes = [node for name in names if (node := self._top(name)) is not None]
            if not nodes:
                raise InvalidArgument(
                    f"{text!r:.200} is not there", hint="sources are below the context, and .dockerignore may hide them"
                )
            found += nodes
        return found

    def _top(self, name: str) -> Node | None:
        resolved = self._source.resolve(name)
        node = self._source.node(resolved) if resolved is not None else None
        if node is None or node.kind == "x":
            return None
        if node.kind == "f" and resolved is not None and os.path.basename(name.rstrip("/")):
            return replace(node, path=f"{os.path.dirname(resolved)}/{os.path.basename(name)}".lstrip("/"))
        return node

    def _matching(self, path: str, parts: tuple[str, ...]) -> Iterator[str]:
        if not parts:
            yield path
            return
        width = len(parts[0])
        for name in self._source.names(path):
            self._matched += len(name) * width * (width if "[" in parts[0] else 1)
            if self._matched > MAX_MATCHED:
                raise InvalidArgument("the patterns of this step take too long to match", hint="name a directory")
            full = f"{path}/{name}" if path else name
            node = self._source.node(full)
            if node is None or not match_name(parts[0], name):
                continue
            if len(parts) == 1 or node.kind == "d":
                yield from self._matching(full, parts[1:])

    # Entries

    def _whole(self, top: Node, place: str) -> Iterator[Node]:
        """Yield what is in a directory, put into the one at `place`."""
        yield from self._above(f"{place}/x", top)
        cut = len(top.path) + 1 if top.path else 0
        for node in self._source.below(top.path):
            if node.kind == "x":
                continue
            name = f"{place}/{node.path[cut:]}".lstrip("/")
            if node.kind == "d":
                found = self._image.node(name)
                if name in self._made:
                    continue
                self._made.add(name)
                if found is not None and found.kind == "d" and self._copy.mode is None and self._copy.owner is None:
                    yield replace(found, path=name)
                    continue
            yield from self._checked(self._own(node, name))

    def _unpacked(self, top: Node, place: str) -> Iterator[Node]:
        """Yield the entries of an archive; a path or link that leaves it is an error."""
        yield from self._above(f"{place}/x")
        with _opened(top) as raw:
            stream = LayerStream(raw, self._limits)  # type: ignore[arg-type]  # it only reads
            reader = tar.TarReader(stream.read)
            count = 0
            for entry in reader.entries():
                count += 1
                if count > self._limits.entries:
                    raise ImageError(f"the archive has more than {self._limits.entries} entries")
                inner = plain_path(os.fsdecode(entry.name), self._limits)
                name = f"{place}/{inner}".lstrip("/")
                if not inner:
                    continue
                kind = {tar.DIRECTORY: "d", tar.SYMLINK: "l", tar.REGULAR: "f"}.get(entry.kind)
                if kind is None:
                    raise ImageError(f"the archive has an entry that ADD does not unpack: {inner!r:.200}")
                yield from self._above(name)
                uid, gid = self._copy.owner or (entry.uid, entry.gid)
                content = _Streamed(reader.chunks()) if kind == "f" else b""
                yield from self._checked(Node(
                    name, kind, entry.mode & 0o7777, uid, gid, entry.mtime, entry.size, os.fsdecode(entry.link),
                    content=content,
                ))  # fmt: skip

    def _own(self, node: Node, name: str) -> Node:
        uid, gid = self._copy.owner or (node.uid, node.gid)
        mode = node.mode if self._copy.mode is None or node.kind == "l" else self._copy.mode
        return replace(node, path=name, uid=uid, gid=gid, mode=mode)

    def _checked(self, node: Node) -> Iterator[Node]:
        first = node.path.partition("/")[0]
        if first in _NOT_OF_IMAGES or any(part.startswith(WHITEOUT) for part in node.path.split("/")):
            raise InvalidArgument(f"an image cannot hold /{node.path:.200}", hint="every sandbox has its own there")
        yield node

    def _above(self, name: str, like: Node | None = None) -> Iterator[Node]:
        """Yield the directories above a path: as they are in the image, new ones with the owner of what is copied."""
        parts = [part for part in name.split("/") if part][:-1]
        for count in range(1, len(parts) + 1):
            path = "/".join(parts[:count])
            if path in self._made:
                continue
            self._made.add(path)
            found = self._image.node(path)
            if found is not None and found.kind != "d":
                raise InvalidArgument(f"/{path:.200} is not a directory in the image")
            uid, gid = self._copy.owner or (0, 0)
            mode = like.mode if like is not None and count == len(parts) and like.path else 0o755
            yield from self._checked(found or Node(path, "d", mode, uid, gid))


class _Memory:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def read(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        self._at += len(piece)
        return piece


class _Streamed:
    """A file of an archive, read while the archive is."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def read(self, count: int) -> bytes:
        data = self._rest or next(self._pieces, b"")
        self._rest = data[count:]
        return data[:count]


class _opened:
    """A node's bytes as a readable object."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._file: BinaryIO | None = None

    def __enter__(self) -> Readable:
        if isinstance(self._node.content, Path):
            fd = os.open(self._node.content, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            self._file = os.fdopen(fd, "rb")
            return self._file
        content = self._node.content
        if isinstance(content, bytes):
            return _Memory(content)
        return content

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()


def _is_archive(node: Node) -> bool:
    """Return whether ADD unpacks this file: a tar, plain or compressed with gzip or zstd."""
    if node.kind != "f":
        return False
    with _opened(node) as file:
        head = file.read(512)
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return ".tar" in node.path or node.path.endswith((".tgz", ".tzst"))
    if head.startswith((b"\xfd7zXZ", b"BZh")) and ".tar" in node.path:
        raise InvalidArgument(
            f"{node.path:.200} is compressed in a way that ADD does not read", hint="use gzip or zstd, or RUN tar"
        )
    return head[257:262] == b"ustar"


def find_owner(text: str, image: Tree) -> tuple[int, int]:
    """Return the numbers of `--chown=user:group`, names looked up in the image."""
    user, _, group = text.partition(":")
    uid, gid = _number(user), None
    for fields in _lines(image, "etc/passwd"):
        if len(fields) > 3 and (fields[0] == user or (uid is not None and fields[2] == str(uid))):
            uid, gid = _number(fields[2]), _number(fields[3])
            break
    if uid is None:
        raise InvalidArgument(f"the image has no user {user!r:.80}")
    if group:
        gid = _number(group)
        for fields in _lines(image, "etc/group"):
            if len(fields) > 2 and fields[0] == group:
                gid = _number(fields[2])
        if gid is None:
            raise InvalidArgument(f"the image has no group {group!r:.80}")
    return uid, gid if gid is not None else uid


def _lines(image: Tree, path: str) -> Iterable[list[str]]:
    return (line.split(":") for line in image.text(path).splitlines())


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) <= 65534 else None


def directory_layer(path: str, image: Tree, out: BinaryIO) -> None:
    """Write a layer that makes a directory and what is missing above it."""
    copier = Copier(Copy((), f"{path}/", "/"), _NOTHING, image, Limits())
    copier.write_directories(path, out)


class _Nothing:
    def resolve(self, path: str) -> str | None:
        return None

    def node(self, path: str) -> Node | None:
        return None

    def names(self, path: str) -> list[str]:
        return []

    def below(self, path: str) -> Iterator[Node]:
        return iter(())


_NOTHING = _Nothing()
