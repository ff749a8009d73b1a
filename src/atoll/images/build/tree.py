"""An image's files as a sandbox sees them: its layers put together, read without mounting anything.

Layers hold hostile names and links. Each component of a path is looked at before the next is used, so no link of an
image ever leads to a file of this machine; nothing changes a layer once it is stored.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from atoll.errors import InvalidArgument
from atoll.images.build.context import Node

_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
_MAX_LINKS = 40


class Tree:
    """The merged view of a stack, top-most first. `usr` is a stack of its own for /usr, where an image has one."""

    def __init__(self, stack: Sequence[Path], usr: Sequence[Path] = ()) -> None:
        self._stack = tuple(stack)
        self._usr = tuple(usr)

    def node(self, path: str) -> Node | None:
        """Return what is at a path whose directories are no links."""
        found = self._find(path)
        if found is None:
            return Node("", "d", 0o755) if not path else None
        place, state = found
        return _node(path, place, state)

    def resolve(self, path: str) -> str | None:
        """Return the path with every link followed, below this root; None when there is nothing at its end."""
        found = self.place(path)
        return found if self.node(found) is not None else None

    def place(self, path: str, *, follow_last: bool = True) -> str:
        """Return where a path leads, with links followed as far as they are there. What is missing stays as it is."""
        todo = [part for part in path.split("/") if part not in ("", ".")]
        here: list[str] = []
        links = 0
        while todo:
            part = todo.pop(0)
            if part == "..":
                del here[-1:]
                continue
            found = self._find("/".join((*here, part)))
            if found is None or not stat.S_ISLNK(found[1].st_mode) or (not todo and not follow_last):
                here.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise InvalidArgument(f"too many links on the way to {path!r:.200}")
            link = os.readlink(found[0])
            if link.startswith("/"):
                here = []
            todo = [one for one in link.split("/") if one not in ("", ".")] + todo
        return "/".join(here)

    def names(self, path: str) -> list[str]:
        """Return the names in a directory."""
        seen: dict[str, bool] = {}
        for layer in self._layers(path):
            place = _walk(layer, self._inside(path))
            if place is None:
                continue
            if not stat.S_ISDIR(place[1].st_mode):
                break
            for entry in os.scandir(place[0]):
                seen.setdefault(entry.name, not _is_whiteout(entry.stat(follow_symlinks=False)))
            if _is_opaque(place[0]):
                break
        if self._usr and not path:
            seen["usr"] = True
        return sorted(name for name, there in seen.items() if there)

    def below(self, path: str) -> Iterator[Node]:
        """Yield everything below a directory, parents first. Links are not followed."""
        for name in self.names(path):
            full = f"{path}/{name}" if path else name
            node = self.node(full)
            if node is None:
                continue
            yield node
            if node.kind == "d":
                yield from self.below(full)

    def text(self, path: str, most: int = 1 << 20) -> str:
        """Return a small file's text; empty when there is none."""
        found = self.resolve(path)
        node = self.node(found) if found is not None else None
        if node is None or node.kind != "f" or not isinstance(node.content, Path):
            return ""
        fd = os.open(node.content, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.read(fd, most).decode("utf-8", "replace")
        finally:
            os.close(fd)

    def _layers(self, path: str) -> tuple[Path, ...]:
        return self._usr if self._usr and (path == "usr" or path.startswith("usr/")) else self._stack

    def _inside(self, path: str) -> str:
        return path[4:] if self._layers(path) is self._usr and self._usr else path

    def _find(self, path: str) -> tuple[Path, os.stat_result] | None:
        for layer in self._layers(path):
            inside = self._inside(path)
            place, ends = layer, False
            state = os.lstat(layer)
            missing = False
            for part in inside.split("/") if inside else ():
                ends = ends or _is_opaque(place)
                place = place / part
                try:
                    state = os.lstat(place)
                except (FileNotFoundError, NotADirectoryError):
                    missing = True
                    break
                if _is_whiteout(state):
                    return None
                if not stat.S_ISDIR(state.st_mode) and place != layer / inside:
                    return None
            if not missing:
                return place, state
            if ends:
                return None
        return None


def _walk(layer: Path, inside: str) -> tuple[Path, os.stat_result] | None:
    """Return a path of one layer, or what hides it in the layers below: a file or deletion mark on the way."""
    place, state = layer, os.lstat(layer)
    for part in inside.split("/") if inside else ():
        place = place / part
        try:
            state = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISDIR(state.st_mode):
            return place, state
    return place, state


def _node(path: str, place: Path, state: os.stat_result) -> Node:
    mode, common = stat.S_IMODE(state.st_mode), (state.st_uid, state.st_gid, state.st_mtime)
    if stat.S_ISDIR(state.st_mode):
        return Node(path, "d", mode, *common)
    if stat.S_ISLNK(state.st_mode):
        return Node(path, "l", 0o777, *common, link=os.readlink(place))
    if stat.S_ISREG(state.st_mode):
        return Node(path, "f", mode, *common, size=state.st_size, content=place)
    return Node(path, "x", mode, *common)


def _is_whiteout(state: os.stat_result) -> bool:
    return stat.S_ISCHR(state.st_mode) and state.st_rdev == 0


def _is_opaque(place: Path) -> bool:
    for name in _OPAQUE:
        try:
            if os.getxattr(place, name, follow_symlinks=False) == b"y":
                return True
        except OSError:
            continue
    return False
