"""ESC-07: a read-only share that only the guest believes to be read-only (CVE-2026-46695)."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.sandboxes import Lab

ATTACK = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
MS_REMOUNT, MS_BIND = 32, 4096
libc.mount(None, b'/data', None, MS_REMOUNT | MS_BIND, None)
libc.mount(b'/data', b'/mnt', None, MS_BIND, None)
libc.mount(None, b'/mnt', None, MS_REMOUNT | MS_BIND, None)
libc.umount2(b'/data', 2)
libc.unshare(0x10000000 | 0x20000)
libc.mount(None, b'/data', None, MS_REMOUNT | MS_BIND, None)
for top in ('/data', '/mnt', '/proc/self/root/data', '/proc/1/root/data'):
    if not os.path.exists(top + '/kept'): continue
    for act in (lambda: open(top + '/kept', 'w').write('x'), lambda: open(top + '/new', 'w'), lambda: os.remove(top + '/kept'),
                lambda: os.chmod(top + '/kept', 0o777), lambda: os.chown(top + '/kept', 1, 1), lambda: os.rename(top + '/kept', top + '/b'),
                lambda: os.utime(top + '/kept'), lambda: os.truncate(top + '/kept', 0), lambda: os.link(top + '/kept', top + '/c'),
                lambda: os.setxattr(top + '/kept', 'user.x', b'x')):
        try:
            act(); print('changed', top)
        except OSError: pass
fd = os.open('/data/kept', os.O_PATH)
for flags in (os.O_WRONLY, os.O_RDWR):
    try:
        os.open(f'/proc/self/fd/{fd}', flags); print('reopened')
    except OSError: pass
handle = ctypes.create_string_buffer(128); ctypes.cast(handle, ctypes.POINTER(ctypes.c_uint))[0] = 120
mount = ctypes.c_int()
if libc.name_to_handle_at(-100, b'/data/kept', handle, ctypes.byref(mount), 0) == 0:
    at = os.open('/data', os.O_RDONLY)
    if libc.open_by_handle_at(at, handle, os.O_RDWR) >= 0: print('by handle')
"""


@pytest.fixture
def share() -> Iterator[Path]:
    made = Path("/tmp") / f"atoll-share-{os.getpid()}-{os.urandom(3).hex()}"
    made.mkdir()
    made.chmod(0o777)
    (made / "kept").write_text("kept")
    (made / "kept").chmod(0o666)
    yield made
    shutil.rmtree(made)


def fingerprint(tree: Path) -> str:
    parts = [
        f"{p.name} {p.stat().st_mode} {p.stat().st_uid} {p.stat().st_mtime_ns} {p.read_bytes()!r}"
        for p in sorted(tree.iterdir())
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def test_the_host_holds_it_read_only(lab: Lab, runtime: str, share: Path) -> None:
    """Root inside remounts, binds, reopens and goes by handle: nothing changes."""
    before = fingerprint(share)
    with lab.sandbox(runtime=runtime, mounts=[{"source": str(share), "target": "/data", "read_only": True}]) as made:
        assert made.exec("cat /data/kept").stdout == "kept"
        assert made.run(ATTACK).stdout == ""
    assert fingerprint(share) == before


def test_the_same_code_changes_a_writable_one(lab: Lab, runtime: str, share: Path) -> None:
    """Control: without `read_only` the attack's first line is enough."""
    with lab.sandbox(runtime=runtime, mounts=[{"source": str(share), "target": "/data"}]) as made:
        assert "changed /data" in made.run(ATTACK).stdout
    assert {p.name for p in share.iterdir()} != {"kept"} or (share / "kept").read_text() != "kept"
