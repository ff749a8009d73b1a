"""Build hook of the wheel: put the guest agent and the launcher inside the package.

The wheel carries native programs, so it is tagged for a platform. `pip install .` compiles them for this machine. A release
compiles them first and names their directory and machine: ATOLL_PROGRAMS, ATOLL_MACHINE (see `build_release.py`).
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAMS = {"guest": "atoll-guest", "launcher": "atoll-launch"}


class CargoHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        machine = os.environ.get("ATOLL_MACHINE") or platform.machine()
        build_data["pure_python"] = False
        # The programs are static: they need no C library of the machine, so either kind of system takes them.
        build_data["tag"] = f"py3-none-manylinux2014_{machine}.musllinux_1_1_{machine}"
        if version == "editable":
            return
        given = os.environ.get("ATOLL_PROGRAMS")
        place = Path(given) if given else root / "src" / "atoll" / "_bin"
        if not given:
            build_programs(root, place)
        for program in PROGRAMS.values():
            if not (place / program).is_file():
                raise RuntimeError(f"{place / program} is missing")
            build_data["force_include"][str(place / program)] = f"atoll/_bin/{program}"


def build_programs(root: Path, target: Path) -> None:
    """Compile both programs for this machine into a directory."""
    if shutil.which("cargo") is None:
        raise RuntimeError("cargo is needed to build atoll from source: install Rust (https://rustup.rs) and try again")
    target.mkdir(parents=True, exist_ok=True)
    for crate, program in PROGRAMS.items():
        subprocess.run(["cargo", "build", "--release", "--locked"], cwd=root / crate, check=True)
        fresh = target / f".{program}.new"
        shutil.copy2(root / crate / "target" / "release" / program, fresh)
        fresh.replace(target / program)
