"""ESC-09's second half: the files in which programs see their limits are the sandbox's own, and nothing can be changed through them."""

import json
import os
from pathlib import Path

from lab.sandboxes import ROOTLESS, Lab

from atoll import Sandbox

VIEW = [
    "/proc/meminfo",
    "/proc/cpuinfo",
    "/proc/stat",
    *(f"/sys/devices/system/cpu/{n}" for n in ("online", "possible", "present")),
]
ATTACK = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
RDONLY, REMOUNT, BIND, DETACH = 1, 32, 4096, 2
places = json.loads(sys.argv[1])
tops = places + ['/sys/fs', '/sys/fs/cgroup', *(e.path for e in os.scandir('/sys/fs/cgroup') if e.is_dir())]
for top in tops:
    for flags in (REMOUNT, REMOUNT | BIND):
        if libc.mount(None, top.encode(), None, flags, None) == 0: print('remounted', top)
    if libc.umount2(top.encode(), DETACH) == 0: print('unmounted', top)
for top, directories, files in os.walk('/sys/fs'):
    for name in directories + [top + '/new']:
        try: os.mkdir(os.path.join(top, name, 'new')); print('made', top, name)
        except OSError: pass
    places += [os.path.join(top, name) for name in files]
for path in places:
    for act in (lambda: os.open(path, os.O_WRONLY), lambda: os.open(path, os.O_RDWR), lambda: os.chmod(path, 0o777),
                lambda: os.truncate(path, 0), lambda: os.unlink(path), lambda: os.chown(path, 0, 0), lambda: os.utime(path)):
        try: act(); print('changed', path)
        except OSError: pass
"""
LOOK = """
import json, os
def names(top): return sorted(os.listdir(top))
up = [os.path.realpath('/sys/fs/cgroup/..'), os.path.realpath('/sys/fs/..')]
groups = [os.path.join(t, d) for t, ds, _ in os.walk('/sys/fs/cgroup') for d in ds if not os.path.islink(os.path.join(t, d))]
procs = [p for t, _, fs in os.walk('/sys/fs/cgroup') for f in fs if f == 'cgroup.procs' for p in open(os.path.join(t, f)).read().split()]
print(json.dumps({'fs': names('/sys/fs'), 'up': up, 'groups': groups, 'procs': sorted(set(procs)),
    'release': [t for t, _, fs in os.walk('/sys/fs') if 'release_agent' in fs],
    'roots': [line.split()[3] for line in open('/proc/self/mountinfo') if ' - cgroup' in line]}))
"""


def test_the_view_cannot_be_changed(sandbox: Sandbox) -> None:
    """By root inside, with every way that a file or a mount can be changed. gVisor's files of these names are of its own kernel."""
    assert sandbox.exec(["python3", "-c", ATTACK, json.dumps(VIEW)]).stdout == ""


def test_nothing_of_the_host_is_seen(sandbox: Sandbox, lab: Lab) -> None:
    """Only the sandbox's own groups, with only its own processes, and no way up from them."""
    with lab.sandbox(runtime="container") as neighbour:
        assert neighbour.exec("true").ok
        found = json.loads(sandbox.exec(["python3", "-c", LOOK]).stdout)
    assert found["fs"] == ["cgroup"] and found["up"] == ["/sys/fs", "/sys"] and found["release"] == []
    # For an ordinary user runc makes a group of the sandbox's name in the sandbox's group, which is then the top that is seen.
    assert set(found["roots"]) <= ({"/", "/.."} if ROOTLESS else {"/"}) and "0" not in found["procs"], found
    shown = {Path(group).name for group in found["groups"]}
    below = {sandbox.id} if ROOTLESS else set()
    assert shown <= {"memory", "cpu", "cpuacct", "cpu,cpuacct", "cpuset", "pids"} | below, shown


def test_the_hosts_own_figures_are_hidden(sandbox: Sandbox) -> None:
    """Memory and work of the machine are not in the files; they stay as they are while the machine works."""
    before = sandbox.exec("cat /proc/meminfo /proc/stat").stdout
    assert Path("/proc/stat").read_text() not in before
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert total not in before
    sum(range(3_000_000))
    os.sync()
    assert sandbox.exec("cat /proc/meminfo /proc/stat").stdout == before
