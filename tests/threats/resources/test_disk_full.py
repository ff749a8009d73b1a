"""RES-03: a disk that is filled: with bytes, with sparse files, with deleted files that stay open."""

import pytest
from lab.sandboxes import Lab

from atoll import Sandbox, errors

HELD = """
import os
f = open('/workspace/held', 'wb'); os.unlink('/workspace/held')
try:
    while True: f.write(bytes(1 << 20)); f.flush()
except OSError as error: print(error.errno)
"""


@pytest.fixture
def full(lab: Lab, runtime: str) -> "object":
    with lab.sandbox(runtime=runtime, disk_mb=32) as made:
        yield made


def test_the_writer_alone_gets_the_error(lab: Lab, full: Sandbox) -> None:
    """ENOSPC inside, disk full (507) for uploads, room again after deleting, others unaffected meanwhile."""
    result = full.exec("dd if=/dev/zero of=/workspace/x bs=1M count=100")
    assert result.exit_code != 0 and "No space" in result.stderr
    with pytest.raises(errors.DiskFull) as caught:
        full.files.write("/workspace/up", bytes(8 << 20))
    assert caught.value.http_status == 507
    with lab.sandbox(runtime="container") as other:
        assert other.exec("dd if=/dev/zero of=/workspace/x bs=1M count=16 && rm /workspace/x").ok
    assert full.exec("rm /workspace/x").ok
    full.files.write("/workspace/up", bytes(8 << 20))
    full.files.remove("/workspace/up")
    assert full.run(HELD).stdout == "28\n"
    assert full.exec("echo x > /workspace/after && cat /workspace/after").stdout == "x\n"
    assert (
        full.exec(
            "truncate -s 1G /workspace/sparse && dd if=/dev/zero of=/workspace/sparse bs=1M count=100 conv=notrunc"
        ).exit_code
        != 0
    )
    full.exec("rm -f /workspace/sparse")


def test_the_host_gives_no_more_than_the_limit(lab: Lab, full: Sandbox) -> None:
    """The image on the host has exactly the size asked for, whatever happens inside."""
    from pathlib import Path

    full.exec("for f in /workspace/x /tmp/y /usr/z; do dd if=/dev/zero of=$f bs=1M count=100; done")
    images = list(Path(lab.home).glob(f"boxes/{full.id}/*"))
    assert sum(path.stat().st_blocks * 512 for path in images) <= 33 << 20, images
