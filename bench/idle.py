"""Cost of idle sandboxes: memory and CPU of one, of a thousand at once; and the list of a thousand stopped ones."""

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll import Sandbox
from atoll.errors import AtollError, NotFound
from bench import peers, processes
from bench.lab import Lab
from bench.measure import Contender

FEW = 10
WATCH = 8.0  # seconds over which idle CPU is counted
SETTLE = 2.0
DOZED = 45.0  # by then a gVisor sandbox in which nothing runs sleeps
COOLED = 13.0  # a warm interpreter that nobody uses for ten seconds gives memory back
WORKERS = 8
LONGEST = 150.0  # seconds to make a crowd


@dataclass(frozen=True)
class Crowd:
    """Figures of many idle sandboxes at once."""

    seconds: float  # to make them all
    cpu_percent: float  # of one core, for all processes of atoll together
    daemon_mb: float  # that the daemon grew by, for each
    sandbox_mb: float  # PSS and kernel memory of one of them


def memory(lab: Lab, runtime: str) -> list[Contender]:
    """Measure a few sandboxes: made cold, which have no interpreter; from the pool, where Python waits; and just after Python was used."""
    return [
        Contender("atoll", partial(_memory, lab, runtime, cold=True, runs=0, rest=SETTLE)),
        Contender("atoll with a warm Python", partial(_memory, lab, runtime, cold=False, runs=1, rest=COOLED)),
        Contender("atoll just after Python runs", partial(_memory, lab, runtime, cold=False, runs=2, rest=SETTLE)),
    ]


def _memory(lab: Lab, runtime: str, *, cold: bool, runs: int, rest: float) -> float:
    boxes: list[Sandbox] = []
    try:
        for number in range(FEW):
            lab.full_pool()
            name = f"bench-idle-{number}" if cold else None
            boxes.append(Sandbox.create(home=lab.home, runtime=runtime, network=False, name=name))
            for _ in range(runs):
                boxes[-1].run("print(1)", "python")
        time.sleep(rest)
        return sum(_cost(box.id) for box in boxes) / len(boxes)
    finally:
        for box in boxes:
            box.destroy()
            box.close()


def _cost(ident: str) -> float:
    return processes.pss(processes.pids_of(ident)) + processes.kernel_memory(ident)


def density(lab: Lab, runtime: str, figure: str) -> list[Contender]:
    """One figure of the crowd; the crowd is made once and its figures are kept."""
    return [Contender("atoll", lambda: getattr(_crowd(lab, runtime), figure))]


def _crowd(lab: Lab, runtime: str) -> Crowd:
    """Made once. When that fails all its figures fail, with the same words."""
    found = lab.once(f"crowd {runtime}", lambda: _measure(lab, runtime))
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _names(lab: Lab, runtime: str) -> list[str]:
    count = {"container": 1000, "gvisor": 200}[runtime] // (20 if lab.quick else 1)
    return [f"crowd-{runtime}-{number}" for number in range(count)]


def _measure(lab: Lab, runtime: str) -> Crowd | str:
    """Make them, let them rest, look. Those of gVisor go at once, those of containers are stopped by a later row."""
    names, daemon = _names(lab, runtime), int(lab.health()["pid"])
    before, start = processes.resident(daemon), time.perf_counter()
    until = start + LONGEST
    made: list[str] = []

    def create(name: str) -> None:
        if time.perf_counter() < until:
            box = Sandbox.create(home=lab.home, runtime=runtime, network=False, name=name)
            made.append(box.id)
            box.close()

    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(create, names))
        seconds = time.perf_counter() - start
        if len(made) < len(names):
            return f"{len(made)} of {len(names)} were there after {LONGEST:.0f} s"
        each = (processes.resident(daemon) - before) / len(made)
        rest = SETTLE if runtime == "container" else DOZED
        percent = _percent(partial(_crowd_and_daemon, made), daemon, rest)
        sample = made[:: max(1, len(made) // 50)]
        return Crowd(seconds, percent, each, sum(_cost(ident) for ident in sample) / len(sample))
    except AtollError as error:
        return f"{len(made)} were there, then {type(error).__name__}: {error}"
    finally:
        if runtime != "container":
            _each(lab, "destroy", names)


def _crowd_and_daemon(made: list[str], daemon: int) -> set[int]:
    """The crowd's processes, the daemon and its helpers; not the unused sandboxes of the pool, which may be of another kind."""
    rest = {pid for pid in processes.tree(daemon) if not processes.in_a_sandbox(pid)}
    return rest.union(*(processes.pids_of(ident) for ident in made))


def _each(lab: Lab, verb: str, names: list[str]) -> None:
    def one(name: str) -> None:
        with suppress(NotFound):
            box = Sandbox.connect(name, home=lab.home)
            getattr(box, verb)()
            box.close()

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, names))


def stopped(lab: Lab) -> list[Contender]:
    """The crowd of containers, stopped, and listed."""
    names = _names(lab, "container")
    lab.row.callback(_each, lab, "destroy", names)
    _crowd(lab, "container")
    _each(lab, "stop", names)

    def listed() -> None:
        found = Sandbox.list(state="stopped", home=lab.home)
        assert len(found) == len(names), len(found)

    return [Contender("atoll", listed)]


def gvisor_cpu(lab: Lab) -> list[Contender]:
    """gVisor's kernel wakes up by itself: what a bare one costs that only sleeps, and one of ours, which atoll freezes."""
    peer = peers.one(lab, "runsc run")
    command, box = peer.command, lab.live("gvisor")

    def bare() -> float:
        assert command is not None
        argv = command(["/bin/sleep", str(SETTLE + WATCH + 5)])
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as engine:
            return _percent(processes.tree, engine.pid)

    return [
        Contender("runsc run sleep", None if command is None else bare, why=peer.why),
        Contender("atoll", lambda: _percent(processes.pids_of, box.id, DOZED)),
    ]


def _percent(find: Callable[[Any], set[int]], what: int | str, rest: float = SETTLE) -> float:
    """CPU of one core that these processes use while nobody asks anything of them."""
    time.sleep(rest)
    pids = find(what)
    before = processes.cpu_seconds(pids)
    time.sleep(WATCH)
    return (processes.cpu_seconds(pids) - before) / WATCH * 100
