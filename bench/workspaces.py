"""Snapshots of a gigabyte: the first save, the second of an unchanged tree, and a restore."""

import time

from atoll import Sandbox
from bench.lab import Lab
from bench.measure import Contender

GIB = 1 << 30
FILES = 64


def share(lab: Lab) -> int:
    """A quick run takes an eighth, and counts each second eight times."""
    return 8 if lab.quick else 1


def snapshots(lab: Lab) -> dict[str, float]:
    """Seconds of each step, of one sandbox with random bytes in sixty-four files; cp of the same beside it."""
    each = GIB // share(lab) // FILES
    box = Sandbox.create(home=lab.home, runtime=lab.runtimes[0], network=False, disk_mb=8192, cpus=2, memory_mb=2048)
    lab.row.callback(box.destroy)
    fill = f"cd /workspace && for i in $(seq {FILES}); do head -c {each} /dev/urandom > f$i; done"
    done = box.exec(fill, timeout=300)
    if done.exit_code != 0:
        raise RuntimeError(done.stderr)
    figures = {}
    copied = _timed(lambda: box.exec("cp -r /workspace /var/tmp/copy && sync -f /var/tmp", timeout=300))
    box.exec("rm -rf /var/tmp/copy")
    figures["cp"] = copied
    figures["save"] = _timed(lambda: box.snapshot("bench-1"))
    figures["again"] = _timed(lambda: box.snapshot("bench-2"))
    made: list[Sandbox] = []
    options = {"runtime": lab.runtimes[0], "network": False, "disk_mb": 8192, "cpus": 2.0, "memory_mb": 2048}
    figures["restore"] = _timed(lambda: made.append(Sandbox.restore("bench-1", home=lab.home, **options)))  # type: ignore[arg-type]
    for one in made:
        one.destroy()
    for name in ("bench-1", "bench-2"):
        Sandbox.delete_snapshot(name, home=lab.home)
    return {name: seconds * share(lab) for name, seconds in figures.items()}


def rates(lab: Lab) -> list[Contender]:
    return [
        Contender("cp -r and sync inside", lambda: _figures(lab)["cp"]),
        Contender("atoll save", lambda: _figures(lab)["save"]),
        Contender("atoll restore", lambda: _figures(lab)["restore"]),
    ]


def again(lab: Lab) -> list[Contender]:
    return [
        Contender("first save", lambda: _figures(lab)["save"]),
        Contender("atoll", lambda: _figures(lab)["again"]),
    ]


def _figures(lab: Lab) -> dict[str, float]:
    return lab.once("snapshots", lambda: snapshots(lab))


def _timed(work: object) -> float:
    assert callable(work)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
