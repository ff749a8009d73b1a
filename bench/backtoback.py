"""Calls without a pause between them: each starts when the one before has answered. And eight callers at once."""

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from atoll import Sandbox
from bench import programs
from bench.lab import Lab
from bench.measure import Contender

CALLS, COUNTED = 200, 100  # so many in a row, of which the last are counted
CALLERS = 8
CODE = {"python": "print(1)", "node": "console.log(1)"}
BARE = {"python": [programs.PYTHON, "-c"], "node": [programs.NODE, "-e"]}


def series(call: Callable[[], object], calls: int, counted: int) -> list[float]:
    """Calls in a row: the seconds of each of the last."""
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found[-counted:]


def snippets(lab: Lab, language: str) -> list[Contender]:
    code = CODE[language]
    argv = [*BARE[language], code]
    ours = [(f"atoll {r}", partial(snippet, lab.live(r), language)) for r in lab.default_first()]
    return _in_a_row(lab, [(f"bare {' '.join(argv[:2]).rpartition('/')[2]}", programs.bare(argv)), *ours])


def exec_true(lab: Lab) -> list[Contender]:
    ours = [(f"atoll {r}", partial(_true, lab.live(r))) for r in lab.default_first()]
    return _in_a_row(lab, [("bare subprocess", programs.bare(["/bin/true"])), *ours])


def callers(lab: Lab) -> list[Contender]:
    """Snippets per second of eight callers of one sandbox, beside eight bare processes at a time."""
    count = 40 if lab.quick else 160
    line = ["xargs", f"-P{CALLERS}", "-I{}", programs.PYTHON, "-c", CODE["python"]]

    def bare() -> float:
        start = time.perf_counter()
        done = subprocess.run(line, input="x\n" * count, capture_output=True, text=True)
        if done.returncode != 0 or done.stdout.count("1") != count:
            raise RuntimeError(f"exit {done.returncode}: {done.stderr[-200:]}")
        return count / (time.perf_counter() - start)

    def ours(runtime: str) -> float:
        box = lab.live(runtime)
        with ThreadPoolExecutor(CALLERS) as pool:
            start = time.perf_counter()
            for _ in pool.map(lambda _: snippet(box, "python"), range(count)):
                pass
            return count / (time.perf_counter() - start)

    return [
        Contender(f"bare xargs -P{CALLERS} python3 -c", bare),
        *(Contender(f"atoll {r}", partial(ours, r)) for r in lab.default_first()),
    ]


def _in_a_row(lab: Lab, calls: list[tuple[str, Callable[[], object]]]) -> list[Contender]:
    every, counted = (CALLS // 5, COUNTED // 5) if lab.quick else (CALLS, COUNTED)
    return [Contender(name, partial(series, call, every, counted)) for name, call in calls]


def snippet(box: Sandbox, language: str) -> None:
    answer = box.run(CODE[language], language)
    if answer.stdout != "1\n":
        raise RuntimeError(f"exit {answer.exit_code}: {answer.stdout[-100:]} {answer.stderr[-200:]}")


def _true(box: Sandbox) -> None:
    if box.exec(["/bin/true"]).exit_code != 0:
        raise RuntimeError("/bin/true failed")
