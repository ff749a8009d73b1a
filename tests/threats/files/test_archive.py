"""FIL-06: hostile archives sent into a sandbox. Image layers: tests/images/test_hostile_layers.py; the extractor itself:
guest/tests/fs_archive.rs. Here they go through the daemon."""

import io
import os
import tarfile
from pathlib import Path

import pytest
from lab.sandboxes import Lab

from atoll import Sandbox


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"", mode: int = 0o644, **more: object
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, len(data), mode
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


SYM, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE
HOSTILE = {
    "parent": [entry("../escaped", data=b"x")],
    "deep parent": [entry("a/../../../../etc/escaped", data=b"x")],
    "absolute": [entry("/etc/escaped", data=b"x")],
    "link then write": [entry("l", SYM, "/etc"), entry("l/escaped", data=b"x")],
    "relative link then write": [entry("l", SYM, "../../etc"), entry("l/escaped", data=b"x")],
    "hard link out": [entry("h", HARD, "/etc/passwd"), entry("h", data=b"escaped")],
    "hard link by parent": [entry("h", HARD, "../../etc/passwd"), entry("h", data=b"escaped")],
    "device": [entry("sda", tarfile.BLKTYPE, devmajor=8, devminor=0)],
    "fifo": [entry("pipe", tarfile.FIFOTYPE)],
    "set-uid": [entry("su", data=b"#!/bin/sh\n", mode=0o6755)],
    "twice": [entry("d", tarfile.DIRTYPE), entry("d", SYM, "/etc"), entry("d/escaped", data=b"x")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_only_expected_paths_exist(lab: Lab, anywhere: Sandbox, name: str) -> None:
    """Whatever the archive says, nothing outside its target changes and no special file appears in it."""
    anywhere.exec("rm -rf /workspace/in; mkdir /workspace/in")
    before = anywhere.exec("cat /etc/passwd; ls -A /etc /workspace").stdout
    status, answer = lab.ask("PUT", f"/v1/sandboxes/{anywhere.id}/tar?path=/workspace/in", packed(*HOSTILE[name]))
    assert status < 500, answer
    assert anywhere.exec("cat /etc/passwd; ls -A /etc /workspace").stdout == before
    odd = anywhere.exec("find /workspace/in \\( -type b -o -type c -o -type p -o -perm /6000 \\)")
    assert odd.stdout == "", answer
    assert not Path("/etc/escaped").exists()


def test_a_broken_or_endless_archive_is_a_clean_error(lab: Lab, runtime: str) -> None:
    """Noise, a cut archive and one larger than the disk: typed errors, and the sandbox goes on."""
    good = packed(entry("f", data=b"x" * 5000))
    big = packed(entry("f", data=bytes(80 << 20)))
    with lab.sandbox(runtime=runtime, disk_mb=64) as made:
        for body, statuses in ((os.urandom(4096), (400,)), (good[:1500], (400, 507)), (big, (507, 413))):
            status, answer = lab.ask("PUT", f"/v1/sandboxes/{made.id}/tar?path=/workspace/in", body)
            assert status in statuses, (status, answer)
        made.exec("rm -rf /workspace/in")
        assert made.exec("echo fine > /workspace/f && cat /workspace/f").stdout == "fine\n"
