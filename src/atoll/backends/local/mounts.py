"""The binds of a mount: its source, an empty directory over what is hidden below it, and what stays read-only in it."""

import os
from pathlib import Path

from atoll.backends.contract import Mount
from atoll.backends.local.launch import Bind, BindSource
from atoll.backends.local.paths import check_id
from atoll.errors import InvalidArgument

_RESERVED = ("proc", "sys", "dev", ".atoll")


def binds(mount: Mount, home: Path) -> list[Bind]:
    """All binds of a mount, in the order they are made. A name below it counts only where it is no symbolic link."""
    if mount.volume:
        image = str(home / "volumes" / check_id(mount.volume) / "disk.img")
        return [{**_bind(mount, "", mount.target, mount.read_only), "source": {"image": image, "directory": "data"}}]
    found = [_bind(mount, mount.source, mount.target, mount.read_only)]
    for name in mount.hidden:
        place = os.path.join(mount.source, name)
        if os.path.isdir(place) and not os.path.islink(place):
            empty = home / "empty"
            empty.mkdir(mode=0o555, exist_ok=True)
            found.append(_bind(mount, str(empty), f"{mount.target}/{name}", True))
    for name in mount.guarded:
        place = os.path.join(mount.source, name)
        plain = os.path.realpath(place) == place  # through a link it would be another file, guarded there or not ours
        if plain and (os.path.isdir(place) or os.path.isfile(place)):
            found.append(_bind(mount, place, f"{mount.target}/{name}", True))
    return found


def _bind(mount: Mount, path: str, target: str, read_only: bool) -> Bind:
    parts = [part for part in target.split("/") if part]
    if not target.startswith("/") or not parts or "." in parts or ".." in parts or "\0" in target:
        raise InvalidArgument(f"not a place to mount on: {target[:200]!r}")
    if parts[0] in _RESERVED:
        raise InvalidArgument(f"/{parts[0]} is not a place to mount on")
    source: BindSource = {"path": path, "uid": mount.uid, "gid": mount.gid}
    return {"source": source, "target": target, "read_only": read_only, "idmap": True}
