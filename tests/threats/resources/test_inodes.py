"""RES-04: millions of empty files. They end inside, and are one file outside."""

from pathlib import Path

from lab.sandboxes import Lab

FILL = """
import os
n = 0
try:
    while n < 10**6:
        os.close(os.open(f'/workspace/{n}', os.O_CREAT | os.O_WRONLY)); n += 1
except OSError as error: print(error.errno, n)
"""


def test_inodes_end_inside(lab: Lab, runtime: str) -> None:
    """ENOSPC for the one who makes them; the host's directory holds the one image."""
    with lab.sandbox(runtime=runtime, disk_mb=16) as made:
        errno, count = made.run(FILL, timeout=120).stdout.split()
        assert errno == "28" and int(count) < 100_000
        assert len(list(Path(lab.home).glob(f"boxes/{made.id}/**/*"))) <= 2
        assert made.exec("rm -rf /workspace/*; echo x > /workspace/y && cat /workspace/y").stdout == "x\n"
