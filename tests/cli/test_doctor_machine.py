"""`atoll doctor` on machines made of files: what an ordinary user lacks is named, with the command that mends it."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from atoll.cli import doctor, doctor_machine
from atoll.cli.doctor_machine import (
    Machine,
    cgroups,
    delegation,
    firewall,
    id_ranges,
    kernel,
    lingering,
    user_namespaces,
)

USER, UID = "somebody", 1000
MANAGER = "user.slice/user-1000.slice/user@1000.service"
V2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "".join(
    f"4{n} 24 0:4{n} / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
    for n, name in enumerate(("cpu", "memory", "pids"))
)
PROGRAMS = {"usr/bin/newuidmap": "", "usr/bin/newgidmap": "", "usr/sbin/nft": "", "proc/net/netfilter/x": ""}
IDS = {"etc/subuid": "root:1:2\nsomebody:100000:65536\n", "etc/subgid": "1000:100000:65536\n"}


def machine(tree: Path, files: dict[str, str], uid: int = UID) -> Machine:
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    return Machine(str(tree), uid, USER, "6.8.0-31-generic")


def group(path: str, controllers: str, processes: str = "", *, ours: bool = True) -> dict[str, str]:
    """A control group of files; one without a list of processes is not ours to use."""
    found = {f"sys/fs/cgroup/{path}/cgroup.controllers": controllers}
    return {**found, f"sys/fs/cgroup/{path}/cgroup.procs": processes} if ours else found


def flagged(check: dict[str, Any], detail: str, fix: str) -> None:
    assert not check["ok"] and detail in check["detail"] and fix in check["fix"], check


@pytest.mark.parametrize(
    "name, value, fix",
    [
        ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces="),
        ("kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ],
)
def test_switches_against_user_namespaces(tmp_path: Path, name: str, value: str, fix: str) -> None:
    """Debian's, Ubuntu's and the kernel's own. The latter concerns root too."""
    found = machine(tmp_path, {f"proc/sys/{name}": f"{value}\n"})
    flagged(user_namespaces(found), "", fix)
    assert "optional" not in user_namespaces(found)
    assert user_namespaces(Machine(str(tmp_path), 0))["ok"] == (name != "user/max_user_namespaces")
    assert user_namespaces(machine(tmp_path / "good", {f"proc/sys/{name}": f"{1 - int(value)}\n"}))["ok"]


def test_ids(tmp_path: Path) -> None:
    """The programs, then a range in both files, under the name or the number. All are notes: one id is enough to run."""
    assert id_ranges(machine(tmp_path / "all", {**PROGRAMS, **IDS}))["ok"]
    without = {name: text for name, text in PROGRAMS.items() if "newuidmap" not in name}
    flagged(
        id_ranges(machine(tmp_path / "none", {**without, **IDS})),
        "newuidmap not found",
        "sudo apt-get install -y uidmap",
    )
    for missing in IDS:
        some = {name: text for name, text in IDS.items() if name != missing}
        check = id_ranges(machine(tmp_path / missing[-3:], {**PROGRAMS, **some}))
        flagged(check, f"/{missing} has no range for somebody", "usermod --add-subuids 100000-165535")
        assert check["optional"]


def test_delegation_on_v2(tmp_path: Path) -> None:
    """A terminal below the user's service manager has all it needs; a login session has nothing; cpu is often left out."""
    base = {"proc/self/mountinfo": V2, "sys/fs/cgroup/cgroup.controllers": "cpu memory pids io\n"}
    inside = {**base, "proc/self/cgroup": f"0::/{MANAGER}/app.slice/terminal.scope\n"}
    inside |= group(f"{MANAGER}/app.slice/terminal.scope", "memory pids", "4711\n")
    full = {**inside, **group(f"{MANAGER}/app.slice", "cpu memory pids")}
    assert delegation(machine(tmp_path / "full", full))["ok"]
    some = {**inside, **group(f"{MANAGER}/app.slice", "memory pids")}
    flagged(delegation(machine(tmp_path / "some", some)), "for cpu:", "Delegate=cpu cpuset io memory pids")
    session = {**base, "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-2.scope\n"}
    session |= group("user.slice/user-1000.slice/session-2.scope", "cpu memory pids", ours=False)
    check = delegation(machine(tmp_path / "session", session))
    flagged(check, "for cpu, memory, pids", "systemd-run --user --scope -p Delegate=yes atoll daemon start")
    assert check["optional"]


def test_delegation_on_v1(tmp_path: Path) -> None:
    """Nobody delegates v1; what was given all the same counts."""
    mine = {"proc/self/mountinfo": V1, "proc/self/cgroup": "3:cpu:/me\n2:memory:/me\n1:pids:/\n"}
    mine |= {f"sys/fs/cgroup/{name}/me/cgroup.procs": "" for name in ("cpu", "memory")}
    flagged(delegation(machine(tmp_path, mine)), "for pids:", "systemd.unified_cgroup_hierarchy=1")


def test_the_rest_of_the_machine(tmp_path: Path) -> None:
    """Kernel, hierarchies, firewall."""
    bare = machine(tmp_path / "bare", {})
    flagged(cgroups(bare), "no controllers", "mount the memory")
    flagged(firewall(bare), "nft is missing", "sudo apt-get install -y nftables")
    full = machine(tmp_path / "full", {**PROGRAMS, "sys/fs/cgroup/cgroup.controllers": "cpu"})
    assert cgroups(full)["detail"] == "v2" and firewall(full)["ok"] and kernel(full)["ok"]
    flagged(kernel(Machine(str(tmp_path), 0, "root", "4.19.0")), "4.19", "5.12")
    assert Machine().read("/proc/self/comm") and Machine().uid == os.geteuid()  # by default, the real one


def test_distro_10_no_runtime_is_one_problem_with_the_fix_of_the_usual_one() -> None:
    rows = [
        {"name": "gvisor", "works": False, "why": "runsc is missing", "fix": "install runsc"},
        {"name": "container", "works": False, "optional": False, "why": "runc is missing", "fix": "install runc"},
        {"name": "microvm", "works": False, "why": "no KVM"},
    ]
    told = doctor._runtimes(rows)
    problems = [row for row in told if not row["ok"] and not row.get("optional")]
    assert [(row["name"], row["fix"]) for row in problems] == [("runtimes", "install runc")]
    assert "runc is missing" in problems[0]["detail"] and len(told) == 4


def test_distro_8_disk_is_ok_only_if_a_default_sandbox_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, ok in ((4352 << 20, True), (3 << 30, False)):
        monkeypatch.setattr(
            doctor_machine.shutil, "disk_usage", lambda place, free=free: shutil._ntuple_diskusage(free, 0, free)
        )
        found = doctor_machine.disk()
        assert found["ok"] is ok and ("needs 4352" in found["detail"]) is not ok


def test_distro_9_the_daemon_that_serves_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its control groups count, not those of the shell that asks."""
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    (tmp_path / "held-limits").write_text("cpu memory pids\n")
    assert (
        delegation(Machine(uid=1000, user="somebody"))["detail"]
        == "the daemon has control groups for cpu, memory, pids"
    )


def test_who_does_not_linger_is_told(tmp_path: Path) -> None:
    """Without lingering systemd ends a user's daemon at the last logout. Where systemd manages nobody there is nothing to say."""
    assert lingering(machine(tmp_path / "other", {})) == []
    leaving = lingering(machine(tmp_path / "leaving", {"run/systemd/system/x": ""}))
    flagged(leaving[0], "when you log out", f"loginctl enable-linger {USER}")
    assert leaving[0]["optional"] is True
    staying = machine(tmp_path / "staying", {"run/systemd/system/x": "", f"var/lib/systemd/linger/{USER}": ""})
    assert lingering(staying)[0]["ok"]
