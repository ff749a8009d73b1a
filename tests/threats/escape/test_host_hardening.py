"""ESC-15: what sandboxes could learn of each other through memory and processor. `doctor` names each wrong setting.

The machines are made of files; the last test asks the real one.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from lab.sandboxes import Lab

from atoll.cli.doctor_hardening import hardening_checks
from atoll.cli.doctor_machine import Machine

CPU = "sys/devices/system/cpu"
SWAPS = "Filename\tType\tSize\tUsed\tPriority\n"
GOOD = {
    "sys/kernel/mm/ksm/run": "0\n",
    "proc/swaps": SWAPS,
    "proc/cmdline": "quiet ro\n",
    f"{CPU}/smt/active": "0\n",
    f"{CPU}/vulnerabilities/meltdown": "Mitigation: PTI\n",
    f"{CPU}/vulnerabilities/l1tf": "Not affected\n",
}
WRONG = {
    "merged memory": ({"sys/kernel/mm/ksm/run": "1\n"}, "memory merging", "KSM", "echo 2"),
    "swap on a partition": (
        {"proc/swaps": f"{SWAPS}/dev/sda2 partition 100 0 -2\n"},
        "swap",
        "/dev/sda2",
        "swapoff -a",
    ),
    "swap in a file": ({"proc/swaps": f"{SWAPS}/swapfile file 100 0 -2\n"}, "swap", "/swapfile", "swapoff -a"),
    "plain volume": (
        {
            "proc/swaps": f"{SWAPS}/dev/mapper/vg-swap partition 9 0 -2\n",
            "sys/block/dm-3/dm/name": "vg-swap",
            "sys/block/dm-3/dm/uuid": "LVM-x",
        },
        "swap",
        "vg-swap",
        "swapoff -a",
    ),
    "threads": ({f"{CPU}/smt/active": "1\n"}, "core sharing", "SMT", "smt/control"),
    "open hole": ({f"{CPU}/vulnerabilities/mds": "Vulnerable: no microcode\n"}, "processor", "open: mds", "microcode"),
    "open with threads": (
        {f"{CPU}/vulnerabilities/mds": "Mitigation: Clear CPU buffers; SMT vulnerable\n"},
        "processor",
        "while cores are shared: mds",
        "smt/control",
    ),
    "switched off": ({"proc/cmdline": "quiet mitigations=off\n"}, "processor", "switched off", "mitigations=off"),
}
FINE = {
    "encrypted": {
        "proc/swaps": f"{SWAPS}/dev/dm-1 partition 9 0 -2\n",
        "sys/block/dm-1/dm/uuid": "CRYPT-PLAIN-swap",
    },
    "encrypted by name": {
        "proc/swaps": f"{SWAPS}/dev/mapper/swap partition 9 0 -2\n",
        "sys/block/dm-1/dm/name": "swap",
        "sys/block/dm-1/dm/uuid": "CRYPT-LUKS2-x",
    },
    "in memory": {"proc/swaps": f"{SWAPS}/dev/zram0 partition 9 0 -2\n"},
}


def seen(tree: Path, files: dict[str, str], uid: int = 0) -> dict[str, dict[str, Any]]:
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    return {check["name"]: check for check in hardening_checks(Machine(str(tree), uid, "somebody", "6.12.0"))}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_setting_is_flagged(tmp_path: Path, name: str) -> None:
    """It is a note that says what could leak and how to mend it; nothing else is flagged."""
    files, check, detail, fix = WRONG[name]
    for uid in (0, 1000):
        found = seen(tmp_path / str(uid), {**GOOD, **files}, uid)
        assert [row for row, item in found.items() if not item["ok"]] == [check], found
        assert detail in found[check]["detail"] and fix in found[check]["fix"] and found[check]["optional"]
        assert (
            uid == 0
            or "microcode" in found[check]["fix"]
            or "boot" in found[check]["fix"]
            or "sudo" in found[check]["fix"]
        )


@pytest.mark.parametrize("name", FINE)
def test_what_is_safe_is_not_flagged(tmp_path: Path, name: str) -> None:
    """Swap that is encrypted, or is memory itself."""
    assert all(item["ok"] for item in seen(tmp_path, {**GOOD, **FINE[name]}).values())


def test_an_old_kernel_is_below_the_floor(tmp_path: Path) -> None:
    found = hardening_checks(Machine(str(tmp_path), 0, "root", "5.15.0-100-generic"))
    assert [item for item in found if item["name"] == "version floor" and "5.15" in item["detail"]]


def test_the_real_machine_is_judged_by_its_own_files(lab: Lab) -> None:
    """`doctor --json` has every row, and says what this machine's files say."""
    checks = {check["name"]: check for check in json.loads(lab.cli("doctor", "--json").stdout)["checks"]}
    assert {"memory merging", "swap", "core sharing", "processor"} <= set(checks)
    smt = Path(f"/{CPU}/smt/active")
    assert checks["core sharing"]["ok"] == (not smt.exists() or smt.read_text().strip() != "1")
    said = [path.read_text() for path in Path(f"/{CPU}/vulnerabilities").glob("*")]
    if said:
        worst = any(text.startswith("Vulnerable") or "SMT vulnerable" in text for text in said)
        assert checks["processor"]["ok"] != (worst or "mitigations=off" in Path("/proc/cmdline").read_text().split())
