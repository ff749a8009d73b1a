"""One program in a place made for it and thrown away after: peers, and atoll from the pool, cold, and by its command line."""

import time
from functools import partial

from atoll import Sandbox
from bench import peers, programs
from bench.lab import ATOLL, Lab
from bench.measure import Contender

HELLO = {
    "sh": (["/bin/sh", "-c", "echo hello"], "echo hello", "bash"),
    "Python": ([programs.PYTHON, "-c", "print('hello')"], "print('hello')", "python"),
    "Node": ([programs.NODE, "-e", "console.log('hello')"], "console.log('hello')", "node"),
    "numpy": ([programs.PYTHON, "-c", "import numpy; print(numpy.ones(3).sum())"], "import numpy; print(numpy.ones(3).sum())", "python"),
}  # fmt: skip


def hello(lab: Lab, language: str) -> list[Contender]:
    """The same program everywhere; atoll runs it as code in a language, as an agent would."""
    argv, code, name = HELLO[language]
    found = [Contender(peer.name, peer.runner(argv), why=peer.why) for peer in peers.everyone(lab)]
    for runtime in lab.runtimes:
        once = partial(_atoll, lab, runtime, code, name)
        found.append(Contender(f"atoll {runtime}, pool", once, lab.full_pool))
        found.append(Contender(f"atoll {runtime}, cold", partial(once, cold=True), lab.full_pool))
    return [*found, *(_command_line(lab, runtime, argv) for runtime in lab.runtimes[:1])]


def _atoll(lab: Lab, runtime: str, code: str, language: str, *, cold: bool = False) -> None:
    label = f"bench-{time.monotonic_ns()}" if cold else None  # a named one never comes from the pool
    with Sandbox(home=lab.home, runtime=runtime, network=False, name=label) as box:
        answer = box.run(code, language)
    if answer.exit_code != 0:
        raise RuntimeError(f"exit {answer.exit_code}: {answer.stderr[-200:]}")


def _command_line(lab: Lab, runtime: str, argv: list[str]) -> Contender:
    line = [*ATOLL, "run", "--image", "host", "--no-network", "--", *argv]
    work = partial(programs.run, line, env={**lab.env, "ATOLL_RUNTIME": runtime}, cwd="/")
    return Contender(f"atoll run, {runtime}", work, lab.full_pool)
