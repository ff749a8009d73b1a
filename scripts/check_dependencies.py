"""Check what atoll is built from, without a network: where it comes from, that it is pinned, and its licences.

scripts/check_dependencies.py            Rust crates of both programs, Python packages of requirements.lock
scripts/check_dependencies.py --audit    also asks for known vulnerabilities: `pip-audit` and `cargo audit`, where installed
"""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("guest", "launcher")
CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"
GOOD = re.compile(
    r"\b(MIT|MIT-0|Apache|0BSD|BSD|ISC|Unlicense|Zlib|PSF|Python Software Foundation|MPL|Mozilla)\b", re.I
)
SAID_ELSEWHERE = {"protobuf-py-ext": "Apache-2.0"}  # by protobuf-py, whose native part it is
# Under the LGPL: only in the extra `kubernetes`, imported as it is and never part of a release of ours.
ONLY_USED = {"psycopg", "psycopg-binary"}
TWICE: set[str] = set()  # crates that may be there in two versions


def check_crates(program: str) -> Iterator[str]:
    """Yield what is wrong with the crates of one program: another source, no checksum, two versions, a licence."""
    locked = tomllib.loads((ROOT / program / "Cargo.lock").read_text())["package"]
    for crate in locked:
        if "source" in crate and (crate["source"] != CRATES_IO or not crate.get("checksum")):
            yield f"{program}: {crate['name']} does not come from crates.io with a checksum"
    argv = ["cargo", "metadata", "--locked", "--offline", "--format-version", "1", "--filter-platform", _host()]
    done = subprocess.run(argv, cwd=ROOT / program, capture_output=True, text=True, check=True)
    known = json.loads(done.stdout)
    used = {node["id"] for node in known["resolve"]["nodes"]}
    packages = [package for package in known["packages"] if package["id"] in used]
    for package in packages:
        if not GOOD.search(package["license"] or ""):
            yield f"{program}: the licence of {package['name']} is {package['license']!r}"
    for name, count in Counter(package["name"] for package in packages).items():
        if count > 1 and name not in TWICE:
            yield f"{program}: {count} versions of {name}"


def check_packages() -> Iterator[str]:
    """Yield what is wrong with requirements.lock: no version, no hash, another version installed, a licence, another one for users."""
    entries = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / "requirements.lock").read_text())
    versions = dict(re.findall(r"^([a-z0-9-]+)==([^\s;\\]+)", "\n".join(entries), re.M))
    for name, version in re.findall(r"^([a-z0-9-]+)==([^\s;\\]+)", (ROOT / "requirements-run.lock").read_text(), re.M):
        if versions.get(name, version) != version:
            yield f"requirements-run.lock: {name} {version}, but {versions[name]} is tested; run `make lock`"
    for entry in entries:
        found = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", entry)
        if found is None or "--hash=sha256:" not in entry:
            yield f"requirements.lock: {entry[:40]!r} has no version or no hash"
            continue
        try:
            installed = importlib.metadata.distribution(found[1])
        except importlib.metadata.PackageNotFoundError:
            continue  # for another machine
        if installed.version != found[2]:
            yield f"{found[1]} {installed.version} is installed, {found[2]} is locked; run `make setup`"
        licence = _licence(installed) or SAID_ELSEWHERE.get(found[1], "")
        if not GOOD.search(licence) and found[1] not in ONLY_USED:
            yield f"the licence of {found[1]} is {licence[:60]!r}"


def _licence(package: importlib.metadata.Distribution) -> str:
    about = package.metadata.json
    classes = [line for line in about.get("classifier", []) if line.startswith("License")]
    return str(about.get("license_expression") or " ".join(classes) or about.get("license") or "")


def _host() -> str:
    told = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    return next(line.split()[1] for line in told.splitlines() if line.startswith("host:"))


def audit() -> int:
    """Ask for known vulnerabilities with the tools that are here; return how many of them found some."""
    asked = [["pip-audit", "--disable-pip", "--require-hashes", "-r", "requirements.lock"]]
    asked += [["cargo-audit", "audit", "--file", f"{program}/Cargo.lock"] for program in PROGRAMS]
    failed = 0
    for argv in asked:
        if shutil.which(argv[0]) is None:
            print(f"not asked: {argv[0]} is not installed", file=sys.stderr)
        else:
            failed += subprocess.run(argv, cwd=ROOT).returncode != 0
    return failed


def main() -> int:
    wrong = [*check_packages(), *(line for program in PROGRAMS for line in check_crates(program))]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong or ("--audit" in sys.argv and audit()) else 0


if __name__ == "__main__":
    sys.exit(main())
