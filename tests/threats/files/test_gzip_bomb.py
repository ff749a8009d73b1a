"""FIL-09: an upload that inflates a thousandfold. What it inflates to is counted; the daemon holds none of it."""

import gzip
import io
import tarfile

from lab.sandboxes import Lab

from atoll import Sandbox


def resident_kb(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return int(file.read().split("VmHWM:")[1].split()[0])


def test_a_bomb_is_stopped_and_nobody_swells(lab: Lab, anywhere: Sandbox) -> None:
    """600 KB that would be 600 MB on a 64 MB disk: disk full or too large, and the daemon's memory stays."""
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=9) as packed:
        info = tarfile.TarInfo("bomb")
        info.size = 600 << 20
        packed.write(info.tobuf())
        block = bytes(1 << 20)
        for _ in range(600):
            packed.write(block)
    daemon = lab.start()
    before = resident_kb(daemon)
    anywhere.exec("mkdir -p /workspace/bomb")
    status, answer = lab.ask("PUT", f"/v1/sandboxes/{anywhere.id}/tar?path=/workspace/bomb&gzip=1", raw.getvalue())
    assert status in (400, 413, 507), (status, answer)
    assert resident_kb(daemon) - before < 64 * 1024
    anywhere.exec("rm -rf /workspace/bomb")
    assert anywhere.exec("echo on").stdout == "on\n"
