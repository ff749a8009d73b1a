#!/usr/bin/env python3
"""Build what a release consists of, into dist/: two wheels with both programs, the client's wheel, the sdist, an SBOM, checksums.

    python scripts/build_release.py [--machine x86_64|aarch64]... [--output DIR]

The same revision gives the same bytes: paths of this machine are not in the programs, times are fixed. The programs of the other
machine need Debian's `gcc-aarch64-linux-gnu` (or `gcc-x86-64-linux-gnu`) and `rustup target add aarch64-unknown-linux-gnu`.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import tomlkit

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ("x86_64", "aarch64")
CRATES = {"guest": "atoll-guest", "launcher": "atoll-launch"}
# Parts that a machine without sandboxes has no use for; tests/install shows that the client imports none of it.
NOT_CLIENT = ("server", "core", "backends", "egress", "guest", "images", "_bin")
EPOCH = "1767225600"  # the time of every file in the archives


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", action="append", choices=MACHINES, help="default: both")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    machines = given.machine or list(MACHINES)
    output: Path = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("atoll-*"):
        old.unlink()
    for machine in machines:
        programs = build_programs(machine)
        hatch("wheel", ROOT, output, ATOLL_MACHINE=machine, ATOLL_PROGRAMS=str(programs))
    with tempfile.TemporaryDirectory(prefix="atoll-client-") as work:
        hatch("wheel", client_tree(Path(work)), output)
    hatch("sdist", ROOT, output)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (output / f"atoll-{version}.cdx.json").write_text(json.dumps(bill_of_materials(version), indent=1) + "\n")
    write_installer(version, write_checksums(output), output)
    return 0


def build_programs(machine: str) -> Path:
    """Compile both programs for a machine and return their directory."""
    triple = f"{machine}-unknown-linux-gnu"
    compiler = f"{machine.replace('_', '-')}-linux-gnu-gcc"
    linker = "cc" if os.uname().machine == machine else compiler
    if shutil.which(linker) is None:
        raise SystemExit(f"{linker} is missing: apt-get install gcc-{machine.replace('_', '-')}-linux-gnu")
    cargo = os.environ.get("CARGO_HOME") or os.path.expanduser("~/.cargo")
    flags = [
        *("-C", "target-feature=+crt-static", "-C", f"linker={linker}"),
        *(f"--remap-path-prefix={ROOT}=/atoll", f"--remap-path-prefix={cargo}=/cargo"),
    ]
    env = {**os.environ, "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags)}
    place = ROOT / "build" / "programs" / machine
    place.mkdir(parents=True, exist_ok=True)
    for crate, program in CRATES.items():
        print(f"compiling {program} for {machine}", file=sys.stderr)
        target = ROOT / "build" / "target" / crate
        command = [
            "cargo",
            "build",
            "--release",
            "--locked",
            "--quiet",
            "--target",
            triple,
            "--target-dir",
            str(target),
        ]
        subprocess.run([*command, "--bin", program], cwd=ROOT / crate, env=env, check=True)
        shutil.copy2(target / triple / "release" / program, place / program)
    return place


def client_tree(work: Path) -> Path:
    """A tree whose wheel is the client alone: pure Python, with the command as an entry point, which every system can start."""
    project = tomlkit.parse((ROOT / "pyproject.toml").read_text())
    table: Any = project
    table["project"]["scripts"]["atoll"] = "atoll.cli:main"
    wheel = table["tool"]["hatch"]["build"]["targets"]["wheel"]
    for name in [name for name in wheel["force-include"] if not name.startswith("sdk/")]:
        del wheel["force-include"][name]  # what sets a machine with sandboxes up
    for key in ("hooks", "shared-scripts"):
        del wheel[key]
    (work / "pyproject.toml").write_text(tomlkit.dumps(project))
    for name in ("README.md", "LICENSE"):
        shutil.copy2(ROOT / name, work / name)
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", work / "src", ignore=skipped)
    shutil.copytree(ROOT / "sdk" / "python", work / "sdk" / "python", ignore=skipped)
    for name in NOT_CLIENT:
        shutil.rmtree(work / "src" / "atoll" / name, ignore_errors=True)
    return work


def hatch(kind: str, tree: Path, output: Path, **env: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(output)]
    subprocess.run(command, cwd=tree, env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH, **env}, check=True)


def bill_of_materials(version: str) -> dict[str, Any]:
    """Return the bill of materials of the release as CycloneDX 1.5: every package of the lock files with version and hash."""
    parts = [
        _crate(crate, one)
        for crate in CRATES
        for one in tomllib.loads((ROOT / crate / "Cargo.lock").read_text())["package"]
    ]
    name = ""
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        word = line.split(";")[0].strip().rstrip("\\").strip()
        if "==" in word and not line.startswith((" ", "#")):
            name, number = word.split("==")
            parts.append({"type": "library", "name": name, "version": number, "purl": f"pkg:pypi/{name}@{number}"})
    distinct = {part["purl"]: part for part in parts if part}
    about = {
        "component": {"type": "application", "name": "atoll", "version": version, "purl": f"pkg:pypi/atoll@{version}"}
    }
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": about,
        "components": [distinct[key] for key in sorted(distinct)],
    }  # fmt: skip


def _crate(crate: str, package: dict[str, Any]) -> dict[str, Any]:
    if "source" not in package:
        return {}  # ours
    purl = f"pkg:cargo/{package['name']}@{package['version']}"
    hashes = [{"alg": "SHA-256", "content": package["checksum"]}] if "checksum" in package else []
    return {"type": "library", "name": package["name"], "version": package["version"], "purl": purl, "hashes": hashes}


def write_checksums(output: Path) -> dict[str, str]:
    """Write SHA256SUMS and return the sum of each file."""
    files = sorted(path for path in output.glob("atoll-*") if path.is_file())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]
    (output / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    for path, line in zip(files, lines, strict=True):
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {line}", file=sys.stderr)
    return {path.name: line.split()[0] for path, line in zip(files, lines, strict=True)}


def write_installer(version: str, sums: dict[str, str], output: Path) -> None:
    """Write the release's install.sh, which installs the wheels with these checksums alone."""
    wheels = [value for name, value in sums.items() if "manylinux" in name]
    blank = 'release="" release_sums=""\n'
    text = (ROOT / "install.sh").read_text()
    if text.count(blank) != 1:
        raise SystemExit("install.sh has no place for the release's checksums")
    (output / "install.sh").write_text(text.replace(blank, f'release="{version}" release_sums="{" ".join(wheels)}"\n'))
    (output / "install.sh").chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
