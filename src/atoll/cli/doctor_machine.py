"""Checks of `atoll doctor` on the machine itself: kernel, control groups, user namespaces, ids, programs, disk.

Everything is read below one root directory, so that a test can show it a machine that is not there. The checks of hardening
(what one sandbox could learn of another through shared hardware) are in `doctor_hardening.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NotRequired, TypedDict

    class Check(TypedDict):
        """One finding. `fix` says what to do about it; `optional`: sandboxes work without it."""

        name: str
        ok: bool
        detail: str
        fix: NotRequired[str]
        optional: NotRequired[bool]
        _packages: NotRequired[list[str]]  # Debian's names of the packages that mend it
        _run: NotRequired[str]  # the command by which `doctor --fix` mends it
        _repair: NotRequired[list[str]]  # the agents whose skill files are missing


LOW_DISK = 4352 << 20  # what a sandbox of the default size needs: its disk, and the reserve of the host
OLDEST_KERNEL = (5, 12)  # idmapped mounts
CONTROLLERS = ("cpu", "memory", "pids")
_DELEGATE_MORE = (
    "sudo mkdir -p /etc/systemd/system/user@.service.d && printf '[Service]\\nDelegate=cpu cpuset io memory pids\\n' | "
    "sudo tee /etc/systemd/system/user@.service.d/delegate.conf && sudo systemctl daemon-reload, then log in anew"
)


class Machine:
    """A machine, seen by one of its users."""

    def __init__(self, root: str = "/", uid: int | None = None, user: str = "", release: str = "") -> None:
        self.root = root
        self.uid = os.geteuid() if uid is None else uid
        self.user = user or _name_of(self.uid)
        self.release = release or os.uname().release

    def path(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))

    def read(self, path: str) -> str | None:
        try:
            with open(self.path(path), encoding="utf-8", errors="replace") as file:
                return file.read().strip()
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        return os.path.exists(self.path(path))

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def program(self, name: str) -> str | None:
        if self.root != "/":
            places = (f"/{top}/{name}" for top in ("usr/bin", "usr/sbin", "bin", "sbin", "usr/local/bin"))
            return next((place for place in places if self.exists(place)), None)
        return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")

    def sudo(self, command: str) -> str:
        """The command as this user has to type it."""
        return command if self.uid == 0 else f"sudo {command}"


def check(name: str, ok: bool, detail: str, fix: str = "", *, optional: bool = False, run: bool = False) -> Check:
    """Return a row. With `run` the advice is a command, and `doctor --fix` may carry it out."""
    found: Check = {"name": name, "ok": ok, "detail": detail}
    if fix and not ok:
        found["fix"] = fix
        if run:
            found["_run"] = fix
    if optional:
        found["optional"] = True
    return found


def lacking(machine: Machine, name: str, ok: bool, detail: str, package: str, *, optional: bool = True) -> Check:
    """Return a row that a package of the distribution mends."""
    from .doctor_packages import install

    found = check(name, ok, detail, install(machine, [package]), optional=optional)
    if not ok and package:
        found["_packages"] = [package]
    return found


def machine_checks(machine: Machine, *, served: bool = False) -> list[Check]:
    """Look at the machine. `served`: a daemon answers, and what it holds counts, not what this session could."""
    from .doctor_hardening import hardening_checks

    checks = [kernel(machine), cgroups(machine), user_namespaces(machine)]
    if machine.uid != 0:
        checks += [delegation(machine, served=served), *lingering(machine), id_ranges(machine)]
    return [*checks, *programs(machine), firewall(machine), disk(), *hardening_checks(machine)]


def kernel(machine: Machine) -> Check:
    numbers = tuple(int(part) for part in machine.release.split("-")[0].split(".")[:2] if part.isdigit())
    return check("kernel", numbers >= OLDEST_KERNEL, f"Linux {machine.release}", "use a kernel of 5.12 or newer")


def cgroups(machine: Machine) -> Check:
    if machine.exists("/sys/fs/cgroup/cgroup.controllers"):
        return check("cgroups", True, "v2")
    found = [name for name in ("memory", "pids", "cpu") if machine.exists(f"/sys/fs/cgroup/{name}")]
    hybrid = ", hybrid" if machine.exists("/sys/fs/cgroup/unified") else ""
    fix = "mount the memory, pids and cpu controllers, or boot with systemd.unified_cgroup_hierarchy=1"
    return check("cgroups", len(found) == 3, f"v1{hybrid}: {', '.join(found) or 'no controllers'}", fix)


def delegation(machine: Machine, *, served: bool = False) -> Check:
    """Report the limits of an ordinary user's sandboxes, from the running daemon or from the control group a new one starts in."""
    from pathlib import Path

    from ..backends.local.kernel.cgroups import Hierarchies
    from ..backends.local.kernel.delegation import START, remembered
    from ..client.spawn import home_directory

    ours = remembered(Path(home_directory())) if machine.root == "/" else []
    if set(ours) == set(CONTROLLERS):
        return check("delegation", True, f"the daemon has control groups for {', '.join(CONTROLLERS)}", optional=True)
    mounts = Hierarchies.detect(machine.path("/proc/self/mountinfo"), Path(machine.root))
    given = mounts.delegated(machine.path("/proc/self/cgroup"))
    held = ours if served else [name for name in CONTROLLERS if given.holder(name)]
    missing = [name for name in CONTROLLERS if name not in held]
    if not missing:
        return check("delegation", True, f"control groups for {', '.join(held)} are yours", optional=True)
    detail = f"no control group of yours for {', '.join(missing)}: sandboxes work, but those limits are not held"
    if not machine.exists("/sys/fs/cgroup/cgroup.controllers"):
        fix = "boot with systemd.unified_cgroup_hierarchy=1, or run the daemon as root: v1 is not delegated to users"
    else:
        fix = _DELEGATE_MORE if held else f"atoll daemon stop; {START}" if served else START
    return check("delegation", False, detail, fix, optional=True, run=fix.endswith(START))


def lingering(machine: Machine) -> list[Check]:
    """Whether what an ordinary user's daemon runs outlives the last logout. Nothing to say where no systemd manages users."""
    if not machine.exists("/run/systemd/system"):
        return []
    if machine.exists(f"/var/lib/systemd/linger/{machine.user}"):
        return [check("lingering", True, "the daemon and its sandboxes go on when you log out", optional=True)]
    detail = "the daemon and all sandboxes end when you log out for the last time; files of kept ones stay"
    return [check("lingering", False, detail, f"loginctl enable-linger {machine.user}", optional=True, run=True)]


def user_namespaces(machine: Machine) -> Check:
    name = "user namespaces"
    if machine.read("/proc/sys/user/max_user_namespaces") == "0":
        return check(name, False, "switched off", machine.sudo("sysctl -w user.max_user_namespaces=15000"), run=True)
    if machine.uid == 0:
        return check(name, True, "allowed")
    if machine.read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return check(
            name, False, "not for ordinary users", "sudo sysctl -w kernel.unprivileged_userns_clone=1", run=True
        )
    if machine.read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        detail = "limited by AppArmor, as Ubuntu does since 23.10: ordinary users get namespaces without rights"
        return check(name, False, detail, "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0", run=True)
    return check(name, True, "allowed for ordinary users")


def id_ranges(machine: Machine) -> Check:
    """Without them there is one id inside: root. Programs that want another user then fail."""
    less = "sandboxes work with one id, so that nothing inside can become another user"
    missing = [program for program in ("newuidmap", "newgidmap") if not machine.program(program)]
    if missing:
        detail = f"{' and '.join(missing)} not found: {less}"
        return lacking(machine, "id ranges", False, detail, "uidmap")
    owners = {machine.user, str(machine.uid)}
    for file in ("/etc/subuid", "/etc/subgid"):
        lines = (machine.read(file) or "").splitlines()
        if not any(line.split(":")[0] in owners for line in lines):
            fix = f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {machine.user}"
            return check(
                "id ranges", False, f"{file} has no range for {machine.user}: {less}", fix, optional=True, run=True
            )
    return check("id ranges", True, "newuidmap, newgidmap and subordinate ids", optional=True)


def programs(machine: Machine) -> list[Check]:
    """The engines of each runtime, those that a machine needs first."""
    from ..backends import registry

    checks = []
    for kind in sorted(registry.classes(), key=lambda kind: kind.optional):
        found = {name: version(name) for name in kind.programs()}
        installed = ", ".join(f"{name} {number}" for name, number in found.items() if number)
        missing = f"neither {' nor '.join(found)}" if len(found) > 1 else f"{''.join(found)} is missing"
        name = f"{kind.name} engine"
        row = lacking(machine, name, bool(installed), installed or missing, kind.package, optional=kind.optional)
        if not installed and (script := _setup_script(kind.installer)):
            row["fix"] = row["_run"] = script
            row.pop("_packages", None)
        if not installed and not kind.automatic:  # only a person who wants it by name should install it
            row["fix"] = kind.fix
            row.pop("_run", None)
            row.pop("_packages", None)
        checks.append(row)
    return checks


def _setup_script(name: str) -> str:
    """Return the command that runs a script of ours which installs an engine; empty where there is none."""
    import atoll

    package = os.path.dirname(os.path.abspath(atoll.__file__))
    places = (os.path.join(package, "setup", name), os.path.join(package, "../../scripts", name))
    found = next((os.path.normpath(place) for place in places if name and os.path.exists(place)), "")
    return f"bash {found}" if found else ""


def version(program: str) -> str:
    """The last word of the first line of what `program --version` says; empty when it is not there or does not run."""
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""
    words = said.stdout.split("\n")[0].split()
    return words[-1] if words else ""


def firewall(machine: Machine) -> Check:
    found = machine.program("nft")
    modules = machine.exists("/proc/net/netfilter") or machine.exists("/proc/sys/net/netfilter")
    detail = "nft" if found else "nft is missing; sandboxes have no network, the rest works"
    if found:
        return check("nftables", modules, detail, "use a kernel with nftables (CONFIG_NF_TABLES)", optional=True)
    return lacking(machine, "nftables", False, detail, "nftables")


def disk() -> Check:
    from ..client.spawn import home_directory

    home = home_directory()
    place = home
    while not os.path.exists(place):
        place = os.path.dirname(place)
    free = shutil.disk_usage(place).free
    detail = f"{free >> 20} MB free for {home}"
    if free >= LOW_DISK:
        return check("disk", True, detail)
    fix = "free some space, move ATOLL_HOME, or ask for smaller disks: --disk MB"
    return check("disk", False, f"{detail}; a sandbox of the default size needs {LOW_DISK >> 20}", fix)


def _name_of(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
