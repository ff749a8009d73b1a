"""ESC-09: programs that the kernel itself starts: release_agent, core_pattern, uevent_helper, binfmt_misc, modprobe."""

import os
from pathlib import Path

from lab.sandboxes import ROOTLESS, until

from atoll import Sandbox

HOOKS = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug", "/sys/kernel/uevent_helper",
         "/proc/sys/fs/binfmt_misc/register", "/proc/sys/kernel/poweroff_cmd", "/proc/sys/kernel/usermodehelper/bset"]  # fmt: skip
ATTACK = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
handler, *paths = sys.argv[1:]
libc.umount2(b'/proc/sys', 2); libc.umount2(b'/sys', 2)
libc.mount(None, b'/proc/sys', None, 32 | 4096, None); libc.mount(None, b'/sys', None, 32, None)
for kind in (b'proc', b'sysfs', b'cgroup', b'cgroup2', b'binfmt_misc'):
    os.makedirs('/tmp/m', exist_ok=True)
    libc.mount(b'none', b'/tmp/m', kind, 0, b'rdma' if kind == b'cgroup' else None)
places = [*paths, '/tmp/m/release_agent', '/tmp/m/sys/kernel/core_pattern', '/tmp/m/kernel/uevent_helper', '/tmp/m/register']
for top, _, names in os.walk('/sys/fs/cgroup'):
    places += [top + '/' + n for n in names if n in ('release_agent', 'notify_on_release', 'cgroup.procs')]
for path in places:
    try:
        with open(path, 'r+') as file: file.write('|' + handler)
        print('written', path)
    except OSError: pass
"""


def seen() -> dict[str, str]:
    return {path: Path(path).read_text() for path in HOOKS if os.access(path, os.R_OK) and "register" not in path}


def test_no_hook_can_be_set_and_no_handler_fires(anywhere: Sandbox, tmp_path: Path) -> None:
    """Every write fails, the host's values stay, and a crash inside starts nothing outside."""
    fired = tmp_path / "fired"
    handler = tmp_path / "handler"
    handler.write_text(f"#!/bin/sh\ntouch {fired}\n")
    handler.chmod(0o755)
    before = seen()
    assert before.get("/proc/sys/kernel/core_pattern")  # control: the host has the hook and root here could set it
    assert ROOTLESS or os.access("/proc/sys/kernel/core_pattern", os.W_OK)
    assert anywhere.exec(["python3", "-c", ATTACK, str(handler), *HOOKS]).stdout == ""
    crashed = anywhere.exec(["sh", "-c", "ulimit -c unlimited; kill -SEGV $$"])
    assert crashed.signal == 11
    until(lambda: anywhere.exec("true").ok, "the sandbox goes on")
    assert seen() == before and not fired.exists()
