"""F2-M3, F2-L4: nothing under /proc and /sys tells of other sandboxes' disks, and host-wide files are not writable."""

import os

from lab.sandboxes import Lab

from atoll import Sandbox

SEARCH = """
import os, sys
words = [word.encode() for word in sys.argv[1:]]
for top in ('/sys', '/proc'):
    for directory, below, files in os.walk(top, onerror=lambda error: None):
        if directory == '/proc':
            below[:] = [name for name in below if not name.isdigit() and name not in ('self', 'thread-self', 'sys')]
        for name in files:
            path = os.path.join(directory, name)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                try: data = os.read(fd, 1 << 16)
                finally: os.close(fd)
            except OSError: continue
            if any(word in data for word in words): print(path)
"""
BLOCKS = """
import os
for directory, below, files in os.walk('/sys'):
    if 'backing_file' in files or ('stat' in files and 'inflight' in files): print(directory)
for name in ('/sys/block', '/sys/class/block', '/sys/dev/block', '/sys/class/bdi', '/sys/fs'):
    for found in os.listdir(name) if os.path.isdir(name) else ():
        if found != 'cgroup': print(name, found)  # gVisor's own kernel has an empty one
for name in ('/proc/diskstats', '/proc/partitions'):
    if os.path.exists(name): print(open(name).read(), end='')
"""
TRIGGERS = """
import os
for name in os.listdir('/proc/pressure') if os.path.isdir('/proc/pressure') else ():
    try: os.close(os.open('/proc/pressure/' + name, os.O_RDWR))
    except OSError: continue
    print(name)
"""


def test_a_neighbour_leaves_no_trace_in_the_kernels_files(lab: Lab, anywhere: Sandbox, runtime: str) -> None:
    """The id of another sandbox and the home of the daemon stand in no file that root inside can read."""
    with lab.sandbox(runtime=runtime) as neighbour:
        found = anywhere.exec(["python3", "-c", SEARCH, neighbour.id, lab.home]).stdout
    assert found == ""


def test_no_block_device_is_shown(anywhere: Sandbox) -> None:
    """No name, size or count of transfers of any disk of the machine."""
    assert anywhere.exec(["python3", "-c", BLOCKS]).stdout.strip() == ""
    assert os.listdir("/sys/block") or os.path.exists("/proc/diskstats"), "control: outside they are shown"


def test_no_trigger_can_be_set_on_the_pressure_of_the_machine(anywhere: Sandbox) -> None:
    """Each trigger is work for the host's kernel that no limit of the sandbox covers."""
    assert anywhere.exec(["python3", "-c", TRIGGERS]).stdout == ""
