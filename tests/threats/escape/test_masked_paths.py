"""ESC-03 and ESC-09's first half: what is masked stays masked, however the start is raced (CVE-2025-31133 and kin)."""

import os
import threading
from pathlib import Path

from sandbox_lab import LONG, Lab

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


def test_nothing_masked_can_be_read_or_written(sandbox: Sandbox) -> None:
    """The whole list of the profile, by root inside."""
    assert sandbox.exec(["python3", "-c", WRITE, *bundle.MASKED, *bundle.READ_ONLY, *DANGEROUS]).stdout == ""
    assert sandbox.exec(["python3", "-c", READ, *bundle.MASKED]).stdout == ""
    with open("/proc/kallsyms", "rb") as outside:  # control: outside the same file can be read
        assert outside.read(64)


def test_on_every_runtime_the_dangerous_ones_are_closed(anywhere: Sandbox, runtime: str) -> None:
    """gVisor has a kernel of its own; of what it shows only a trigger that does nothing can be written."""
    paths = [path for path in DANGEROUS if runtime != "gvisor" or path != "/proc/sysrq-trigger"]
    assert anywhere.exec(["python3", "-c", WRITE, *paths]).stdout == ""
    if runtime == "gvisor":
        anywhere.exec("for key in s u b c; do echo $key > /proc/sysrq-trigger; done")
        assert anywhere.exec("echo still here").stdout == "still here\n"


def test_racing_starts_leave_none_open(lab: Lab, tmp_path: Path) -> None:
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
        for _ in range(500 if LONG else 6):
            mounts = [{"source": str(shared), "target": "/data"}]
            with lab.sandbox(runtime="container", mounts=mounts) as made:
                assert made.exec(["python3", "-c", WRITE, *DANGEROUS]).stdout == ""
                assert (
                    made.exec(["python3", "-c", WRITE, "/data/proc/sysrq-trigger", "/data/sys/power/state"]).stdout
                    == ""
                )
    finally:
        stop.set()
        swapper.join(60)
        for name in shared.iterdir():
            name.rmdir() if name.is_dir() and not name.is_symlink() else name.unlink()
        shared.rmdir()
