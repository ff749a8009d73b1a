"""FIL-11: a writable mount as a way to leave a program on the host that runs as its owner, root perhaps, for whoever starts it."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.sandboxes import Lab

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="system call numbers of x86_64")
ATTACK = """
import ctypes, os, shutil, stat, struct, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
os.umask(0)
top = sys.argv[1]
def made(name):
    path = f'{top}/{name}'; open(path, 'w').close(); return path
def opened(name): return os.open(made(name), os.O_RDWR)
AT, CREATE, X = -100, os.O_CREAT | os.O_WRONLY, 0o755
how = lambda mode: struct.pack('QQQ', CREATE, mode, 0)
for bits in (0o4000, 0o2000, 0o6000):
    for act in (
        lambda: os.chmod(made('chmod'), bits | X), lambda: os.fchmod(opened('fchmod'), bits | X),
        lambda: libc.syscall(90, made('raw').encode(), bits | X),
        lambda: libc.syscall(90, made('high').encode(), ctypes.c_long(1 << 40 | bits | X)),
        lambda: libc.syscall(268, AT, made('fchmodat').encode(), bits | X),
        lambda: libc.syscall(452, AT, made('fchmodat2').encode(), bits | X, 0),
        lambda: libc.syscall(2, f'{top}/open'.encode(), CREATE, bits | X), lambda: libc.syscall(85, f'{top}/creat'.encode(), bits | X),
        lambda: os.open(f'{top}/openat', CREATE, bits | X), lambda: os.mknod(f'{top}/mknod', stat.S_IFREG | bits | X),
        lambda: libc.syscall(437, AT, f'{top}/openat2'.encode(), how(bits | X), 24), lambda: os.mkdir(f'{top}/mkdir', bits | X),
        lambda: os.link(f"/proc/self/fd/{os.open(top, os.O_TMPFILE | os.O_WRONLY, bits | X)}", f'{top}/unnamed', follow_symlinks=True),
        lambda: subprocess.run(['install', '-m', oct(bits | X)[2:], '/usr/bin/id', f'{top}/installed'], stderr=2),
    ):
        try: act()
        except OSError: pass
"""


@pytest.fixture
def share() -> Iterator[Path]:
    made = Path("/tmp") / f"atoll-setid-{os.getpid()}-{os.urandom(3).hex()}"
    made.mkdir()
    yield made
    shutil.rmtree(made)


def set_id(tree: Path) -> list[str]:
    return [path.name for path in tree.iterdir() if path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID)]


def test_no_program_with_another_users_rights_is_left_on_the_host(lab: Lab, runtime: str, share: Path) -> None:
    """By every call that gives a mode, by the file operations, and the rest of what one does with files goes on."""
    with lab.sandbox(runtime=runtime, mounts=[{"source": str(share), "target": "/data"}]) as made:
        made.exec(["python3", "-c", ATTACK, "/data"])
        assert set_id(share) == []
        status, _ = lab.ask("PUT", f"/v1/sandboxes/{made.id}/files?path=/data/uploaded&mode=2541", b"x")  # 0o4755
        assert status >= 400 or not (share / "uploaded").stat().st_mode & 0o6000
        assert made.exec("cd /data && touch f && chmod 755 f && mkdir -m 700 d && cp -a f d/ && mv f g && cat g").ok
        assert made.run("import os; print(os.open('/data/g', os.O_RDONLY, 0o7777) > 0)").stdout == "True\n"
    assert (share / "g").stat().st_mode & 0o7777 == 0o755


def test_the_same_code_makes_them_where_nothing_is_shared(lab: Lab, runtime: str) -> None:
    """Control, and so that packages with such programs can be installed: they mean nothing in a sandbox."""
    with lab.sandbox(runtime=runtime) as made:
        made.exec(["python3", "-c", ATTACK, "/workspace"])
        found = made.exec("find /workspace -perm /6000").stdout
        assert "/workspace/chmod" in found and "/workspace/installed" in found, found
