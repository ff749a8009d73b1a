"""FIL-10: a hostile tree copied out to the caller's machine. More shapes of archives: tests/sdk/test_copy_safety.py."""

import os
from pathlib import Path

from lab.sandboxes import Lab

from atoll import Sandbox

PLANT = r"""
rm -rf /workspace/out; mkdir -p /workspace/out/sub; cd /workspace/out
ln -s /etc/passwd abs; ln -s ../../../../../../tmp rel; echo good > good; echo x > sub/file
ln -s /tmp dirlink; mkfifo pipe; cp /bin/true su; chmod 6755 su; echo x > "$(printf 'new\nline')"
"""


def test_nothing_outside_the_target_changes(lab: Lab, anywhere: Sandbox, tmp_path: Path) -> None:
    """Links planted inside, and links lying in the target already, are never written through."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("kept")
    for way in ("sdk", "cli"):
        target = tmp_path / way
        (target / "out").mkdir(parents=True)
        for name in ("sub", "good"):  # planted in the target: a directory and a file that lead elsewhere
            for place in (target, target / "out"):
                (place / name).symlink_to(victim if name == "sub" else victim / "file")
        assert anywhere.exec(PLANT).ok
        if way == "sdk":
            anywhere.files.download("/workspace/out", target)
        else:
            lab.cli("cp", f"{anywhere.id}:/workspace/out", str(target))
        assert (victim / "file").read_text() == "kept" and os.listdir(victim) == ["file"], way
        for path in [p for p in target.rglob("*") if p.is_file() and not p.is_symlink()]:
            assert not path.stat().st_mode & 0o6000, path
        assert not [p for p in target.rglob("*") if p.is_fifo()]
        assert [p for p in target.rglob("*") if p.is_file() and not p.is_symlink()], "something was copied"
    anywhere.exec("rm -rf /workspace/out")
