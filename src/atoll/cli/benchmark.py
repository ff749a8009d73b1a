"""`sandbox benchmark`: how long sandboxes take here. Averages go to stderr for people and to stdout as JSON.

cold: created with a disk size no warm sandbox has; warm: as most people create them; lifecycle: several alive at once, from
the first create to the last destroy.
"""

from __future__ import annotations

import time

from ..client import calls
from ..errors import AtollError, InvalidArgument
from .output import print_json, say
from .session import open_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..client._sync.driver import Link
    from .grammar import Arguments

MOST = 64
UNUSUAL_DISK_MB = 777


def benchmark(arguments: Arguments) -> int:
    size, count = arguments.pool_size, arguments.iterations
    if not 1 <= size <= MOST or not 1 <= count <= 1000:
        raise InvalidArgument(f"--pool-size is 1 to {MOST}, --iterations 1 to 1000")
    link = open_link(arguments)
    link.call(calls.get("/v1/health"))
    averages: dict[str, float] = {}
    averages.update(_one_by_one(link, "cold", count, {"disk_mb": UNUSUAL_DISK_MB}))
    averages.update(_one_by_one(link, "warm", count, {}))
    averages.update(_together(link, size, count))
    for name, value in averages.items():
        say(f"{name.ljust(26)}{value:10.1f}")
    print_json({"pool_size": size, "iterations": count, **{name: round(v, 3) for name, v in averages.items()}})
    return 0


def _one_by_one(link: Link, kind: str, count: int, options: dict[str, object]) -> dict[str, float]:
    created, first, again = [], [], []
    for _ in range(count):
        start = time.monotonic()
        made = _create(link, options)
        created.append(time.monotonic() - start)
        try:
            first.append(_exec(link, made))
            again.append(_exec(link, made))
        finally:
            _destroy(link, made)
    names = (f"{kind}_create_ms", f"{kind}_first_exec_ms", f"{kind}_exec_ms")
    return dict(zip(names, map(_average, (created, first, again)), strict=True))


def _together(link: Link, size: int, count: int) -> dict[str, float]:
    totals, executed, destroyed = [], [], []
    for _ in range(count):
        alive: list[str] = []
        start = time.monotonic()
        try:
            alive += [_create(link, {}) for _ in range(size)]
            executed += [_exec(link, ref) for ref in alive]
        finally:
            ending = time.monotonic()
            for ref in alive:
                _destroy(link, ref)
        destroyed.append((time.monotonic() - ending) / size)
        totals.append((time.monotonic() - start) / size)
    names = ("lifecycle_exec_ms", "lifecycle_destroy_ms", "lifecycle_total_ms")
    return dict(zip(names, map(_average, (executed, destroyed, totals)), strict=True))


def _create(link: Link, options: dict[str, object]) -> str:
    return str(link.call(calls.create({**options, "labels": {"made-by": "benchmark"}, "lifetime": 600}))["id"])


def _exec(link: Link, ref: str) -> float:
    start = time.monotonic()
    wire = link.call(calls.start(ref, "true", language="bash", timeout=60))
    if wire.get("exit_code") != 0:
        raise InvalidArgument(f"`true` ended with {wire.get('exit_code')}; these numbers would mean nothing")
    return time.monotonic() - start


def _destroy(link: Link, ref: str) -> None:
    try:
        link.call(calls.destroy(ref))
    except AtollError as failure:
        say(f"could not destroy {ref}: {failure.message}")


def _average(values: list[float]) -> float:
    return 1000 * sum(values) / len(values)
