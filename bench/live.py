"""Work in a sandbox that is there already: a program, and a Python snippet with and without a warm interpreter."""

from collections.abc import Callable
from functools import partial

from atoll import Sandbox
from bench import peers, programs
from bench.lab import Lab
from bench.measure import Contender

COLD = {"PYTHONUNBUFFERED": "1"}  # a setting of the interpreter itself: it has to be started for this run


def exec_true(lab: Lab) -> list[Contender]:
    found = [Contender("bare subprocess", programs.bare(["/bin/true"]))]
    for runtime in lab.runtimes:
        box = lab.live(runtime)
        found.append(Contender(f"atoll {runtime}", partial(box.exec, ["/bin/true"])))
    return found


def snippet(lab: Lab) -> list[Contender]:
    return _python(lab, "print(1)", lab.live)


def numpy(lab: Lab) -> list[Contender]:
    return _python(lab, "import numpy; print(numpy.ones(3).sum())", lab.live)


def _python(lab: Lab, code: str, box_of: Callable[[str], Sandbox]) -> list[Contender]:
    argv = [programs.PYTHON, "-c", code]
    wrapped = peers.one(lab, "bubblewrap")
    found = [
        Contender("bare python3 -c", programs.bare(argv)),
        Contender("bubblewrap", wrapped.runner(argv), why=wrapped.why),
    ]
    for runtime in lab.runtimes:
        box = box_of(runtime)
        found.append(Contender(f"atoll {runtime}, cold", partial(_run, box, code, COLD)))
        found.append(Contender(f"atoll {runtime}, warm", partial(_run, box, code, None)))
    return found


def _run(box: Sandbox, code: str, env: dict[str, str] | None) -> None:
    answer = box.run(code, "python", env=env)
    if answer.exit_code != 0:
        raise RuntimeError(f"exit {answer.exit_code}: {answer.stderr[-200:]}")
