"""Directories of the host a sandbox may see, and parts of them it may not: atoll's own state, and a project's levers.

A program in a sandbox that can write a project could plant what people's tools later run: hooks, editor tasks, settings of
coding agents. Those paths stay read-only in a writable mount. So does `.git` as a whole: a file made in it, such as
`commondir`, decides which configuration git on the host reads, and what does not exist yet cannot be covered one by one.
Somebody who wants commits made inside mounts the `.git` directory itself, by name. The backend covers what is named here.
"""

import os
from pathlib import Path

from atoll import errors
from atoll.backends.contract import Mount
from atoll.core.access.principals import Principal
from atoll.model import CreateSandbox
from atoll.model import Mount as Wanted

GUARDED = (
    ".git", ".claude", ".codex", ".gemini", ".mcp.json", ".vscode", "agentkernel.toml", "atoll.toml",
)  # fmt: skip
# The machine itself: no request may name these, nor anything below the last five.
MACHINE = ("/", "/etc", "/home", "/usr", "/var", "/boot", "/dev", "/proc", "/run", "/sys")
BELOW = MACHINE[5:]
# Below a user's home: keys and state of atoll under any of its names.
STATE = (".atoll", ".k8e", ".agentkernel", ".local/share/agentkernel")


def allowed_mounts(home: Path, who: Principal, spec: CreateSandbox) -> tuple[Mount, ...]:
    """All mounts of a request, each judged by the place that its source really is."""
    state = os.path.realpath(home)
    return tuple(_allowed(state, who, wanted) for wanted in spec.mounts)


def _allowed(state: str, who: Principal, wanted: Wanted) -> Mount:
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
    below = (os.path.relpath(state, source),) if os.path.commonpath((state, source)) == source else ()
    return Mount(
        source,
        wanted.target,
        wanted.read_only,
        who.uid,
        who.gid,
        hidden=tuple(sorted({*STATE, *below})),
        guarded=() if wanted.read_only else GUARDED,
    )
