"""FIL-01: links that lead out of the sandbox, through every file operation."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll import Sandbox, errors

KEPT = b"host canary, untouched"


@pytest.fixture
def canary() -> Iterator[Path]:
    """A file of the host that anybody may read and write: only the wall protects it."""
    made = Path("/tmp") / f"atoll-canary-{os.getpid()}-{os.urandom(4).hex()}"
    made.mkdir()
    made.chmod(0o777)
    (made / "file").write_bytes(KEPT)
    (made / "file").chmod(0o666)
    yield made
    (made / "file").unlink()
    assert list(made.iterdir()) == [], "something was written beside the canary"
    made.rmdir()


PLANT = """
import os, shutil, sys
canary, top = sys.argv[1], '/workspace/l'
shutil.rmtree(top, ignore_errors=True); os.mkdir(top); os.chdir(top)
links = {'absolute': canary + '/file', 'relative': '../' * 8 + canary[1:] + '/file', 'dangling': canary + '/missing', 'directory': canary,
         'through-proc': '/proc/1/root' + canary + '/file', 'hop0': canary + '/file', 'loop1': 'loop2', 'loop2': 'loop1'}
links.update({f'hop{n}': f'hop{n - 1}' for n in range(1, 40)})
for name, target in links.items(): os.symlink(target, name)
"""


def variants(sandbox: Sandbox, canary: Path) -> dict[str, str]:
    """Links of every kind to the canary, planted inside; what to ask for."""
    assert sandbox.exec(["python3", "-c", PLANT, str(canary)]).ok
    names = ["absolute", "relative", "dangling", "directory/file", "directory", "through-proc", "hop39", "loop1"]
    return {name: f"/workspace/l/{name}" for name in names}


def copied_out(sandbox: Sandbox, path: str) -> list[bytes]:
    with tempfile.TemporaryDirectory() as place:
        sandbox.files.download(path, f"{place}/got")
        return [p.read_bytes() for p in Path(place).rglob("*") if p.is_file() and not p.is_symlink()]


Attack = Callable[[Sandbox, str], object]
ATTACKS: dict[str, Attack] = {
    "read": lambda s, p: s.files.read(p),
    "write": lambda s, p: s.files.write(p, b"attack"),
    "append": lambda s, p: s.files.write(p, b"attack", append=True),
    "write at": lambda s, p: s.files.write(p, b"attack", offset=3),
    "list": lambda s, p: s.files.list(p, recursive=True),
    "stat": lambda s, p: s.files.stat(p),
    "chmod": lambda s, p: s.files.chmod(p, 0o600, recursive=True),
    "copy from": lambda s, p: s.files.copy(p, "/workspace/l/copied", recursive=True, overwrite=True),
    "copy to": lambda s, p: s.files.copy("/etc/hostname", p, overwrite=True),
    "move to": lambda s, p: (
        s.files.write("/workspace/l/moving", b"x"),
        s.files.move("/workspace/l/moving", p, overwrite=True),
    ),
    "mkdir": lambda s, p: s.files.mkdir(p + "/new", exist_ok=True),
    "symlink": lambda s, p: s.files.symlink("/etc/passwd", p + "/new"),
    "grep": lambda s, p: s.files.grep("canary", p),
    "sed": lambda s, p: s.files.sed("canary", "gone", p),
    "du": lambda s, p: s.files.du(p),
    "copy out": lambda s, p: copied_out(s, p),
    "remove": lambda s, p: s.files.remove(p, recursive=True),
    "cwd": lambda s, p: s.exec("cat file 2>/dev/null", cwd=p).stdout,
}


def test_no_operation_reaches_the_host(anywhere: Sandbox, canary: Path) -> None:
    """Every operation on every kind of link: the content never comes back and never changes."""
    for name, attack in ATTACKS.items():
        planted = variants(anywhere, canary)
        for kind, path in planted.items():
            try:
                answer = attack(anywhere, path)
            except errors.AtollError:
                answer = None
            assert KEPT not in repr(answer).encode() and b"host canary" not in repr(answer).encode(), (name, kind)
            assert (canary / "file").read_bytes() == KEPT, (name, kind)
            assert sorted(os.listdir(canary)) == ["file"], (name, kind)
    assert (canary / "file").stat().st_mode & 0o777 == 0o666
    # What was written through a link landed inside: that the attack did something there is the control.
    anywhere.exec(f"rm -rf {canary}; mkdir -p {canary}; ln -sfn {canary}/inside /workspace/l/link")
    anywhere.files.write("/workspace/l/link", b"inside")
    assert anywhere.exec(f"cat {canary}/inside /workspace/l/link").stdout.startswith("inside")
    anywhere.exec(f"rm -rf {canary} /workspace/l")
