"""Work in a sandbox that is there already: a program, and snippets; Python with and without its warm interpreter."""

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


def python(lab: Lab) -> list[Contender]:
    return _snippet(lab, lab, "python", "print(1)", [programs.PYTHON, "-c"])


def numpy(lab: Lab) -> list[Contender]:
    """Beside the usual sandboxes, those of a daemon that was told to have numpy imported ahead."""
    code = "import numpy; print(numpy.ones(3).sum())"
    programs.run([programs.PYTHON, "-c", code])
    ahead = lab.row.enter_context(Lab(lab.rounds, quick=lab.quick, settings='[warm]\npreload = ["numpy"]'))
    return _snippet(lab, ahead, "python", code, [programs.PYTHON, "-c"])


def node(lab: Lab) -> list[Contender]:
    return _snippet(lab, lab, "node", "console.log(1)", [programs.NODE, "-e"])


def shell(lab: Lab) -> list[Contender]:
    return _snippet(lab, lab, "bash", "echo 1", ["/bin/bash", "-c"])


def _snippet(lab: Lab, warm: Lab, language: str, code: str, command: list[str]) -> list[Contender]:
    argv, wrapped = [*command, code], peers.one(lab, "bubblewrap")
    found = [
        Contender(f"bare {' '.join([argv[0].rpartition('/')[2], argv[1]])}", programs.bare(argv)),
        Contender("bubblewrap", wrapped.runner(argv), why=wrapped.why),
    ]
    for runtime in lab.runtimes:
        if language == "python":
            found.append(Contender(f"atoll {runtime}, cold", partial(_run, lab.live(runtime), language, code, COLD)))
        found.append(Contender(f"atoll {runtime}", partial(_run, warm.live(runtime), language, code, None)))
    return found


def _run(box: Sandbox, language: str, code: str, env: dict[str, str] | None) -> None:
    answer = box.run(code, language, env=env)
    if answer.exit_code != 0:
        raise RuntimeError(f"exit {answer.exit_code}: {answer.stderr[-200:]}")
