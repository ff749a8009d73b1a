"""ESC-05: a mount's source is swapped for a link between the check and the mount (CVE-2021-30465)."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.sandboxes import LONG, PATIENCE, Lab

from atoll import errors

SWAP = """
import os, sys
top, target = sys.argv[1:]
while True:
    os.rename(top + "/open", top + "/kept")
    os.symlink(target, top + "/open")
    os.unlink(top + "/open")
    os.rename(top + "/kept", top + "/open")
"""


@contextmanager
def swapping(target: str) -> Iterator[Path]:
    """A directory `open` that is a link to `target` every other moment."""
    top = Path("/tmp") / f"atoll-swap-{os.getpid()}-{os.urandom(3).hex()}"
    (top / "open").mkdir(parents=True)
    swapper = subprocess.Popen(["/usr/bin/python3", "-c", SWAP, str(top), target])
    try:
        yield top / "open"
    finally:
        swapper.kill()
        swapper.wait(PATIENCE)
        for name in ("open", "kept"):
            if (top / name).is_symlink():
                (top / name).unlink()
        shutil.rmtree(top)


def test_the_attack_works_on_a_check_before_use(tmp_path: Path) -> None:
    """Control: asking first and opening by name afterwards ends up behind the link."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "canary").touch()
    with swapping(str(secret)) as place:
        deadline = time.monotonic() + PATIENCE
        fooled = False
        while not fooled and time.monotonic() < deadline:
            try:
                if os.path.realpath(place) == str(place):
                    fooled = os.listdir(place) == ["canary"]
            except OSError:
                continue
    assert fooled


def test_a_swapped_source_never_shows_what_is_forbidden(lab: Lab, runtime: str) -> None:
    """Toward atoll's own state and toward /etc: the harmless directory or a refusal, never what lies behind the link."""
    lab.start()
    for forbidden in (lab.home, "/etc"):
        with swapping(forbidden) as place:
            for _ in range(100 if LONG else 8 if runtime == "container" else 3):
                try:
                    made = lab.create(runtime=runtime, mounts=[{"source": str(place), "target": "/data"}])
                except errors.AtollError:
                    continue
                with made:
                    assert made.exec("ls -A /data").stdout == ""
