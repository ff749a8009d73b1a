#!/usr/bin/env python3
"""Build the client as one file: `k8e-sandbox-cli-<os>-<arch>`, which runs where there is a Python 3.11 or later.

    python scripts/build_standalone.py [--output DIR]

It is an archive with a first line that starts Python, with the client's modules and the packages it reads settings with. What it
cannot do without a compiled package (`login` needs cryptography) says so.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipapp
from pathlib import Path

from build_release import EPOCH, ROOT, client_tree

PACKAGES = ("pyyaml", "tomlkit")
SYSTEMS = {"Linux": "linux", "Darwin": "darwin", "Windows": "windows"}
MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--try", dest="tried", action="store_true", help="start the file that was built, and build nothing"
    )
    given = parser.parse_args()
    output: Path = given.output.resolve()
    if given.tried:
        return subprocess.run([sys.executable, str(output / name()), "version"], check=False).returncode
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="atoll-standalone-") as work:
        print(build(Path(work), output / name()))
    return 0


def name() -> str:
    """Return what the file for this machine is called."""
    system = SYSTEMS[platform.system()]
    return f"k8e-sandbox-cli-{system}-{MACHINES[platform.machine().lower()]}" + (".pyz" if system == "windows" else "")


def build(work: Path, target: Path) -> Path:
    """Make the file from the client's tree; the same tree gives the same bytes."""
    tree, stage = work / "tree", work / "stage"
    tree.mkdir()
    shutil.copytree(client_tree(tree) / "src" / "atoll", stage / "atoll", ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    locked = [line for package in PACKAGES for line in locked_lines(package)]
    (work / "lock").write_text("\n".join(locked) + "\n")
    subprocess.run([*command, "--require-hashes", "--target", str(stage), "-r", str(work / "lock")], check=True)
    for compiled in (*stage.rglob("*.so"), *stage.rglob("*.pyd"), *stage.rglob("*.dist-info"), *stage.rglob("bin")):
        shutil.rmtree(compiled) if compiled.is_dir() else compiled.unlink()
    shutil.copy(ROOT / "scripts" / "standalone_main.py", stage / "__main__.py")
    files = sorted(path for path in stage.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(stage).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    (stage / "digest").write_text(digest.hexdigest())
    for path in stage.rglob("*"):
        os.utime(path, (int(EPOCH), int(EPOCH)))
    zipapp.create_archive(stage, target, "/usr/bin/env python3", compressed=True)
    target.chmod(0o755)
    return target


def locked_lines(package: str) -> list[str]:
    """Return a package's lines of the lock file: its version and every hash it may have."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"{package}=="))
    last = next(number for number in range(first + 1, len(lines)) if not lines[number].strip().startswith("--hash"))
    return [*lines[first : last - 1], lines[last - 1].rstrip(" \\")]


if __name__ == "__main__":
    sys.exit(main())
