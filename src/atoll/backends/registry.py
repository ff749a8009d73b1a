"""The runtimes that atoll knows, by name. Light: the command line reads the names for its help without loading any of them.

A new runtime is its file in `local/runtimes/` and one line here.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .local.runtimes.base import Runtime

# Strongest first: `auto` takes the first that works.
RUNTIMES = {
    "gvisor": "atoll.backends.local.runtimes.gvisor:Gvisor",
    "container": "atoll.backends.local.runtimes.container:Container",
}
# Names that are known elsewhere, and what they would need.
ELSEWHERE = {
    "microvm": "microvm needs virtual machines (KVM), which this version does not start",
    "kata": "kata needs Kata Containers behind a Kubernetes cluster",
    "firecracker": "firecracker needs Firecracker and KVM behind a Kubernetes cluster",
}


def names() -> tuple[str, ...]:
    """Return the names a caller may give as a runtime, in the order of messages and help."""
    return ("auto", *sorted(RUNTIMES), next(iter(ELSEWHERE)))


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


def load(engine: str = "auto") -> tuple[Runtime, ...]:
    """Return every runtime. `engine` is the operator's choice for the runtime that has one of that name."""
    return tuple(kind(engine if engine in kind.engines else "auto") for kind in classes())
