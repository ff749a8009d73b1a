"""What sandboxes cost that do nothing: memory of one, and of a thousand at once; and the list of a thousand stopped ones."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from atoll import Sandbox
from bench import processes
from bench.lab import Lab
from bench.measure import Contender

FEW = 10
WATCH = 10.0  # seconds over which idle CPU is counted
SETTLE = 5.0
WORKERS = 8


@dataclass(frozen=True)
class Crowd:
    """Figures of many idle sandboxes at once."""

    count: int
    seconds: float  # to make them all
    cpu_percent: float  # of one core, for all processes of atoll together
    daemon_mb: float  # that the daemon grew by, for each
    sandbox_mb: float  # PSS and kernel memory of one of them


def memory(lab: Lab, runtime: str) -> list[Contender]:
    """Of a few sandboxes: without interpreters, and after a first Python snippet left a warm one behind."""
    return [
        Contender("atoll", partial(_memory, lab, runtime, False)),
        Contender("atoll with a warm Python", partial(_memory, lab, runtime, True)),
    ]


def _memory(lab: Lab, runtime: str, python: bool) -> float:
    boxes: list[Sandbox] = []
    try:
        for number in range(FEW):  # named, so that what the pool prepared does not count
            name = f"bench-idle-{number}"
            boxes.append(Sandbox.create(home=lab.home, runtime=runtime, network=False, name=name))
            if python:
                for _ in range(2):
                    boxes[-1].run("print(1)", "python")
        time.sleep(SETTLE)
        return sum(_cost(box.id) for box in boxes) / len(boxes)
    finally:
        for box in boxes:
            box.destroy()
            box.close()


def _cost(ident: str) -> float:
    return processes.pss(processes.pids_of(ident)) + processes.kernel_memory(ident)


def density(lab: Lab, runtime: str, figure: str) -> list[Contender]:
    """One figure of the crowd; the crowd is made once and its figures are kept."""
    count = {"container": 1000, "gvisor": 200}[runtime] // (20 if lab.quick else 1)
    return [Contender("atoll", lambda: getattr(_crowd(lab, runtime, count), figure))]


def _crowd(lab: Lab, runtime: str, count: int) -> Crowd:
    return lab.once(f"crowd {runtime}", lambda: _measure(lab, runtime, count))


def _measure(lab: Lab, runtime: str, count: int) -> Crowd:
    daemon = int(lab.health()["pid"])
    before = processes.resident(daemon)
    start = time.perf_counter()
    names = [f"crowd-{runtime}-{number}" for number in range(count)]
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            idents = list(pool.map(partial(_create, lab, runtime), names))
        seconds = time.perf_counter() - start
        time.sleep(SETTLE)
        each = (processes.resident(daemon) - before) / count
        everyone = processes.tree(daemon)
        used = processes.cpu_seconds(everyone)
        time.sleep(WATCH)
        percent = (processes.cpu_seconds(everyone) - used) / WATCH * 100
        sample = idents[:: max(1, count // 50)]
        cost = sum(_cost(ident) for ident in sample) / len(sample)
        return Crowd(count, seconds, percent, each, cost)
    finally:
        if runtime != "container":
            _each(lab, "destroy", names)


def _create(lab: Lab, runtime: str, name: str) -> str:
    box = Sandbox.create(home=lab.home, runtime=runtime, network=False, name=name)
    box.close()
    return box.id


def _each(lab: Lab, verb: str, names: list[str]) -> None:
    def one(name: str) -> None:
        box = Sandbox.connect(name, home=lab.home)
        getattr(box, verb)()
        box.close()

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, names))


def stopped(lab: Lab) -> list[Contender]:
    """The crowd of containers, stopped, and listed."""
    count = 1000 // (20 if lab.quick else 1)
    _crowd(lab, "container", count)
    names = [f"crowd-container-{number}" for number in range(count)]
    lab.row.callback(_each, lab, "destroy", names)
    _each(lab, "stop", names)

    def listed() -> None:
        found = Sandbox.list(state="stopped", home=lab.home)
        assert len(found) == count, len(found)

    return [Contender("atoll", listed)]
