"""RES-03: what the agent starts with leads to a file of the host; nobody inside may write to it."""

from pathlib import Path

from lab.sandboxes import Lab

FLOOD = """
import os
for number in range(64):
    try: fd = os.open(f'/proc/1/fd/{number}', os.O_WRONLY | os.O_NONBLOCK)
    except OSError: continue
    if os.readlink(f'/proc/1/fd/{number}') != '/dev/null': print('open', number, os.readlink(f'/proc/1/fd/{number}'))
    try: os.write(fd, b'x' * 65536)
    except OSError: pass
"""


def test_the_agents_own_output_is_out_of_reach(lab: Lab, runtime: str) -> None:
    """Through /proc of the agent, on kernels that let one look there."""
    with lab.sandbox(runtime=runtime) as made:
        found = made.run(FLOOD)
        assert "host:" not in found.stdout, found.stdout
        logs = list(Path(lab.home).glob(f"run/{made.id}/*.log"))
        assert logs  # control: there is such a file
        assert sum(log.stat().st_size for log in logs) < 32768
