"""Directories of the host that a sandbox sees: checked, with atoll's own state masked and a project's levers read-only.

A program in a sandbox that can write a project could plant what people's tools later run: hooks, editor tasks, settings of
coding agents. Those paths are mounted read-only over a writable mount. So is `.git` as a whole: a file made in it, such as
`commondir`, decides which configuration git on the host reads, and what does not exist yet cannot be covered one by one.
Somebody who wants commits made inside mounts the `.git` directory itself, by name.
"""

import os
from pathlib import Path

from atoll import errors
from atoll.backends.contract import Mount
from atoll.core.access.principals import Principal
from atoll.model import CreateSandbox

GUARDED = (
    ".git", ".claude", ".codex", ".gemini", ".mcp.json", ".vscode", "agentkernel.toml", "atoll.toml",
)  # fmt: skip
# The machine itself: no request may name these, nor anything below the last five.
MACHINE = ("/", "/etc", "/home", "/usr", "/var", "/boot", "/dev", "/proc", "/run", "/sys")
BELOW = MACHINE[5:]
# Below a user's home: keys and state of atoll under any of its names.
STATE = (".atoll", ".k8e", ".agentkernel", ".local/share/agentkernel")


def host_mounts(home: Path, who: Principal, spec: CreateSandbox) -> tuple[Mount, ...]:
    """All mounts of a request, in the order they are made."""
    state = os.path.realpath(home)
    mounts: list[Mount] = []
    for wanted in spec.mounts:
        source = os.path.realpath(wanted.source)
        if not os.path.lexists(source):
            raise errors.InvalidArgument(f"mount source {wanted.source!r:.200} does not exist")
        if os.path.commonpath((state, source)) == state:
            raise errors.PermissionDenied(f"{wanted.source!r:.200} holds atoll's own state and cannot be mounted")
        if source in MACHINE or source.startswith(tuple(f"{place}/" for place in BELOW)):
            raise errors.PermissionDenied(
                f"{wanted.source!r:.200} is part of the machine itself and cannot be mounted",
                hint="name a directory inside it",
            )
        if not os.path.isdir(source) and not os.path.isfile(source):
            raise errors.PermissionDenied(f"{wanted.source!r:.200} is neither a directory nor a file")
        mounts.append(Mount(source, wanted.target, wanted.read_only, who.uid, who.gid))
        mounts += _masks(home, state, source, wanted.target, who)
        if not wanted.read_only and os.path.isdir(source):
            mounts += _guards(source, wanted.target, who)
    return tuple(mounts)


def _masks(home: Path, state: str, source: str, target: str, who: Principal) -> list[Mount]:
    """An empty directory over each place below the mount where state or keys are kept."""
    hidden = {state, *(os.path.join(source, name) for name in STATE)}
    empty = home / "empty"
    found = []
    for place in sorted(hidden):
        if os.path.commonpath((place, source)) != source or not os.path.isdir(place) or os.path.islink(place):
            continue
        empty.mkdir(mode=0o555, exist_ok=True)
        found.append(Mount(str(empty), f"{target}/{os.path.relpath(place, source)}", True, who.uid, who.gid))
    return found


def _guards(source: str, target: str, who: Principal) -> list[Mount]:
    found = []
    for name in GUARDED:
        place = os.path.join(source, name)
        plain = os.path.realpath(place) == place  # through a link it would be another file, guarded there or not ours
        if plain and (os.path.isdir(place) or os.path.isfile(place)):
            found.append(Mount(place, f"{target}/{name}", True, who.uid, who.gid))
    return found
