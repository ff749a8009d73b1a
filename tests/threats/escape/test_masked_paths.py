"""ESC-03 and ESC-09's first half: what is masked stays masked, however the start is raced (CVE-2025-31133 and kin)."""

import os
import threading
from pathlib import Path

from lab.sandboxes import LONG, Lab

from atoll import Sandbox
from atoll.backends.local import bundle

WRITE = """
import os, sys
for path in sys.argv[1:]:
    for flags in (os.O_WRONLY, os.O_RDWR):
        try:
            fd = os.open(path, flags)
            if os.fstat(fd).st_rdev != os.makedev(1, 3): print('writable', path)  # a mask is /dev/null itself
        except OSError: pass
"""
READ = """
import os, sys
for path in sys.argv[1:]:
    try:
        found = os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(64)
    except OSError: continue
    if found: print('readable', path, found)
"""
DANGEROUS = ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/panic_on_oom",
             "/proc/irq/default_smp_affinity", "/proc/kcore", "/proc/kmsg", "/proc/1/mem", "/sys/kernel/uevent_helper",
             "/sys/power/state", "/sys/module/kernel/parameters/panic")  # fmt: skip
# gVisor's own kernel shows a trigger that does nothing; the host's is not involved.
IDLE = {"gvisor": {"/proc/sysrq-trigger"}}


def written(sandbox: Sandbox, runtime: str, *paths: str) -> str:
    """Which of these root inside can write to."""
    closed = [path for path in paths if path not in IDLE.get(runtime, ())]
    return sandbox.exec(["python3", "-c", WRITE, *closed]).stdout


def test_nothing_masked_can_be_read_or_written(anywhere: Sandbox, runtime: str) -> None:
    """The whole list of the profile, by root inside."""
    assert written(anywhere, runtime, *bundle.MASKED, *bundle.READ_ONLY, *DANGEROUS) == ""
    assert anywhere.exec(["python3", "-c", READ, *bundle.MASKED]).stdout == ""
    assert anywhere.exec("ls -A /sys/fs").stdout in ("cgroup\n", "")  # what is in there is test_seen_limits.py's
    with open("/proc/kallsyms", "rb") as outside:  # control: outside the same file can be read
        assert outside.read(64)


def test_a_trigger_that_can_be_written_does_nothing(anywhere: Sandbox) -> None:
    """Where a kernel of its own shows one: sync, remount, reboot and crash are asked for, and nobody notices."""
    anywhere.exec("for key in s u b c; do echo $key > /proc/sysrq-trigger; done")
    assert (
        anywhere.exec("echo still here > /workspace/f && cat /workspace/f && rm /workspace/f").stdout == "still here\n"
    )


def test_racing_starts_leave_none_open(lab: Lab, runtime: str) -> None:
    """Sandboxes start while a host directory they share is swapped for links at full speed: masks hold in each."""
    shared = Path("/tmp") / f"atoll-race-{os.getpid()}-{os.urandom(3).hex()}"
    (shared / "a").mkdir(parents=True)
    stop = threading.Event()

    def swap() -> None:
        number = 0
        while not stop.wait(0.0005):
            number += 1
            for name, target in (("proc", "/proc"), ("dev", "/dev"), ("sys", "/sys")):
                half = shared / f"{name}.{number % 2}"
                half.unlink(missing_ok=True)
                half.symlink_to(target if number % 2 else "/nonexistent")
                os.replace(half, shared / name)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(500 if LONG else 6 if runtime == "container" else 3):
            mounts = [{"source": str(shared), "target": "/data"}]
            with lab.sandbox(runtime=runtime, mounts=mounts) as made:
                assert written(made, runtime, *DANGEROUS) == ""
                # The same through the swapped links, which lead to the sandbox's own /proc and /sys.
                assert written(made, runtime, "/data/proc/sys/kernel/core_pattern", "/data/sys/power/state") == ""
    finally:
        stop.set()
        swapper.join(60)
        for name in shared.iterdir():
            name.rmdir() if name.is_dir() and not name.is_symlink() else name.unlink()
        shared.rmdir()
