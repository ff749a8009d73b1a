"""Finds our own programs: inside the installed package, else in the build directories of a checkout."""

import os
import shutil
from pathlib import Path

from atoll.errors import Unsupported

_PACKAGE = Path(__file__).resolve().parents[2]
_CHECKOUT = _PACKAGE.parents[1]
_SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def guest() -> Path:
    """The agent, PID 1 of every sandbox."""
    return _ours("atoll-guest", "guest")


def launcher() -> Path:
    """The program that makes a sandbox's namespaces and mounts."""
    return _ours("atoll-launch", "launcher")


def system(name: str) -> str | None:
    """A program of the machine. /usr/sbin is searched too: an ordinary user's PATH often lacks it."""
    return shutil.which(name, path=os.environ.get("PATH", "") + os.pathsep + _SYSTEM)


_found: dict[str, Path] = {}  # asked for often in each create, so looked for again only when it is gone


def _ours(name: str, crate: str) -> Path:
    if (known := _found.get(name)) is not None and os.path.isfile(known):
        return known
    for candidate in (_PACKAGE / "_bin" / name, _CHECKOUT / crate / "target" / "release" / name):
        if candidate.is_file():
            _found[name] = candidate
            return candidate
    raise Unsupported(
        f"{name} is not there", hint="run `make setup`, or install the atoll package for this architecture"
    )
