"""What a user would pick instead, as contenders: the bare host, bubblewrap, `runc run`, `runsc run`."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
HOST_PYTHON = "/usr/bin/python3"


def bare(argv: list[str]) -> Callable[[], object]:
    return lambda: subprocess.run(argv, check=True, capture_output=True)


def find(program: str) -> str | None:
    return shutil.which(program, path=PATH)


def bubblewrap(argv: list[str]) -> Callable[[], object] | None:
    bwrap = find("bwrap")
    if bwrap is None:
        return None
    binds = ["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"]
    binds += ["--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return bare([bwrap, *binds, "--unshare-all", "--die-with-parent", "--", *argv])


class Bundle:
    """An OCI bundle on the machine's own /usr, for bare `runc run` and `runsc run` of one command."""

    def __init__(self, argv: list[str]) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="atoll-bench-"))
        rootfs = self.path / "rootfs"
        for name in ("usr", "proc", "dev", "sys", "tmp"):
            (rootfs / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (rootfs / name).symlink_to(f"usr/{name}")
        subprocess.run([find("runc") or "runc", "spec"], cwd=self.path, check=True)
        config = json.loads((self.path / "config.json").read_text())
        config["process"]["terminal"] = False
        config["process"]["args"] = argv
        config["mounts"].append(
            {"destination": "/usr", "source": "/usr", "type": "bind", "options": ["bind", "ro", "nosuid"]}
        )
        (self.path / "config.json").write_text(json.dumps(config))
        self._count = 0

    def run(self, engine: list[str]) -> Callable[[], object]:
        def once() -> object:
            self._count += 1
            name = f"atoll-bench-{os.getpid()}-{self._count}"
            return subprocess.run(
                [*engine, "run", "--bundle", str(self.path), name],
                check=True,
                capture_output=True,
                stdin=subprocess.DEVNULL,
            )

        return once

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def runc() -> list[str] | None:
    found = find("runc")
    return [found] if found else None


def runsc() -> list[str] | None:
    found = find("runsc")
    if found is None:
        return None
    old = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    platform = "ptrace" if "2022" in old else "systrap"
    return [found, f"--platform={platform}", "--network=none", "--ignore-cgroups"]
