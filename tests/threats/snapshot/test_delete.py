"""SNP-10: what is deleted cannot be restored; its bytes go with the last snapshot that has them, and no sooner."""

from pathlib import Path

import pytest
from lab.daemon import Box, DaemonProcess, Failed


def chunks(daemon: DaemonProcess) -> set[str]:
    return {path.name for path in (daemon.home / "snapshots" / "chunks").rglob("*") if path.is_file()}


def save(box: Box, name: str, **fields: object) -> None:
    box.daemon.post(f"{box.path}/snapshots", {"name": name, **fields})


def test_bytes_go_with_their_last_reference(daemon: DaemonProcess, box: Box) -> None:
    box.exec("echo shared > /workspace/shared; echo first > /workspace/own")
    save(box, "one")
    box.exec("echo second > /workspace/own")
    save(box, "two")
    assert len(chunks(daemon)) == 3, "shared content is kept once"
    assert daemon.delete("/v1/snapshots/one")["freed_bytes"] > 0
    with pytest.raises(Failed) as caught:
        daemon.post("/v1/snapshots/one/restore")
    assert caught.value.code == "not_found"
    assert len(chunks(daemon)) == 2
    child = Box(daemon, daemon.post("/v1/snapshots/two/restore")["id"])
    assert child.read("/workspace/shared") == b"shared\n" and child.read("/workspace/own") == b"second\n"
    daemon.delete("/v1/snapshots/two")
    assert chunks(daemon) == set()
    assert child.read("/workspace/shared") == b"shared\n", "a sandbox has its own copy"
    child.destroy()


def test_replacing_frees_what_only_the_old_one_had(daemon: DaemonProcess, box: Box) -> None:
    box.exec("rm -f /workspace/*; echo before > /workspace/a")
    save(box, "again")
    before = chunks(daemon)
    box.exec("echo after > /workspace/a")
    save(box, "again", force=True)
    assert len(chunks(daemon)) == 1 and not chunks(daemon) & before
    daemon.delete("/v1/snapshots/again")


def test_deleting_twice_and_the_unknown(daemon: DaemonProcess) -> None:
    for name in ("never", "never"):
        with pytest.raises(Failed) as caught:
            daemon.delete(f"/v1/snapshots/{name}")
        assert caught.value.code == "not_found"
    assert not list(Path(daemon.home / "snapshots").glob("staging/*"))
