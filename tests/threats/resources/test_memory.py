"""RES-02: memory, by allocation, in tmpfs and in /dev/shm. Only the sandbox pays, and the reason is told."""

import pytest
from sandbox_lab import Lab

from atoll import Sandbox, errors

MANY = """
for i in 1 2 3 4 5 6; do python3 -c 'import time; x = bytearray(90 << 20); time.sleep(5)' & pids="$pids $!"; done
for p in $pids; do wait $p; [ $? = 137 ] && echo Killed >&2; done
"""
HOGS = {
    "allocation": ["python3", "-c", "x = bytearray(1 << 30); print('got it')"],
    "many children": ["bash", "-c", MANY],
}


@pytest.mark.parametrize("how", HOGS)
def test_the_hog_alone_dies_and_is_told_why(lab: Lab, runtime: str, how: str) -> None:
    """The result says out of memory, or the sandbox has ended with that reason; the neighbour notices nothing."""
    with lab.sandbox(runtime=runtime, memory_mb=192) as hog, lab.sandbox(runtime=runtime) as neighbour:
        try:
            result = hog.exec(HOGS[how], timeout=60)
        except errors.SandboxGone as gone:
            assert gone.details.get("reason") == "oom", gone.details
        else:
            told = result.oom or "Killed" in result.stderr or "MemoryError" in result.stderr
            assert told and (how != "allocation" or "got it" not in result.stdout), result
        assert neighbour.exec("echo fine").stdout == "fine\n"


def test_tmpfs_is_sized(anywhere: Sandbox) -> None:
    """/dev/shm ends before the memory does; what is deleted comes back."""
    result = anywhere.exec("dd if=/dev/zero of=/dev/shm/x bs=1M count=300; s=$?; rm -f /dev/shm/x; exit $s", timeout=60)
    assert result.exit_code != 0
    assert anywhere.exec("echo x > /dev/shm/y && cat /dev/shm/y && rm /dev/shm/y").stdout == "x\n"
