"""Writes the OCI configuration of a sandbox: all of it is ours, nothing of it comes from an image.

Mounts of files and directories are the launcher's work; the engine only mounts the kernel's file systems, on places the
launcher has checked to be plain directories.
"""

import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TypedDict

from atoll.backends.local.kernel import seccomp
from atoll.backends.local.seen import Seen

AGENT = "/.atoll/guest"
# Places the engine mounts on; they must be there and must not be links (CVE-2026-41579 and its kin).
MOUNTPOINTS = ("proc", "dev", "sys")
MAX_PTYS = 64

# Docker's default without MKNOD, NET_RAW, AUDIT_WRITE, SETFCAP, SETPCAP and SYS_CHROOT: nothing in a sandbox needs those.
CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETGID",
    "CAP_SETUID",
)
MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/config.gz",
    "/proc/diskstats",  # the transfers of every sandbox's disk
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/key-users",
    "/proc/keys",
    "/proc/kmsg",
    "/proc/latency_stats",
    "/proc/partitions",
    "/proc/pressure",  # of the whole machine, and anybody could set triggers on it
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/sys/block",  # a loop device names the file behind it: the home and the id of a neighbour
    "/sys/class/bdi",
    "/sys/class/block",
    "/sys/dev/block",
    "/sys/devices/virtual/bdi",
    "/sys/devices/virtual/block",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
    "/sys/kernel",
    "/sys/module",
)
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

_PLAIN = ["nosuid", "nodev", "noexec"]


class OciMount(TypedDict):
    destination: str
    type: str
    source: str
    options: list[str]


_MOUNTS: list[OciMount] = [
    {"destination": "/proc", "type": "proc", "source": "proc", "options": _PLAIN},
    {
        "destination": "/dev",
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "noexec", "mode=755", "size=256k", "nr_inodes=1024"],
    },
    {
        "destination": "/dev/pts",
        "type": "devpts",
        "source": "devpts",
        "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", f"max={MAX_PTYS}"],
    },
    {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": _PLAIN},
    {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*_PLAIN, "ro"]},
]


# Files that programs read to learn how large their machine is, made by the launcher (`launcher/src/view.rs`), over those of the kernel.
_MEMORY_VIEW = {"/proc/meminfo": "meminfo"}
_CPU_VIEW = {
    "/proc/cpuinfo": "cpuinfo",
    "/proc/stat": "stat",
    **{f"/sys/devices/system/cpu/{name}": "cpus" for name in ("online", "possible", "present")},
}
_GROUPS_VIEW = {"/sys/fs": "fs"}  # the sandbox's own control groups, and nothing else of what is there


TMP_BYTES = 64 << 20  # of the one place in a read-only root that can be written, beside the workspace
_TMP: OciMount = {
    "destination": "/tmp",
    "type": "tmpfs",
    "source": "tmpfs",
    "options": [*_PLAIN, "mode=1777", f"size={TMP_BYTES}"],
}


def _kernels_mounts(shm_mb: int, read_only_root: bool) -> list[OciMount]:
    """The kernel's file systems. Programs may be run from /dev/shm, as on any Linux machine."""
    options = ["nosuid", "nodev", "mode=1777", f"size={shm_mb << 20}"]
    shm: OciMount = {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": options}
    return [*_MOUNTS, shm, *([_TMP] if read_only_root else [])]


def _view(directory: str, seen: Seen) -> list[OciMount]:
    """Binds of the launcher's files. A limit that this host does not hold is not shown either."""
    shown = _GROUPS_VIEW | (_MEMORY_VIEW if seen.memory else {}) | (_CPU_VIEW if seen.cpus else {})
    options = ["rbind", "ro", *_PLAIN]
    return [
        {"destination": target, "type": "bind", "source": f"{directory}/{name}", "options": options}
        for target, name in shown.items()
    ]


def configuration(
    *, root: str, hostname: str, base: int, count: int, user_ns: str, net_ns: str, cgroup: str | None, shm_mb: int,
    seen: Seen, filter: str = "default", no_capabilities: bool = False, read_only_root: bool = False,
) -> bytes:  # fmt: skip
    """config.json of an engine outside: the two namespaces made ahead by path, the others new. `seen`: what programs shall take for
    the size of the machine."""
    linux = {
        "uidMappings": _mappings("uid_map", base, count),
        "gidMappings": _mappings("gid_map", base, count),
        "namespaces": [
            {"type": "user", "path": user_ns},
            {"type": "network", "path": net_ns},
            *({"type": kind} for kind in ("pid", "mount", "ipc", "uts", "cgroup")),
        ],
        **({} if cgroup is None else {"cgroupsPath": cgroup}),
        "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        "maskedPaths": [*MASKED, *hardware_with_disks()],
        "readonlyPaths": list(READ_ONLY),
        "seccomp": seccomp.profile(filter),
    }
    mounts = [*_kernels_mounts(shm_mb, read_only_root), *_view(f"{os.path.dirname(root)}/seen", seen)]
    return _document(root, hostname, no_capabilities, mounts, linux)


def _mappings(kind: str, base: int, count: int) -> list[dict[str, int]]:
    """The sandbox's id map as the launcher made it: one line for each line of our own map that it touches. runc since 1.1.15
    compares this with the namespace it is given."""
    found = []
    for line in Path(f"/proc/self/{kind}").read_text().splitlines():
        inside, _, size = (int(word) for word in line.split())
        start, end = max(base, inside), min(base + count, inside + size)
        if start < end:
            found.append({"containerID": start - base, "hostID": start, "size": end - start})
    return found


@cache
def hardware_with_disks(top: str = "/sys") -> tuple[str, ...]:
    """The trees of devices with a disk in them, such as a PCI bus: a disk's counters stand there too."""
    block, devices = os.path.join(top, "block"), os.path.join(top, "devices")
    try:
        disks = [os.path.realpath(os.path.join(block, name)) for name in os.listdir(block)]
    except OSError:
        return ()
    trees = {os.path.relpath(disk, devices).split("/")[0] for disk in disks if disk.startswith(devices + "/")}
    return tuple(os.path.join(devices, tree) for tree in sorted(trees - {"virtual", "system"}))


def inside_configuration(
    *, root: str, hostname: str, shared: Iterable[tuple[str, bool]], shm_mb: int,
    no_capabilities: bool = False, read_only_root: bool = False,
) -> str:  # fmt: skip
    """config.json of gVisor, which is in the namespaces already; its filter of system calls is in the agent's boot message.
    `shared` are the places, each with whether it is read-only, that others may change too: gVisor has to look again each time
    and must not keep what it has read."""
    binds: list[OciMount] = [
        {
            "destination": target,
            "type": "bind",
            "source": f"{root}{target}",
            "options": ["rbind", "ro" if read_only else "rw", "nosuid", "nodev"],
        }
        for target, read_only in shared
    ]
    mounts = [*(mount for mount in _kernels_mounts(shm_mb, read_only_root) if mount["type"] != "mqueue"), *binds]
    linux = {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]}
    return _document(root, hostname, no_capabilities, mounts, linux).decode()


def _document(
    root: str, hostname: str, no_capabilities: bool, mounts: list[OciMount], linux: Mapping[str, object]
) -> bytes:
    sets = ("bounding", "effective", "permitted")
    value = {
        "ociVersion": "1.0.2",
        "root": {"path": root, "readonly": False},
        "hostname": hostname,
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [AGENT, "agent"],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": {name: [] if no_capabilities else list(CAPABILITIES) for name in sets},
            "noNewPrivileges": True,
        },
        "mounts": mounts,
        "linux": linux,
    }
    return json.dumps(value, separators=(",", ":")).encode()
