"""SNP-07: a file that claims to be huge costs nothing to make inside; saving it is refused at once, in words."""

import pytest
from lab.daemon import Box, DaemonProcess, Failed


def test_a_sparse_giant_is_refused_and_nothing_is_left(daemon: DaemonProcess, box: Box) -> None:
    box.exec("truncate -s 2T /workspace/giant; echo small > /workspace/small")
    with pytest.raises(Failed) as caught:
        daemon.post(f"{box.path}/snapshots", {"name": "giant"})
    assert caught.value.code == "exhausted"
    assert daemon.get("/v1/snapshots")["snapshots"] == []
    box.exec("rm /workspace/giant")
    daemon.post(f"{box.path}/snapshots", {"name": "giant"})  # control
    daemon.delete("/v1/snapshots/giant")
