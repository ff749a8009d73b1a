"""Making sandboxes: one, from the pool and cold; with and without a network; a hundred at once; as many as go in a while."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from atoll import Sandbox
from bench import peers
from bench.lab import Lab
from bench.measure import Contender

TRUE = ["/bin/true"]
WORKERS = 4


class Maker:
    """Makes a sandbox and runs a first command in it; remembers it until it is destroyed."""

    def __init__(self, lab: Lab, runtime: str, *, cold: bool = False, network: bool = False) -> None:
        self._lab, self._runtime, self._cold, self._network = lab, runtime, cold, network
        self._made: list[Sandbox] = []

    def create(self) -> None:
        name = f"bench-{time.monotonic_ns()}-{threading.get_ident()}" if self._cold else None
        box = Sandbox(home=self._lab.home, runtime=self._runtime, network=self._network, name=name)
        self._made.append(box)
        answer = box.exec(TRUE)
        if answer.exit_code != 0:
            raise RuntimeError(f"exit {answer.exit_code}: {answer.stderr[-200:]}")

    def destroy(self) -> None:
        while self._made:
            box = self._made.pop()
            box.destroy()
            box.close()

    def whole(self) -> None:
        self.create()
        self.destroy()


def one(lab: Lab, runtime: str) -> list[Contender]:
    """A named sandbox never comes from the pool."""
    found = [_engine(lab, runtime)]
    if runtime not in lab.runtimes:
        return found
    cold, warm = Maker(lab, runtime, cold=True), Maker(lab, runtime)
    return [
        *found,
        Contender("atoll cold", cold.create, lab.full_pool, cold.destroy),
        Contender("atoll cold, with destroy", cold.whole, lab.full_pool),
        Contender("atoll pool, with destroy", warm.whole, lab.full_pool),
    ]


def network(lab: Lab) -> list[Contender]:
    """Measure what a network adds to a cold create."""
    runtime = lab.runtimes[0]
    without, having = Maker(lab, runtime, cold=True), Maker(lab, runtime, cold=True, network=True)
    return [
        Contender("atoll without a network", without.create, lab.full_pool, without.destroy),
        Contender("atoll with a network", having.create, lab.full_pool, having.destroy),
    ]


def burst(lab: Lab, count: int) -> list[Contender]:
    engine, made = _engine(lab, "container"), [Maker(lab, "container") for _ in range(count)]

    def destroy() -> None:
        _at_once([maker.destroy for maker in made], WORKERS)

    bare = None if engine.work is None else partial(_at_once, [engine.work] * count, count)
    return [
        Contender("runc run", bare, why=engine.why),
        Contender("atoll", partial(_at_once, [m.create for m in made], count), lab.full_pool, destroy),
    ]


def sustained(lab: Lab, seconds: float) -> list[Contender]:
    engine = _engine(lab, "container")
    bare = None if engine.work is None else partial(_rate, [engine.work] * WORKERS, seconds)
    ours = [Maker(lab, "container").whole for _ in range(WORKERS)]
    return [
        Contender("runc run", bare, why=engine.why),
        Contender("atoll", partial(_rate, ours, seconds)),
    ]


def _engine(lab: Lab, runtime: str) -> Contender:
    peer = peers.one(lab, {"container": "runc run", "gvisor": "runsc run"}[runtime])
    return Contender(peer.name, peer.runner(TRUE), lab.full_pool, why=peer.why)


def _at_once(works: Sequence[Callable[[], object]], width: int) -> None:
    """Start all of them; the first failure is raised when all have ended."""
    with ThreadPoolExecutor(width) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def _rate(works: Sequence[Callable[[], object]], seconds: float) -> float:
    """How many per second when each worker starts the next as soon as one is done."""
    start = time.perf_counter()
    until = start + seconds

    def repeat(work: Callable[[], object]) -> int:
        count = 0
        while time.perf_counter() < until:
            work()
            count += 1
        return count

    with ThreadPoolExecutor(len(works)) as pool:
        total = sum(pool.map(repeat, works))
    return total / (time.perf_counter() - start)
