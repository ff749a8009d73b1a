"""The runtimes that atoll knows, by name. Light: the command line reads the names for its help without loading any of them.

A new runtime is its file in `local/runtimes/` and one line here.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from .local.runtimes.base import Runtime

# Strongest first: of those that are `automatic`, `auto` takes the first that works.
RUNTIMES = {
    "microvm": "atoll.backends.local.runtimes.microvm:Microvm",
    "gvisor": "atoll.backends.local.runtimes.gvisor:Gvisor",
    "container": "atoll.backends.local.runtimes.container:Container",
}
# Names that are known elsewhere, and what they would need.
ELSEWHERE = {
    "kata": "kata needs Kata Containers behind a Kubernetes cluster; on one machine microvm is what comes next to it",
    "firecracker": "firecracker needs Firecracker and KVM; this version does not drive it: microvm is by QEMU",
}


def names() -> tuple[str, ...]:
    """Return the names a caller may give as a runtime, in the order of messages and help."""
    return ("auto", *sorted(RUNTIMES))


def in_words() -> str:
    """The same as a phrase: `auto, container or gvisor`."""
    *first, last = names()
    return f"{', '.join(first)} or {last}"


def classes() -> tuple[type[Runtime], ...]:
    """The class of each runtime, strongest first."""
    from importlib import import_module

    found = []
    for place in RUNTIMES.values():
        module, _, name = place.partition(":")
        found.append(getattr(import_module(module), name))
    return tuple(found)


def load(engines: Iterable[str] = ()) -> tuple[Runtime, ...]:
    """Return every runtime. `engines` are the operator's choices, each for the runtime that has one of that name."""
    chosen = tuple(engines)
    return tuple(kind(next((name for name in chosen if name in kind.engines), "auto")) for kind in classes())
