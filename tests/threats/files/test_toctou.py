"""FIL-02: a directory is swapped for a link while the host writes below it."""

import os
from pathlib import Path

from lab.sandboxes import LONG, until

from atoll import Sandbox, errors

SWAP = """
import os, sys
top, away = '/workspace/race', sys.argv[1]
os.makedirs(top + '/dir', exist_ok=True)
n = 0
while True:
    os.rename(top + '/dir', top + '/kept')
    os.symlink(away, top + '/dir')
    os.unlink(top + '/dir')
    os.rename(top + '/kept', top + '/dir')
    n += 1
    if n == 100: open('/workspace/racing', 'w').close()
"""


def test_writes_never_leave_while_a_swapper_runs(anywhere: Sandbox, runtime: str) -> None:
    """The link points at a place of the host that is open to all, and at a closed place inside; neither gets a byte."""
    canary = Path("/tmp") / f"atoll-race-{os.getpid()}-{os.urandom(4).hex()}"
    canary.mkdir()
    canary.chmod(0o777)
    swapper = anywhere.start(["python3", "-c", SWAP, str(canary)])
    try:
        until(lambda: anywhere.files.exists("/workspace/racing"), "the swapper runs")
        done = 0
        for number in range(5000 if LONG else 400 if runtime == "container" else 80):
            try:
                anywhere.files.write("/workspace/race/dir/file", b"data %d" % number, parents=False)
                done += 1
            except errors.AtollError:
                pass
            try:
                anywhere.files.remove("/workspace/race/dir/file", missing_ok=True)
            except errors.AtollError:
                pass
        assert swapper.poll().running, swapper.poll()
        assert done > 0  # some writes met the real directory
        assert list(canary.iterdir()) == []
    finally:
        swapper.kill()
        swapper.wait()
        anywhere.exec("rm -rf /workspace/race /workspace/racing")
        for stray in canary.iterdir():
            stray.unlink()
        canary.rmdir()
