"""ESC-13: devices. The list of nodes is the fixed one, on every runtime, and none can be added."""

import os

from atoll import Sandbox

NODES = {"full", "null", "ptmx", "random", "tty", "urandom", "zero"}
PLACES = {"fd", "mqueue", "pts", "shm", "stderr", "stdin", "stdout", "core", "net", "console", "char"}
OWN = {
    "gvisor": {"fuse", "tun"}
}  # devices of gVisor's own kernel; the host's are not involved, and using them needs rights nobody has
LIST = """
import os, stat
for name in sorted(os.listdir('/dev')):
    mode = os.lstat('/dev/' + name).st_mode
    print(name, stat.S_ISCHR(mode) or stat.S_ISBLK(mode))
"""
MAKE = """
import os, stat
for name, kind, *device in (('sda', stat.S_IFBLK, 8, 0), ('mem', stat.S_IFCHR, 1, 1), ('kvm', stat.S_IFCHR, 10, 232),
                            ('fuse', stat.S_IFCHR, 10, 229), ('tun', stat.S_IFCHR, 10, 200), ('loop', stat.S_IFBLK, 7, 0)):
    for place in ('/dev', '/tmp', '/workspace', '/dev/shm'):
        try:
            os.mknod(f'{place}/bad-{name}', kind | 0o666, os.makedev(*device))
            os.open(f'{place}/bad-{name}', os.O_RDONLY); print('opened', place, name)
        except OSError: pass
"""


def test_the_node_list_is_the_profiles(anywhere: Sandbox, runtime: str) -> None:
    """Only the harmless ones; no disk, no kvm, no fuse, no tun, no memory, no graphics."""
    found = dict(line.split() for line in anywhere.run(LIST).stdout.splitlines())
    assert {name for name, node in found.items() if node == "True"} <= NODES | {"console"} | OWN.get(runtime, set())
    assert set(found) <= NODES | PLACES | OWN.get(runtime, set()), found
    assert len(os.listdir("/dev")) > len(found)  # control: the host has more to offer


def test_no_node_can_be_made_and_opened(anywhere: Sandbox, runtime: str) -> None:
    """Not even by root inside, anywhere that can be written."""
    opened = {line.split()[2] for line in anywhere.run(MAKE).stdout.splitlines()}
    assert opened <= OWN.get(runtime, set())
    anywhere.exec("rm -f /dev/bad-* /tmp/bad-* /workspace/bad-* /dev/shm/bad-*")


TUNNEL = """
import errno, fcntl, os, stat
try:
    os.mknod('/dev/bad-tunnel', stat.S_IFCHR | 0o666, os.makedev(10, 200))
    fcntl.ioctl(os.open('/dev/bad-tunnel', os.O_RDWR), 0x400454CA, b'atoll0' + bytes(10) + (0x1001).to_bytes(2, 'little') + bytes(22))
    print('made')
except OSError as error: print(errno.errorcode[error.errno])
"""


def test_no_tunnel_interface_can_be_made(anywhere: Sandbox) -> None:
    said = anywhere.run(TUNNEL).stdout.strip()
    anywhere.exec("rm -f /dev/bad-tunnel")
    assert said in ("EPERM", "EACCES", "ENXIO", "ENODEV"), said
