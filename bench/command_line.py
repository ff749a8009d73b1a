"""The command line's wall time, from one process start to its end."""

from bench import programs
from bench.lab import ATOLL, Lab
from bench.measure import Contender

HELLO = ["sandbox", "run", "print('hello')", "--lang", "python"]


def bare() -> Contender:
    return Contender("python3 -c pass", programs.bare([programs.PYTHON, "-c", "pass"]))


def sandbox_run(lab: Lab) -> list[Contender]:
    """`sandbox run` uses the tenant's automatic sandbox; here each runtime is a tenant."""
    return [bare(), *(_command(lab, runtime, HELLO, f"atoll {runtime}") for runtime in lab.runtimes)]


def run_once(lab: Lab) -> list[Contender]:
    """`atoll run`: a sandbox of its own each time, from the pool, with the usual hosts."""
    argv = ["run", "python3", "-c", "print(1)"]
    return [bare(), *(_command(lab, runtime, argv, f"atoll {runtime}") for runtime in lab.runtimes)]


def _command(lab: Lab, runtime: str, argv: list[str], name: str) -> Contender:
    env = {**lab.env, "ATOLL_RUNTIME": runtime, "ATOLL_TENANT": runtime}
    line = [*ATOLL, *argv]
    return Contender(name, lambda: programs.run(line, env=env, cwd="/"), lab.full_pool)
