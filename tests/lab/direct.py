"""What the tests of the direct engine share: everything that can be told about a sandbox from inside and from outside, in a form in
which two of them can be compared."""

import ctypes
import os
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.backends.local.bundle import MASKED, READ_ONLY

STATUS = tuple(
    """Umask Uid Gid Groups Kthread SigBlk SigIgn SigCgt CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp
Seccomp_filters Speculation_Store_Bypass SpeculationIndirectBranch Cpus_allowed_list Mems_allowed_list THP_enabled""".split()  # noqa: SIM905
)

# Run inside: prints one JSON object.
LOOK = """
import ctypes, errno, json, os, resource, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
def text(path):
    try:
        with open(path, errors='replace') as file: return file.read()
    except OSError as error: return errno.errorcode[error.errno]
def told(path):
    try: s = os.lstat(path)
    except OSError as error: return errno.errorcode[error.errno]
    link = os.readlink(path) if stat.S_ISLNK(s.st_mode) else ''
    return [oct(s.st_mode), s.st_uid, s.st_gid, [os.major(s.st_rdev), os.minor(s.st_rdev)], link]
def tried(act):
    try: return act()
    except OSError as error: return errno.errorcode[error.errno]
def write(path):
    os.close(os.open(path, os.O_WRONLY)); return 'open'
def prctl(number):
    return libc.prctl(number, 0, 0, 0, 0)
def tree(top):
    found = {top: told(top)}
    for root, directories, files in os.walk(top):
        for name in directories + files:
            found[os.path.join(root, name)] = told(os.path.join(root, name))
    return found
def settings(top):
    return {os.path.join(root, name): text(os.path.join(root, name)) for root, _, files in os.walk(top) for name in files}
covered, own = json.loads(sys.argv[1])
seen = {
    'limits': text('/proc/self/limits'), 'groups': text('/proc/self/cgroup'), 'setgroups': text('/proc/self/setgroups'),
    'uids': text('/proc/self/uid_map'), 'gids': text('/proc/self/gid_map'), 'oom': text('/proc/self/oom_score_adj'),
    'audit': [text('/proc/self/loginuid'), text('/proc/self/sessionid')], 'label': text('/proc/self/attr/current'),
    'status': text('/proc/self/status'), 'first': text('/proc/1/status'), 'mounts': text('/proc/1/mountinfo'),
    'command': text('/proc/1/cmdline'), 'open': sorted(os.listdir('/proc/self/fd')), 'cwd': os.getcwd(), 'host': list(os.uname()),
    'environment': dict(os.environ), 'nice': os.nice(0), 'scheduler': os.sched_getscheduler(0),
    'session': [os.getsid(1), os.getpgid(1), os.getppid() > 0],
    'prctl': {n: prctl(n) for n in (2, 3, 7, 21, 27, 30, 37, 39, 42)},
    'personality': libc.personality(0xffffffff),
    'devices': tree('/dev'), 'tops': {p: told(p) for p in ('/', '/proc', '/sys', '/tmp', '/workspace', '/.atoll', '/.atoll/guest')},
    'listing': sorted(os.listdir('/')), 'processes': sorted(p for p in os.listdir('/proc') if p.isdigit())[:1],
    'covered': {p: [told(p), tried(lambda: sorted(os.listdir(p))), tried(lambda: text(p)[:200]), tried(lambda: write(p))] for p in covered},
    'written': {p: tried(lambda: write(p)) for p in own},
    'settings': {p: v for top in ('/proc/sys/net', '/proc/sys/fs/mqueue', '/proc/sys/user') for p, v in settings(top).items()},
    'ipc': {n: text('/proc/sys/kernel/' + n) for n in ('sem', 'msgmax', 'msgmnb', 'msgmni', 'shmall', 'shmmax', 'shmmni', 'hostname',
            'domainname', 'core_pattern', 'pid_max', 'overflowuid')},
    'interfaces': text('/proc/net/dev').count(':'), 'sys': sorted(os.listdir('/sys')),
}
print(json.dumps(seen))
"""
COVERED = [*MASKED, *READ_ONLY]
WRITTEN = ["/proc/sys/kernel/hostname", "/proc/sys/net/ipv4/ip_forward", "/proc/sysrq-trigger", "/sys/power/state"]
# Counters and clocks; nothing of them is set by an engine.
_MOVING = re.compile(r"/(tcp_mem|udp_mem|nf_conntrack_count|random_.*|.*_max_orphans|.*rand.*)$")


def comparable(seen: dict[str, Any], base: int, box: str) -> dict[str, Any]:
    """Without what names this very sandbox: its ids, its loop device, the order in which mounts were numbered."""
    found = dict(seen)
    for name in ("status", "first"):
        lines = dict(line.split(":", 1) for line in seen[name].splitlines() if ":" in line)
        found[name] = {key: lines.get(key, "").strip() for key in STATUS}
        # Which processors depends on the sandbox's id, how many on its limit.
        found[name]["Cpus_allowed_list"] = bin(int(lines["Cpus_allowed"].replace(",", ""), 16)).count("1")
    found["mounts"] = sorted(_mount(line, base) for line in seen["mounts"].splitlines())
    for name in ("uids", "gids"):
        found[name] = seen[name].split()
        assert found[name][1] == str(base)
        found[name][1] = "base"
    found["settings"] = {path: value for path, value in seen["settings"].items() if not _MOVING.search(path)}
    own = box[:12]  # all of the id that a host name has
    found["host"] = [word.replace(own, "id") for word in seen["host"]]
    found["ipc"] = {name: text.replace(own, "id") for name, text in seen["ipc"].items()}
    return found


def _mount(line: str, base: int) -> str:
    """Where, what of which kind, with which options and which propagation."""
    left, _, right = line.partition(" - ")
    fields = left.split()
    device = re.sub(r"loop\d+", "loop", right).replace(str(base), "base")
    return " ".join([*fields[3:], "-", device])


def outside(pid: int, base: int) -> dict[str, Any]:
    """Of the sandbox's first process, by the host's eyes."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    own = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in os.listdir("/proc/self/ns")}
    return {
        "parent": int(status["PPid"]),
        "status": {key: status[key].split() for key in STATUS if key in status and key not in ("Uid", "Gid")},
        "numbers": [len(status[key].split()) for key in ("NStgid", "NSpid", "NSpgid", "NSsid")],
        "leads": [status[key].split()[0] == str(pid) for key in ("NSpgid", "NSsid")],
        "fds": {fd: re.sub(r"\d+", "", os.readlink(f"/proc/{pid}/fd/{fd}")) for fd in range(4)},
        "places": [os.readlink(f"/proc/{pid}/{name}") for name in ("cwd", "root", "exe")],
        "spaces": {kind: os.readlink(f"/proc/{pid}/ns/{kind}") != link for kind, link in own.items()},
        "oom": Path(f"/proc/{pid}/oom_score_adj").read_text(),
        "limits": Path(f"/proc/{pid}/limits").read_text(),
        "keys": [
            line.split()[2]
            for line in Path("/proc/key-users").read_text().splitlines()
            if line.split(":")[0].strip() == str(base)
        ],
        "slack": Path(f"/proc/{pid}/timerslack_ns").read_text(),
    }


def opened(pid: int) -> list[str]:
    """The files a process holds, with no word about sockets, pipes and the like; those come and go with the agent's work."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return [path for path in found if path.startswith("/") and path != "/dev/null"]


def groups_of(pid: int) -> dict[str, str]:
    """Controllers of each hierarchy, and the group there."""
    rows = (line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    return {controllers: path for _, controllers, path in rows}


_SEIZE, _INTERRUPT, _GET_FILTER, _DETACH = 0x4206, 0x4207, 0x420C, 17
_WAIT_ALL = 0x4000_0000


def filter_of(pid: int) -> bytes:
    """The filter of system calls that is in force, as the kernel has it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long

    def ptrace(request: int, data: Any = None) -> int:
        done = int(libc.ptrace(request, pid, None, data))
        if done < 0:
            raise OSError(ctypes.get_errno(), f"ptrace {request:x}")
        return done

    ptrace(_SEIZE)
    try:
        ptrace(_INTERRUPT)
        os.waitpid(pid, _WAIT_ALL)
        steps = ptrace(_GET_FILTER)
        program = ctypes.create_string_buffer(8 * steps)
        ptrace(_GET_FILTER, program)
        return program.raw
    finally:
        libc.ptrace(_DETACH, pid, None, None)


def answer(program: bytes, number: int, arch: int, first: int = 0) -> int:
    """What a filter says to a call."""
    data = struct.pack("=IIQ6Q", number & 0xFFFF_FFFF, arch, 0, first, *[0] * 5)
    steps = list(struct.iter_unpack("=HBBI", program))
    at, held = 0, 0
    while True:
        code, jump, other, k = steps[at]
        at += 1
        if code == 0x20:
            (held,) = struct.unpack_from("=I", data, k)
        elif code == 0x54:
            held &= k
        elif code == 0x05:
            at += k
        elif code == 0x06:
            return int(k)
        else:
            at += jump if {0x15: held == k, 0x25: held > k, 0x35: held >= k, 0x45: bool(held & k)}[code] else other
