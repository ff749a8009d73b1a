"""The cluster's programs on this machine, known by pid and start time, and their control groups."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from binaries import BIN, CACHE, say

STATE = Path(os.environ.get("ATOLL_K8S_STATE", CACHE / "state"))
LOGS, PIDS = STATE / "log", STATE / "pid"


def wait_for(what: str, test: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not test():
        if time.monotonic() > end:
            sys.exit(f"{what}: not there after {seconds:.0f} s; see {LOGS}")
        time.sleep(0.1)


def birth(pid: int) -> str:
    """Return when the process started, in clock ticks; nothing if it is gone.

    Pid and start time together name one process for good.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def record(name: str, pid: int) -> None:
    (PIDS / name).write_text(f"{pid} {birth(pid)}")


def recorded(name: str) -> int:
    """Return the pid of a program that was started here and still runs, else 0."""
    try:
        pid, born = (PIDS / name).read_text().split()
    except (OSError, ValueError):
        return 0
    return int(pid) if birth(int(pid)) == born else 0


def child_of(pid: int) -> int:
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(words[0]) if words else 0


def start(name: str, *words: object, inside: int = 0) -> None:
    """Start a program unless it runs, in the namespaces of the process `inside` if there is one."""
    if recorded(name):
        return
    join = ["nsenter", "--target", str(inside), "--mount", "--net", "--pid", "--"] if inside else []
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}:/usr/sbin:/sbin"}
    with open(LOGS / f"{name}.log", "ab") as log:
        process = subprocess.Popen(
            [*join, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    if inside:
        wait_for(name, lambda: process.poll() is not None or child_of(process.pid))
    time.sleep(0.05)
    if process.poll() is not None:
        sys.exit(f"{name} ended at once; see {LOGS / name}.log")
    record(name, child_of(process.pid) if inside else process.pid)


def stop(name: str, number: int = signal.SIGTERM) -> None:
    pid = recorded(name)
    if pid:
        os.kill(pid, number)
        end = time.monotonic() + 10
        while recorded(name):
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
    (PIDS / name).unlink(missing_ok=True)


def hierarchies() -> list[Path]:
    """Return the roots of the control group trees: one with cgroup v2, several with v1 and hybrid."""
    top = Path("/sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():
        return [top]
    return [child for child in top.iterdir() if child.is_dir() and not child.is_symlink()]


def make_control_groups(name: str) -> None:
    for top in hierarchies():
        group = top / name
        group.mkdir(parents=True, exist_ok=True)
        for key in ("cpuset.cpus", "cpuset.mems") if top.name == "cpuset" else ():
            for level in (group.parent, group):  # a new v1 cpuset is empty and takes no process
                (level / key).write_text((top / key).read_text())


def remove_control_groups(name: str) -> None:
    for _ in range(50):  # a group can be removed shortly after its last process has ended
        groups = [group for top in hierarchies() for group in top.glob(f"{name}/**/")]
        for group in sorted(groups, key=lambda group: -len(group.parts)):
            with contextlib.suppress(OSError):
                group.rmdir()
        if not any((top / name).exists() for top in hierarchies()):
            return
        time.sleep(0.1)
    say(f"control groups {name} could not all be removed")
