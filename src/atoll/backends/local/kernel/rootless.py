"""An ordinary user's daemon: it becomes root of a user namespace of its own, and everything below works as it does for root.

With `newuidmap` and subordinate ids (/etc/subuid) there are many ids inside, else one. Root of a sandbox is then the user
who started the daemon, seen from outside; ids are not shifted by mounts, because only real root may do that. What is not
to be had (control groups that were not delegated, loop devices) is said by `enforced`, or refused where it was asked for.
"""

import array
import ctypes
import fcntl
import os
import pwd
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.backends.local import binaries
from atoll.errors import Unsupported

_CLONE_NEWNS = 0x0002_0000
_CLONE_NEWUSER = 0x1000_0000
_MS_REC_SLAVE = 0x4000 | 0x8_0000  # nothing flows out; what the host unmounts goes away here too
_NS_GET_PARENT = 0xB702
_NS_GET_OWNER_UID = 0xB704
_ALL = 0xFFFF_FFFF
APPARMOR_SWITCH = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
USERNS_SWITCHES = (Path("/proc/sys/kernel/unprivileged_userns_clone"), Path("/proc/sys/user/max_user_namespaces"))


@dataclass(frozen=True, slots=True)
class Standing:
    """The privileges of this process on the machine."""

    rootless: bool
    ids: int  # how many there are, from 0 on


def standing() -> Standing:
    """Told from the id map: real root has all ids, mapped to themselves."""
    rows = [[int(field) for field in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    if os.geteuid() == 0 and rows == [[0, 0, _ALL]]:
        return Standing(False, _ALL)
    count = 0
    for inside, _, size in sorted(rows):
        if inside != count:
            break
        count += size
    return Standing(True, count)


def enter(runs: Path) -> None:
    """Become root of a user and mount namespace. Does nothing for root. Call it before there are threads.

    Sandboxes that outlived an earlier daemon, whose run directories are below `runs`, keep its user namespace alive: that one
    is entered again, so that they and their network are still ours.
    """
    if os.geteuid() == 0 or _enter_again(runs):
        return
    uid, gid = os.geteuid(), os.getegid()
    ranges = _subordinate("/etc/subuid", uid), _subordinate("/etc/subgid", uid)
    programs = binaries.system("newuidmap"), binaries.system("newgidmap")
    many = all(ranges) and all(programs)
    go, going = os.pipe()
    helper = os.fork() if many else -1
    if helper == 0:
        os.close(going)
        os._exit(_map_for(os.getppid(), go, programs, (uid, gid), ranges))
    try:
        _unshare()
    finally:
        os.close(go)
        os.close(going)  # the helper's sign to begin; it looks whether there is something to do
    if not many or os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1]) != 0:
        _map_one(uid, gid)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", b"/", None, _MS_REC_SLAVE, None) != 0:
        raise Unsupported(f"user namespaces have no rights here: {os.strerror(ctypes.get_errno())}", hint=_fix())


def _enter_again(runs: Path) -> bool:
    for file in runs.glob("*/pid"):
        with suppress(OSError, ValueError):
            inner = os.open(f"/proc/{int(file.read_text())}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            try:
                outer = fcntl.ioctl(inner, _NS_GET_PARENT)  # refused when it is no namespace below ours
                try:
                    if _own(outer) and _join(outer):
                        return True
                finally:
                    os.close(outer)
            finally:
                os.close(inner)
    return False


def _own(namespace: int) -> bool:
    """Made by this very user; the number of a process may have come to mean another one."""
    owner = array.array("I", [0])
    fcntl.ioctl(namespace, _NS_GET_OWNER_UID, owner)
    return owner[0] == os.geteuid()


def _join(namespace: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWUSER) != 0:
        return False
    if libc.unshare(_CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, _MS_REC_SLAVE, None) != 0:
        raise Unsupported(f"user namespaces have no rights here: {os.strerror(ctypes.get_errno())}", hint=_fix())
    return True


def _unshare() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) != 0:
        raise Unsupported(
            f"an ordinary user cannot make user namespaces here: {os.strerror(ctypes.get_errno())}", hint=_fix()
        )


def _map_for(
    daemon: int,
    go: int,
    programs: tuple[str | None, ...],
    own: tuple[int, int],
    ranges: tuple[list[tuple[int, int]], ...],
) -> int:
    """In the helper, which has stayed outside: only from there may the ids be given."""
    os.read(go, 1)
    for program, mine, given in zip(programs, own, ranges, strict=True):
        argv, inside = [str(program), str(daemon), "0", str(mine), "1"], 1
        for start, count in given:
            argv += [str(inside), str(start), str(count)]
            inside += count
        if subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True).returncode != 0:
            return 1
    return 0


def _map_one(uid: int, gid: int) -> None:
    """No subordinate ids: the user alone is root inside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        try:
            Path(f"/proc/self/{name}").write_text(text)
        except PermissionError as error:
            raise Unsupported(f"ids cannot be mapped: {name}: {error.strerror}", hint=_fix()) from None


def _subordinate(path: str, uid: int) -> list[tuple[int, int]]:
    """The user's ranges, by name or number."""
    names = {str(uid)}
    with suppress(KeyError):
        names.add(pwd.getpwuid(uid).pw_name)
    found = []
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.strip().split(":")
            if len(fields) == 3 and fields[0] in names and fields[1].isdigit() and fields[2].isdigit():
                found.append((int(fields[1]), int(fields[2])))
    return found


def _fix() -> str:
    """Return the commands an administrator would have to type."""
    with suppress(OSError):
        if APPARMOR_SWITCH.read_text().strip() == "1":
            return "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or run atoll as root"
    for switch in USERNS_SWITCHES:
        with suppress(OSError):
            if switch.read_text().strip() == "0":
                name = ".".join(switch.parts[3:])
                return f"sudo sysctl -w {name}={1 if 'clone' in name else 15000}, or run atoll as root"
    return "run atoll as root"
