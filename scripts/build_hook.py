"""Build hook of the wheel: compile the guest agent and the launcher and put them inside the package.

The wheel carries native programs, so it is tagged for this platform. Set ATOLL_SKIP_CARGO=1 to use programs that are
already in src/atoll/_bin (the Makefile does, after building them).
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAMS = {"guest": "atoll-guest", "launcher": "atoll-launch"}


class CargoHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        target = root / "src" / "atoll" / "_bin"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        if version == "editable":
            return
        if not os.environ.get("ATOLL_SKIP_CARGO"):
            build_programs(root, target)
        for program in PROGRAMS.values():
            if not (target / program).is_file():
                raise RuntimeError(f"{target / program} is missing: build it with `make binaries`")


def build_programs(root: Path, target: Path) -> None:
    if shutil.which("cargo") is None:
        raise RuntimeError("cargo is needed to build atoll from source: install Rust (https://rustup.rs) and try again")
    target.mkdir(parents=True, exist_ok=True)
    for crate, program in PROGRAMS.items():
        subprocess.run(["cargo", "build", "--release", "--locked"], cwd=root / crate, check=True)
        fresh = target / f".{program}.new"
        shutil.copy2(root / crate / "target" / "release" / program, fresh)
        fresh.replace(target / program)
