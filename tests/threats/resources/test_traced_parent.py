"""F2-L5: a program that asks its parent to trace it (PTRACE_TRACEME) does not make its parent believe that it has ended."""

import pytest
from lab.sandboxes import until

from atoll import Sandbox

TRACED = """
import ctypes, os, platform, signal, sys
number = {"x86_64": 101, "aarch64": 117}[platform.machine()]
sys.stdout.write(str(ctypes.CDLL(None, use_errno=True).syscall(number, 0, 0, 0, 0)) + "\\n")
sys.stdout.flush()
"""
CASES = {
    "continued": ("os.kill(os.getpid(), signal.SIGCONT); print('lives'); sys.exit(5)", 5, "0\nlives\n"),
    "handled": (
        "signal.signal(signal.SIGUSR1, lambda *_: print('got it'));"
        " os.kill(os.getpid(), signal.SIGUSR1); sys.exit(6)",
        6, "0\ngot it\n",
    ),
    "killed": ("os.kill(os.getpid(), signal.SIGTERM); print('never')", 143, "0\n"),
    "exec": ("os.execv('/bin/sh', ['sh', '-c', 'echo after; exit 7'])", 7, "0\nafter\n"),
}  # fmt: skip


ORPHANED = """
import os, time
middle = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == middle:
    time.sleep(0.01)
os.dup2(os.open("/workspace/told", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
"""


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("how", ["cold", "warm"])
def test_F2_L5_a_traced_stop_is_no_end(anywhere: Sandbox, case: str, how: str) -> None:
    """The program runs on to its real end, its real exit code is told, and nothing stopped is left."""
    code, exit_code, stdout = CASES[case]
    if how == "warm":
        result = anywhere.run(TRACED + code)
    else:
        result = anywhere.exec(["python3", "-c", TRACED + code], env={"PYTHONNOUSERSITE": "1"})
    assert (result.status, result.exit_code, result.stdout) == ("completed", exit_code, stdout)
    until(lambda: not [p for p in anywhere.processes() if p.state in "tT"], "nothing is left stopped")


@pytest.mark.parametrize("case", list(CASES))
def test_F2_L5_a_traced_orphan_runs_on(anywhere: Sandbox, case: str) -> None:
    """One whose parent has ended asks the shim or the agent to trace it."""
    code, _, stdout = CASES[case]
    anywhere.files.remove("/workspace/told", missing_ok=True)
    started = anywhere.exec(["python3", "-c", ORPHANED + TRACED + code], env={"PYTHONNOUSERSITE": "1"})
    assert started.exit_code == 0
    until(lambda: anywhere.exec("cat told").stdout == stdout, "it ran on to its end")
    until(lambda: not [p for p in anywhere.processes() if p.state in "tT"], "nothing is left stopped")
