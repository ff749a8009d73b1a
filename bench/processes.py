"""Cost of processes: memory of a sandbox by its control group, and CPU time of a whole process tree."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MB = 1_000_000


def groups_of(ident: str) -> list[Path]:
    """A sandbox's directory in every hierarchy that has one."""
    return [*CGROUPS.glob(f"*/atoll/*/{ident}"), *CGROUPS.glob(f"atoll/*/{ident}")]


def pids_of(ident: str) -> set[int]:
    found: set[int] = set()
    for group in groups_of(ident):
        for inner, _, _ in os.walk(group):
            found.update(int(pid) for pid in _read(Path(inner, "cgroup.procs")).split())
    return found


def pss(pids: set[int]) -> float:
    """Proportional memory of these processes, in MB: what they share is counted once between them and all others."""
    kilobytes = 0
    for pid in pids:
        lines = _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines()
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes * 1024 / MB


def kernel_memory(ident: str) -> float:
    """Return the memory the kernel charged to the sandbox's group for itself, in MB; v1 and v2 name it differently."""
    for group in groups_of(ident):
        if said := _read(group / "memory.kmem.usage_in_bytes"):
            return int(said) / MB
        for line in _read(group / "memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name == "kernel":
                return int(value) / MB
    return 0.0


def resident(pid: int) -> float:
    """A process's own memory, in MB."""
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / MB
    return 0.0


def tree(pid: int) -> set[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = {pid}, [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def in_a_sandbox(pid: int) -> bool:
    return "/atoll/" in _read(Path(f"/proc/{pid}/cgroup"))


def cpu_seconds(pids: set[int]) -> float:
    """CPU time these processes have used so far, of their own and of children they waited for."""
    ticks = sum(sum(int(value) for value in fields[11:15]) for pid in pids if (fields := _stat(pid)))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty for one that is gone."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
