"""One control group per sandbox, on pure v2, on v1, and on hybrid hosts that have both.

The group is made first and removed last, so that whatever is half made can be found and killed by it. Killing and
freezing go through the unified hierarchy where there is one, never through the v1 freezer, under which SIGKILL hangs.
Limits are set once the engine is done, so that a small limit cannot break the start itself; no code of a user runs before
that.
"""

import asyncio
import errno
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.backends.contract import Limits
from atoll.errors import Internal, Unsupported

TOP = "atoll"
PERIOD_US = 100_000
_CONTROLLERS = ("cpu", "memory", "pids")
_SHOWN = (*_CONTROLLERS, "cpuacct", "cpuset")  # all that Java wants to see before it believes one of them
# The group is being removed; a threaded group has no list of processes.
_GONE = (errno.ENODEV, errno.EOPNOTSUPP)
SPARE_PIDS = 8  # the agent and its shims, which the user did not ask for


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where this host's control groups are mounted."""

    unified: Path | None
    v1: Mapping[str, Path]  # by controller; named hierarchies as "name=..."
    tops: Mapping[Path, Path] = field(
        default_factory=dict
    )  # below which directory of a mount ours are, if not its root

    def top(self, mount: Path) -> Path:
        return self.tops.get(mount, mount)

    def delegated(self, memberships: str = "/proc/self/cgroup") -> "Hierarchies":
        """Only those in which the group we are in was given to us, and below that."""
        own = {}
        for line in _read(Path(memberships)).splitlines():
            _, controllers, path = line.split(":", 2)
            for name in controllers.split(",") if controllers else [""]:
                own[name.removeprefix("name=") if name.startswith("name=") else name] = path.lstrip("/")
        tops = {mount: mount / own[name] for name, mount in self.v1.items() if name in own}
        if self.unified and "" in own:
            tops[self.unified] = _with_room(self.unified, self.unified / own[""])
        tops = {mount: top for mount, top in tops.items() if top != mount and _is_ours(top)}
        unified = self.unified if self.unified in tops else None
        return Hierarchies(unified, {name: mount for name, mount in self.v1.items() if mount in tops}, tops)

    @staticmethod
    def detect(mountinfo: str = "/proc/self/mountinfo", root: Path = Path("/")) -> "Hierarchies":
        unified: Path | None = None
        v1: dict[str, Path] = {}
        with open(mountinfo, encoding="utf-8", errors="replace") as file:
            for line in file:
                left, _, right = line.partition(" - ")
                fields, (kind, _, options) = left.split(), right.split(maxsplit=2)
                if len(fields) < 5 or fields[3] != "/":
                    continue
                if kind == "cgroup2" and unified is None:
                    unified = root / fields[4].lstrip("/")
                elif kind == "cgroup":
                    known = {"rw", "ro", "xattr", "clone_children", "noprefix"}
                    for name in options.strip().split(","):
                        if name not in known and not name.startswith("release_agent"):
                            v1.setdefault(name, root / fields[4].lstrip("/"))
        return Hierarchies(unified, v1)

    def holder(self, controller: str) -> Path | None:
        """The mount that has the controller."""
        if controller in self.v1:
            return self.v1[controller]
        if self.unified and controller in _read(self.top(self.unified) / "cgroup.controllers").split():
            return self.unified
        return None

    def is_v2(self, controller: str) -> bool:
        return controller not in self.v1

    def mounts(self) -> list[Path]:
        found = dict.fromkeys(self.v1.values())
        if self.unified:
            found[self.unified] = None
        return list(found)

    def places(self) -> "Places":
        """Where the groups of sandboxes are, worked out once: what is done for each of them only joins strings."""
        mounts = {mount: str(self.top(mount)) for mount in self.mounts()}
        unified = mounts[self.unified] if self.unified else None
        shown: dict[str, list[str]] = {}
        for name in _SHOWN:
            if mount := self.v1.get(name):
                shown.setdefault(mounts[mount], []).append(name)
        if not shown and unified:
            shown[unified] = []
        return Places(
            {name: mounts[mount] for name, mount in self.v1.items()},
            unified,
            tuple(mounts.values()),
            {",".join(names): top for top, names in shown.items()},
        )


@dataclass(frozen=True, slots=True)
class Places:
    """The directories below which groups are made."""

    v1: Mapping[str, str]  # by controller
    unified: str | None
    all: tuple[str, ...]
    shown: Mapping[str, str]  # by the name that programs inside see, which v2 has none of

    def of(self, controller: str) -> str | None:
        return self.v1.get(controller) or self.unified

    def is_v2(self, controller: str) -> bool:
        return controller not in self.v1


class Groups:
    """The groups of one home: /atoll/<mark>/<id> in every hierarchy."""

    def __init__(self, mark: str, hierarchies: Hierarchies | None = None, *, rootless: bool = False) -> None:
        self.mark = mark
        self.rootless = rootless
        found = hierarchies or Hierarchies.detect()
        self.hierarchies = found.delegated() if rootless else found
        self._places = self.hierarchies.places()
        self._made_in: list[str] | None = None

    def path(self, box: str) -> str:
        """As the engine wants it: absolute, the same in all hierarchies."""
        return f"/{TOP}/{self.mark}/{box}"

    def prepare(self) -> None:
        """Make the parents and bound what all sandboxes together can fork."""
        for mount in self._used():
            top = self.hierarchies.top(mount)
            parent = top / TOP / self.mark
            parent.mkdir(parents=True, exist_ok=True)
            if mount == self.hierarchies.unified:
                if self.rootless:
                    _step_aside(top)
                for level in (top, top / TOP, parent):
                    self._delegate(level)
            if mount == self.hierarchies.v1.get("cpuset"):
                for level in (top / TOP, parent):
                    _inherit_cpus(level)
        holder = self.hierarchies.holder("pids")
        limit = self.hierarchies.top(holder) / TOP / "pids.max" if holder else None
        if limit and (limit.exists() or not self.rootless):  # a v2 group that is busy cannot give the controller on
            _write(limit, str(_all_pids()))

    def create(self, box: str) -> "Group":
        group = self.open(box)
        if self._made_in is None:
            self._made_in = [str(self.hierarchies.top(mount)) for mount in self._used()]
        for top in self._made_in:
            directory = f"{top}/{TOP}/{self.mark}/{box}"
            with suppress(FileExistsError):
                os.mkdir(directory)
            os.chmod(directory, 0o755)  # programs inside read their own; to others the directories above are closed
        return group

    def open(self, box: str) -> "Group":
        return Group(box, self._places, f"{TOP}/{self.mark}/{box}")

    def remove_empty(self) -> None:
        """Take this home's parents away if no sandbox is left in them; the kernel refuses if one is. /atoll itself stays:
        another daemon may be about to make its own below it."""
        for mount in self.hierarchies.mounts():
            with suppress(OSError):
                (self.hierarchies.top(mount) / TOP / self.mark).rmdir()

    def names(self) -> set[str]:
        found: set[str] = set()
        for mount in self.hierarchies.mounts():
            with suppress(FileNotFoundError), os.scandir(self.hierarchies.top(mount) / TOP / self.mark) as entries:
                found.update(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return found

    def _used(self) -> list[Path]:
        wanted = [self.hierarchies.holder(name) for name in (*_CONTROLLERS, "cpuacct")]
        wanted.append(self.hierarchies.v1.get("cpuset"))  # limits nothing
        mounts = [mount for mount in [self.hierarchies.unified, *wanted] if mount]
        if not mounts and not self.rootless:
            raise Unsupported("no control groups are mounted", hint="mount cgroup2 on /sys/fs/cgroup")
        return list(dict.fromkeys(mounts))

    def _delegate(self, level: Path) -> None:
        available = _read(level / "cgroup.controllers").split()
        for name in _CONTROLLERS:
            if name in available:
                with suppress(OSError):  # busy or not ours to give: shows up as a limit that is not enforced
                    _write(level / "cgroup.subtree_control", f"+{name}")


class Group:
    """One sandbox's group in all hierarchies."""

    def __init__(self, box: str, places: Places, path: str) -> None:
        self.box = box
        self._places = places
        self._path = path

    # Limits

    def apply(self, limits: Limits, tasks: int | None = None, beside_mb: int = 0) -> dict[str, bool]:
        """Set them; says which of them this host holds. `tasks`: of the host, where those are not the sandbox's processes.
        `beside_mb`: memory for a kernel of the sandbox's own, beside that of its programs."""
        pids = limits.pids + SPARE_PIDS if tasks is None else tasks
        return {
            "cpus": self._set_cpu(limits.cpus),
            "memory_mb": self._set_memory((limits.memory_mb + beside_mb) << 20),
            "pids": self._set("pids", "pids.max", "pids.max", str(pids)),
        }

    def held(self) -> set[str]:
        """The controllers by which this host holds limits for the group."""
        v1 = {"cpu": "cpu.cfs_quota_us", "memory": "memory.limit_in_bytes", "pids": "pids.max"}
        v2 = {"cpu": "cpu.max", "memory": "memory.max", "pids": "pids.max"}
        files = {name: (v2 if self._places.is_v2(name) else v1)[name] for name in _CONTROLLERS}
        return {name for name, file in files.items() if (top := self._of(name)) and os.path.exists(f"{top}/{file}")}

    def shown(self) -> dict[str, str]:
        """Groups that programs inside may read, by the name of their directory below /sys/fs/cgroup: v1's, or else the one of v2,
        which has no name there."""
        groups = {name: f"{top}/{self._path}" for name, top in self._places.shown.items()}
        return {name: group for name, group in groups.items() if os.path.isdir(group)}

    def _set_cpu(self, cpus: float) -> bool:
        quota = max(1000, int(cpus * PERIOD_US))
        if self._places.is_v2("cpu"):
            return self._set("cpu", "", "cpu.max", f"{quota} {PERIOD_US}")
        period = self._set("cpu", "cpu.cfs_period_us", "", str(PERIOD_US))
        return period and self._set("cpu", "cpu.cfs_quota_us", "", str(quota))

    def _set_memory(self, size: int) -> bool:
        if self._places.is_v2("memory"):
            held = self._set("memory", "", "memory.max", str(size))
            self._set("memory", "", "memory.swap.max", "0")
            return held
        # Growing: memory and swap together must stay the larger one at every step.
        names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
        directory = self._of("memory")
        if directory and size > int(_read(f"{directory}/{names[0]}") or 0):
            names.reverse()
        done = {name: self._set("memory", name, "", str(size)) for name in names}
        self._set("memory", "memory.swappiness", "", "0")
        return done["memory.limit_in_bytes"]

    def _set(self, controller: str, v1: str, v2: str, value: str) -> bool:
        directory = self._of(controller)
        name = v2 if self._places.is_v2(controller) else v1
        if directory is None:
            return False
        try:
            _write(f"{directory}/{name}", value)
        except FileNotFoundError:
            return False
        return True

    # Life and death

    def doors(self) -> list[str]:
        """The files by which a process enters, in every hierarchy."""
        return [f"{directory}/cgroup.procs" for directory in self._directories()]

    async def kill(self, timeout: float = 30.0) -> None:
        """Kill everything inside and return when it is empty."""
        deadline = time.monotonic() + timeout
        pause = 0.0005
        while pids := self.pids():
            self.send_kill()
            for pid in pids:  # for kernels without cgroup.kill; init comes first, and its namespace dies with it
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise Internal(f"processes of sandbox {self.box} do not die", details={"pids": self.pids()})
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.05)

    def send_kill(self) -> None:
        """Kill everything inside, once and without waiting, where the kernel can."""
        for directory in self._directories():
            with suppress(OSError):  # v1 has no such file
                _write(f"{directory}/cgroup.kill", "1")

    def is_empty(self) -> bool:
        """Whether nothing is left inside. Whoever entered is in the unified group too, where there is one, and that knows it at once."""
        unified = self._unified()
        events = _read(f"{unified}/cgroup.events") if unified is not None else ""
        return "populated 0" in events if "populated" in events else not self.pids()

    def pids(self) -> list[int]:
        """Processes inside, in any hierarchy, as ids of our own pid namespace."""
        found: set[int] = set()
        for directory in self._directories():
            for root in _levels(directory):
                found.update(int(pid) for pid in _read(f"{root}/cgroup.procs").split())
        return sorted(found - {0})

    async def freeze(self, frozen: bool, timeout: float = 30.0) -> None:
        """Stop or continue everything inside; returns when the kernel says it is so."""
        unified = self._unified()
        if unified is None or not os.path.exists(f"{unified}/cgroup.freeze"):
            raise Unsupported(
                "this host cannot freeze a sandbox",
                hint="it needs cgroup v2, beside v1 is enough; for an ordinary user delegated, see `atoll doctor`",
            )
        _write(f"{unified}/cgroup.freeze", str(int(frozen)))
        deadline = time.monotonic() + timeout
        while f"frozen {int(frozen)}" not in _read(f"{unified}/cgroup.events"):
            if time.monotonic() > deadline:
                raise Internal(f"sandbox {self.box} does not {'freeze' if frozen else 'thaw'}")
            await asyncio.sleep(0.002)

    async def remove(self, timeout: float = 30.0) -> None:
        """Take the empty group away. A group can stay busy a moment after its last process."""
        deadline = time.monotonic() + timeout
        while left := [directory for directory in self._directories() if not _remove_tree(directory)]:
            if time.monotonic() > deadline:
                raise Internal(f"control groups of sandbox {self.box} stay", details={"left": left})
            await asyncio.sleep(0.005)

    # Counters

    def oom_kills(self) -> int | None:
        """Count the groups below too: v1 counts where the process was, and an engine may have made one for it."""
        directory = self._of("memory")
        if directory is None:
            return None
        if self._places.is_v2("memory"):
            return _counter(f"{directory}/memory.events", "oom_kill")
        found = [_counter(f"{root}/memory.oom_control", "oom_kill") for root in _levels(directory)]
        return sum(count or 0 for count in found) if found else None

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes now and at most; page cache included."""
        v2 = self._places.is_v2("memory")
        now = self._number("memory", "memory.current" if v2 else "memory.usage_in_bytes")
        return now, self._number("memory", "memory.peak" if v2 else "memory.max_usage_in_bytes")

    def memory_files(self) -> list[str]:
        """Return the files that say how much memory is used, and how much of it is pages of files; empty where none is counted."""
        usage = "memory.current" if self._places.is_v2("memory") else "memory.usage_in_bytes"
        directory = self._of("memory")
        found = [f"{directory}/{usage}", f"{directory}/memory.stat"] if directory is not None else []
        return found if all(os.path.exists(path) for path in found) else []

    def cpu_us(self) -> int | None:
        if "cpuacct" in self._places.v1:
            total = self._number("cpuacct", "cpuacct.usage")
            return None if total is None else total // 1000
        directory = self._of("cpu")
        return _counter(f"{directory}/cpu.stat", "usage_usec") if directory else None

    def count(self) -> int | None:
        return self._number("pids", "pids.current")

    def _number(self, controller: str, name: str) -> int | None:
        directory = self._of(controller)
        text = _read(f"{directory}/{name}").strip() if directory else ""
        return int(text) if text.isdigit() else None

    # Directories

    def _of(self, controller: str) -> str | None:
        top = self._places.of(controller)
        return f"{top}/{self._path}" if top else None

    def _unified(self) -> str | None:
        return f"{self._places.unified}/{self._path}" if self._places.unified else None

    def _directories(self) -> Iterator[str]:
        for top in self._places.all:
            directory = f"{top}/{self._path}"
            if os.path.isdir(directory):
                yield directory


def _levels(directory: str) -> list[str]:
    """A group and those below it, outer ones first; none if it is gone. How many are below is told by its links."""
    try:
        plain = os.stat(directory).st_nlink == 2
    except FileNotFoundError:
        return []
    return [directory] if plain else [root for root, _, _ in os.walk(directory)]


def _is_ours(directory: Path) -> bool:
    """Whether groups can be made there and processes moved into it."""
    return os.access(directory, os.W_OK) and os.access(directory / "cgroup.procs", os.W_OK)


def _with_room(mount: Path, own: Path) -> Path:
    """In v2 a group that gives controllers on may have no process itself. A login session's has: the nearest one above it
    that was given to us too and has none, as below a user's service manager. Else our own, from which we step aside."""
    for group in (own, *own.parents):
        if group == mount or not _is_ours(group):
            break
        if not _read(group / "cgroup.procs").split():
            return group
    return own


def _inherit_cpus(level: Path) -> None:
    """A v1 group without processors takes no process in: this one has those of its parent, and so have all that are made in it."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if not _read(level / name).strip():
            _write(level / name, _read(level.parent / name).strip())
    _write(level / "cgroup.clone_children", "1")


def _step_aside(top: Path) -> None:
    """If we are in that very group, move into one of our own below it."""
    if str(os.getpid()) not in _read(top / "cgroup.procs").split():
        return
    with suppress(OSError):
        (top / "atoll-daemon").mkdir(exist_ok=True)
        _write(top / "atoll-daemon" / "cgroup.procs", "0")


def _remove_tree(directory: str) -> bool:
    """Children first; true when it is gone. A sandbox cannot make groups, but an engine might."""
    for root in reversed(_levels(directory)):
        try:
            os.rmdir(root)
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


def _all_pids() -> int:
    """Three quarters of what the kernel has, so that the host can always start something."""
    return max(
        1024,
        min(int(_read(Path("/proc/sys/kernel/pid_max"))), int(_read(Path("/proc/sys/kernel/threads-max")))) * 3 // 4,
    )


def _read(path: str | Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        if error.errno in _GONE:
            return ""
        raise
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts).decode()
    except OSError as error:
        if error.errno in _GONE:
            return ""
        raise
    finally:
        os.close(fd)


def _counter(path: str, key: str) -> int | None:
    for line in _read(path).splitlines():
        if line.startswith(f"{key} "):
            return int(line.split()[1])
    return None


def _write(path: str | Path, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # never creates
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
