"""`atoll doctor`: what works on this machine, what does not, why, and the command that fixes it.

Runtimes are judged by the daemon, which really starts a sandbox with each; the rest is looked at from here.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from ..client import calls
from ..errors import AtollError
from .output import print_json, safe, tell, write
from .session import open_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .grammar import Arguments

LOW_DISK = 2 * 1024**3
OLDEST_KERNEL = (5, 12)  # idmapped mounts
INSTALL = "apt-get install -y"


def doctor(arguments: Arguments) -> int:
    checks = [*_machine(), *_through_daemon(arguments)]
    problems = _count(checks)
    if arguments.json:
        print_json({"ok": not problems, "problems": problems, "fixed": 0, "checks": checks})
    else:
        _tell_all(checks, problems)
    return 1 if problems else 0


def sandbox_doctor(arguments: Arguments) -> int:
    """K8E's doctor: the connection and the skill, and this machine too where the daemon is local."""
    from .connection_checks import connection_checks, repair
    from .tables import for_people

    checks, local = connection_checks(arguments)
    if local:
        checks += [*_machine(), *_through_daemon(arguments)]
    fixed = repair(checks, really=arguments.fix)
    problems = _count(checks)
    if for_people(arguments):
        _tell_all(checks, problems)
    else:
        print_json({"ok": not problems, "problems": problems, "fixed": fixed, "checks": checks})
    return 1 if problems else 0


def _machine() -> list[dict[str, Any]]:
    return [_kernel(), _cgroups(), _user_namespaces(), _idmaps(), *_programs(), _firewall(), _disk()]


def _count(checks: list[dict[str, Any]]) -> int:
    return sum(1 for check in checks if not check["ok"] and not check.get("optional"))


def _tell_all(checks: list[dict[str, Any]], problems: int) -> None:
    from .tables import coloured

    for check in checks:
        mark = "ok" if check["ok"] else "note" if check.get("optional") else "FAIL"
        text = safe(f"  {check['name'].ljust(19)} {check['detail']}\n")
        write(1, (coloured(mark.ljust(4), mark) + text).encode("utf-8", "replace"))
        if check.get("fix"):
            tell(f"      {' ' * 19} fix: {check['fix']}")
    tell("\nEverything needed works." if not problems else f"\n{problems} problem(s).")


def _check(name: str, ok: bool, detail: str, fix: str = "", *, optional: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "ok": ok, "detail": detail}
    if fix and not ok:
        found["fix"] = fix
    if optional:
        found["optional"] = True
    return found


def _kernel() -> dict[str, Any]:
    release = os.uname().release
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    return _check("kernel", numbers >= OLDEST_KERNEL, f"Linux {release}", "use a kernel of 5.12 or newer")


def _cgroups() -> dict[str, Any]:
    if os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        return _check("cgroups", True, "v2")
    found = [name for name in ("memory", "pids", "cpu") if os.path.isdir(f"/sys/fs/cgroup/{name}")]
    hybrid = ", hybrid" if os.path.isdir("/sys/fs/cgroup/unified") else ""
    fix = "mount the memory, pids and cpu controllers, or boot with systemd.unified_cgroup_hierarchy=1"
    return _check("cgroups", len(found) == 3, f"v1{hybrid}: {', '.join(found) or 'no controllers'}", fix)


def _user_namespaces() -> dict[str, Any]:
    limit = _read("/proc/sys/user/max_user_namespaces")
    if limit == "0":
        return _check("user namespaces", False, "switched off", "sysctl -w user.max_user_namespaces=15000")
    if os.geteuid() == 0:
        return _check("user namespaces", True, "allowed")
    if _read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        fix = "sysctl -w kernel.unprivileged_userns_clone=1"
        return _check("user namespaces", False, "not for ordinary users", fix)
    if _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        fix = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        return _check("user namespaces", False, "limited by AppArmor", fix)
    return _check("user namespaces", True, "allowed for ordinary users")


def _idmaps() -> dict[str, Any]:
    if os.geteuid() == 0:
        return _check("id ranges", True, "root maps any range")
    found = all(shutil.which(program) for program in ("newuidmap", "newgidmap"))
    return _check("id ranges", found, "newuidmap and newgidmap", f"{INSTALL} uidmap")


def _programs() -> list[dict[str, Any]]:
    engines = {name: _version(name) for name in ("runc", "crun")}
    installed = ", ".join(f"{name} {version}" for name, version in engines.items() if version)
    checks = [_check("container engine", bool(installed), installed or "neither runc nor crun", f"{INSTALL} runc")]
    runsc = _version("runsc")
    checks.append(_check("gvisor engine", bool(runsc), runsc or "runsc is missing", f"{INSTALL} runsc", optional=True))
    return checks


def _version(program: str) -> str:
    """The first line of what `program --version` says; empty when it is not there or does not run."""
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""
    words = said.stdout.split("\n")[0].split()
    return words[-1] if words else ""


def _firewall() -> dict[str, Any]:
    found = shutil.which("nft") or os.path.exists("/usr/sbin/nft")
    modules = os.path.exists("/proc/net/netfilter") or os.path.isdir("/proc/sys/net/netfilter")
    detail = "nft" if found else "nft is missing; sandboxes have no network, the rest works"
    return _check("nftables", bool(found) and modules, detail, f"{INSTALL} nftables", optional=True)


def _disk() -> dict[str, Any]:
    from ..client.spawn import home_directory

    home = home_directory()
    place = home
    while not os.path.exists(place):
        place = os.path.dirname(place)
    free = shutil.disk_usage(place).free
    return _check("disk", free > LOW_DISK, f"{free >> 20} MB free for {home}", "free some space, or move ATOLL_HOME")


def _through_daemon(arguments: Arguments) -> list[dict[str, Any]]:
    try:
        link = open_link(arguments)
        health = link.call(calls.get("/v1/health"))
        answer = link.call(calls.get("/v1/runtimes"))
        egress = link.call(calls.get("/v1/egress"))
    except AtollError as error:
        return [_check("daemon", False, error.message, error.hint or "atoll daemon start")]
    checks = [_check("daemon", True, f"pid {health.get('pid')}, version {health.get('version')}")]
    detail = "allow lists are enforced" if egress.get("works") else f"no network: {egress.get('why')}"
    checks.append(_check("egress", bool(egress.get("works")), detail, str(egress.get("fix") or ""), optional=True))
    runtimes = answer.get("runtimes") if isinstance(answer, dict) else answer
    working = any(item.get("works") for item in runtimes or [])
    for item in runtimes or []:
        detail = item.get("version") or "works" if item.get("works") else item.get("why") or "does not work"
        name, optional = f"runtime {item.get('name')}", item.get("name") != "container" and working
        checks.append(_check(name, bool(item.get("works")), str(detail), str(item.get("fix") or ""), optional=optional))
        if item.get("works") and item.get("warning"):
            checks.append(_check("version floor", False, str(item["warning"]), _floor_fix(item), optional=True))
    if not runtimes:
        checks.append(_check("runtimes", False, "the daemon knows none"))
    return checks


def _floor_fix(item: dict[str, Any]) -> str:
    from ..backends.local.floor import judge

    found = judge(str(item.get("engine", "")).partition("-")[0], str(item.get("version", "")))
    return found.fix if found else ""


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None
