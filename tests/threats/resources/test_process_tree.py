"""RES-07: processes that try to outlive their command: double forks, sessions of their own, ignored signals, zombies."""

import pytest
from lab.sandboxes import LONG, until

from atoll import Sandbox

ESCAPE = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
def child(detach):
    if os.fork() == 0:
        if detach:
            os.setsid()
            if os.fork(): os._exit(0)
        os.execvp('sleep', ['sleep', '661'])
child(False); child(True)
subprocess.Popen(['setsid', 'sleep', '661']); subprocess.Popen(['nohup', 'sleep', '661'])
stopped = subprocess.Popen(['sleep', '661']); os.kill(stopped.pid, signal.SIGSTOP)
print('ready', flush=True)
time.sleep(661)
"""


def sleepers(sandbox: Sandbox) -> list[object]:
    return [p for p in sandbox.processes() if p.comm == "sleep" and "661" in str(p.cmdline) and p.state != "Z"]


@pytest.mark.parametrize("how", ["timeout", "kill"])
def test_nothing_of_a_command_survives_it(anywhere: Sandbox, runtime: str, how: str) -> None:
    """The whole tree goes, however it detached itself. On gVisor a double-forked session may stay until the sandbox ends."""
    if how == "timeout":
        assert anywhere.run(ESCAPE, timeout=4).timed_out
    else:
        command = anywhere.start(["python3", "-c", ESCAPE])
        try:
            until(
                lambda: len(sleepers(anywhere)) >= 5, "its children are there"
            )  # the control: something is to be killed
        finally:
            command.kill()
        assert command.wait().exit_code == 137
    most = 1 if runtime == "gvisor" else 0
    until(lambda: len(sleepers(anywhere)) <= most, "none is left")
    anywhere.exec("pkill -9 sleep")


def test_a_child_with_the_pipe_does_not_hold_the_result(anywhere: Sandbox) -> None:
    """The result comes when the main process ends."""
    assert anywhere.exec("sleep 663 & echo out", timeout=60).stdout == "out\n"
    anywhere.exec("pkill -9 sleep")


def test_zombies_are_reaped(anywhere: Sandbox, runtime: str) -> None:
    """Orphans by the hundred, and no dead process stays."""
    count = 10_000 if LONG else 300 if runtime == "container" else 40
    assert anywhere.exec(f"for i in $(seq {count}); do (true &) ; done", timeout=None).ok
    until(lambda: not [p for p in anywhere.processes() if p.state == "Z"], "no zombie is left")
