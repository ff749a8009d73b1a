"""The part of an order that makes the launcher itself the engine: the configuration runc would get, and its filter as a program.

What the launcher does with it is at the top of `launcher/src/direct.rs`. It refuses whatever it does not know; then the probe says why,
and another engine is taken.
"""

from collections.abc import Mapping
from pathlib import Path

from atoll.backends.local.kernel import filters
from atoll.backends.local.kernel.cgroups import TOP, Groups
from atoll.errors import Unsupported

USER_NS, NET_NS = "/proc/self/fd/4", "/proc/self/fd/5"  # how the configuration names what the launcher holds already
# Hierarchies of v1 that limits need no group in: one holds devices back, by the other a service manager knows whose processes are.
_FURTHER = ("devices", "name=systemd")


def order(config: bytes, filter: str, pid_file: int) -> Mapping[str, object]:
    """`pid_file`: which of the descriptors sent along is the file for the process id."""
    return {"config": config.decode(), "filter": filters.of_profile(filter).hex(), "pid_file": pid_file}


def doors(groups: Groups, box: str) -> list[str]:
    """The files by which a process enters the sandbox's groups. The further ones are made here and go with the others."""
    if groups.rootless:
        raise Unsupported("the direct engine needs root", hint="an ordinary user's sandboxes are runc's")
    further = [groups.hierarchies.v1[name] for name in _FURTHER if name in groups.hierarchies.v1]
    for mount in further:
        _group(groups, mount, box).mkdir(parents=True, exist_ok=True)
    return groups.open(box).doors()


def _group(groups: Groups, mount: Path, box: str) -> Path:
    return groups.hierarchies.top(mount) / TOP / groups.mark / box
