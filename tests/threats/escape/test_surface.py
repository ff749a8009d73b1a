"""ESC-08: privileges and kernel surface, as root inside sees them, against the profile that is checked in here.

tests/backend/test_start.py has the same for the agent from outside; this goes through the public face.
"""

import json
import os
from pathlib import Path

import pytest
from lab.sandboxes import ROOTLESS, Lab

from atoll import Sandbox

# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE
CAPABILITIES = 0x4FB
REPORT = """
import ctypes, errno, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
found = {}
def call(name, number, *args):
    ctypes.set_errno(0)
    padded = [ctypes.c_long(a) if isinstance(a, int) else a for a in (*args, *[0] * (6 - len(args)))]
    found[name] = 'done' if libc.syscall(number, *padded) >= 0 else errno.errorcode.get(ctypes.get_errno(), '?')
call('unshare(NEWUSER)', 272, 0x10000000)
call('unshare(NEWNS)', 272, 0x20000)
call('setns', 308, 0, 0)
call('bpf', 321, 0)
call('io_uring_setup', 425, 1)
call('userfaultfd', 323, 0)
call('keyctl', 250, 0, -3, 1)
call('add_key', 248, b'user', b'x', b'y', 1, -3)
call('init_module', 175)
call('perf_event_open', 298)
call('mount', 165, b'none', b'/mnt', b'tmpfs')
call('pivot_root', 155, b'/', b'/')
call('open_by_handle_at', 304)
call('ptrace pid 1', 101, 16, 1)
here, there = (ctypes.c_ulong * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8), (ctypes.c_ulong * 2)(0x400000, 8)
call('process_vm_readv pid 1', 310, 1, here, 1, there, 1)
call('swapon', 167)
call('settimeofday', 164)
for name, family, kind, proto in (('packet', 17, 3, 0), ('vsock', 40, 1, 0), ('alg', 38, 5, 0), ('raw', 2, 3, 1)):
    try: socket.socket(family, kind, proto).close(); found[name] = 'done'
    except OSError as error: found[name] = errno.errorcode[error.errno]
status = dict(line.split(':\\t', 1) for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)
print(json.dumps({'calls': found, 'status': status}))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system call numbers of x86_64")
def test_surface_equals_the_profile(anywhere: Sandbox, runtime: str) -> None:
    """No call that would widen anything succeeds; capabilities are the short list, bounding set included."""
    report = json.loads(anywhere.run(REPORT).stdout)
    calls, status = report["calls"], report["status"]
    assert [name for name, outcome in calls.items() if outcome == "done" and (runtime, name) not in HARMLESS] == []
    for name in ("CapPrm", "CapEff", "CapBnd"):
        assert int(status[name], 16) & ~CAPABILITIES == 0, name
    assert int(status["CapInh"], 16) == 0
    if runtime == "container":
        assert {name: outcome for name, outcome in calls.items() if outcome != "EPERM"} == {}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


# gVisor answers these from its own kernel; nothing of the host's is involved.
HARMLESS = {("gvisor", "settimeofday"), ("gvisor", "unshare(NEWUSER)"), ("gvisor", "unshare(NEWNS)"), ("gvisor", "keyctl"),
            ("gvisor", "add_key"), }  # fmt: skip


def test_set_uid_programs_give_nothing(anywhere: Sandbox) -> None:
    """A copy of a program with the set-uid bit runs as who started it."""
    assert anywhere.exec("cp $(readlink -f /usr/bin/id) /tmp/id; chmod 4755 /tmp/id").ok
    assert anywhere.exec(["/tmp/id", "-u"], user="1000").stdout == "1000\n"


def test_root_inside_is_nobody_outside(lab: Lab, runtime: str) -> None:
    """Every process of the sandbox, helpers of the runtime included, has ids of the sandbox's own range on the host."""
    with lab.sandbox(runtime=runtime) as made:
        made.start("sleep 647")
        init = made.info().wire["pid"]
        with open(f"/proc/{init}/status") as file:
            fields = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
        uids = set(map(int, fields["Uid"].split()))
        assert uids == {os.geteuid()} if ROOTLESS else min(uids) >= 0x1000_0000, (
            uids
        )  # an ordinary user has no other ids
        assert os.readlink(f"/proc/{init}/ns/user") != os.readlink("/proc/self/ns/user")
        assert made.id in Path(f"/proc/{init}/cgroup").read_text(), "its processes are in its own group"
