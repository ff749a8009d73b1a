"""Counting what a process asks of the kernel, with strace: numbers that are the same on a slow machine."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 60.0
STARTING = "execve,execveat,fork,vfork,clone,clone3"
_CALL = re.compile(r"^(\d+) +(\w+)\((.*)$")
# What depends on how often the loop wakes up, not on what is done; and the look at /usr that goes on beside callers.
_WAITING = {
    "newfstatat",
    "futex",
    "epoll_pwait",
    "epoll_wait",
    "getpid",
    "restart_syscall",
    "rt_sigreturn",
    "sched_yield",
}


class Trace:
    """The calls that were seen, as (pid, name, rest of the line)."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, str]] = []

    def read(self, path: Path) -> None:
        for line in path.read_text(errors="replace").splitlines():
            if found := _CALL.match(line):
                self.calls.append((int(found[1]), found[2], found[3]))

    def of(self, *names: str) -> list[str]:
        return [rest for _, name, rest in self.calls if name in names]

    def working(self) -> dict[str, int]:
        """How often each call was made, without those that only wait."""
        found: dict[str, int] = {}
        for _, name, _ in self.calls:
            if name not in _WAITING:
                found[name] = found.get(name, 0) + 1
        return found

    def programs(self) -> list[str]:
        """Programs that were started: the first argument of every execve that worked or whose end was seen elsewhere."""
        started = [rest for rest in self.of("execve", "execveat") if " = -1 " not in rest]
        return [rest.split('"')[1] if '"' in rest else rest for rest in started]

    def processes(self) -> int:
        """Processes that were made; threads are not counted."""
        return sum("CLONE_THREAD" not in rest for rest in self.of("fork", "vfork", "clone", "clone3"))


@contextmanager
def attached(pid: int, *options: str) -> Iterator[Trace]:
    """What a running process and whatever it starts do meanwhile."""
    trace = Trace()
    with tempfile.TemporaryDirectory(prefix="atp-") as directory:
        path = Path(directory) / "trace"
        tracer = subprocess.Popen(["strace", "-f", "-qq", "-s", "64", "-o", str(path), *options, "-p", str(pid)])
        try:
            _until_traced(pid, tracer)
            yield trace
        finally:
            tracer.terminate()
            tracer.wait(PATIENCE)
        trace.read(path)


def run(argv: list[str], env: dict[str, str], *options: str) -> Trace:
    """What a program does from its start to its end."""
    trace = Trace()
    with tempfile.TemporaryDirectory(prefix="atp-") as directory:
        path = Path(directory) / "trace"
        done = subprocess.run(
            ["strace", "-f", "-qq", "-s", "64", "-o", str(path), *options, *argv],
            env=env, capture_output=True, timeout=2 * PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout, done.stderr)
        trace.read(path)
    return trace


def python(*words: str) -> list[str]:
    return [sys.executable, *words]


def _until_traced(pid: int, tracer: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        if all("TracerPid:\t0\n" not in (task / "status").read_text() for task in tasks):
            return
        assert tracer.poll() is None, "strace has ended"
        assert time.monotonic() < deadline, "strace does not attach"
        time.sleep(0.01)
