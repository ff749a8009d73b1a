"""RES-02: memory, by allocation, in tmpfs and in /dev/shm. Only the sandbox pays, and the reason is told."""

import json

import pytest
from lab.sandboxes import HELD, Lab

from atoll import Sandbox

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
    """The result says out of memory; the sandbox lives, and the neighbour notices nothing."""
    with lab.sandbox(runtime=runtime, memory_mb=192) as hog, lab.sandbox(runtime=runtime) as neighbour:
        result = hog.exec(HOGS[how], timeout=60)
        assert result.oom or "Killed" in result.stderr, result
        assert how != "allocation" or "got it" not in result.stdout, result
        assert hog.exec("echo alive").stdout == "alive\n"
        assert neighbour.exec("echo fine").stdout == "fine\n"


def test_tmpfs_is_sized(anywhere: Sandbox) -> None:
    """/dev/shm ends before the memory does; what is deleted comes back."""
    result = anywhere.exec("dd if=/dev/zero of=/dev/shm/x bs=1M count=300; s=$?; rm -f /dev/shm/x; exit $s", timeout=60)
    assert result.exit_code != 0
    assert anywhere.exec("echo x > /dev/shm/y && cat /dev/shm/y && rm /dev/shm/y").stdout == "x\n"


@pytest.mark.skipif(not HELD, reason="memory cannot be limited here")
def test_everyday_25_shared_memory_is_half_of_the_memory_or_as_asked(lab: Lab, runtime: str) -> None:
    """And programs may be run from it, as on any Linux machine, but nothing in it gives another id."""
    size = ["python3", "-c", "import os; s = os.statvfs('/dev/shm'); print(s.f_blocks * s.f_frsize >> 20)"]
    with lab.sandbox(runtime=runtime, memory_mb=256) as made:
        assert made.exec(size).stdout == "128\n"
        assert made.info().limits["shm_mb"] == {"value": 128, "enforced": True}
        full = made.exec("dd if=/dev/zero of=/dev/shm/x bs=1M count=200; s=$?; rm /dev/shm/x; exit $s")
        assert full.exit_code == 1 and "No space left" in full.stderr
        ran = made.exec(
            "printf '#!/bin/sh\\necho ran' > /dev/shm/p; chmod +x /dev/shm/p; /dev/shm/p; grep /dev/shm /proc/mounts"
        )
        assert ran.stdout.startswith("ran\n") and ("nosuid" in ran.stdout or runtime == "gvisor"), ran
    with lab.sandbox(runtime=runtime, memory_mb=256, shm_mb=48) as made:
        assert made.exec(size).stdout == "48\n"
    done = lab.cli("sandbox", "create", "--runtime", runtime, "--no-network", "--shm", "24")
    session = json.loads(done.stdout)["session_id"]
    try:
        with Sandbox.connect(session.removeprefix("sess-"), home=lab.home) as made:
            assert made.exec(size).stdout == "24\n"
    finally:
        lab.cli("sandbox", "destroy", session)
    assert lab.ask("POST", "/v1/sandboxes", {"limits": {"shm_mb": 0}})[0] == 400
