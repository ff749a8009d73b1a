"""Results of a run, as plain values: written to and read from results.json, so that documents can be made again without a run."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench.measure import Contender, Goal, middle, worst_percent
from bench.programs import Unavailable, find


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One contender of a row. Without a p50, `excuse` says why."""

    name: str
    p50: float | None = None
    p99: float | None = None
    ratio: float | None = None  # to the row's baseline; of itself 1
    rounds: int = 0
    goal: str = ""
    met: bool | None = None
    failures: list[str] = []
    excuse: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    title: str
    unit: str
    figures: list[Figure]


class Results(msgspec.Struct, frozen=True, kw_only=True):
    at: str
    seconds: float
    quick: bool = False
    machine: dict[str, str]
    rows: list[Row]


def row_of(ident: str, title: str, unit: str, contenders: list[Contender], goals: Mapping[str, Goal]) -> Row:
    """The finished row. Without a baseline, or a figure of it, there are no ratios, and goals that need one stay open."""
    base = middle(contenders[0].figures) if len(contenders) > 1 and contenders[0].figures else None
    return Row(
        id=ident, title=title, unit=unit, figures=[_figure(c, unit, base, goals.get(c.name)) for c in contenders]
    )


def _figure(c: Contender, unit: str, base: float | None, goal: Goal | None) -> Figure:
    wanted = goal.text(unit) if goal else ""
    if not c.figures:
        return Figure(name=c.name, goal=wanted, met=False if goal else None, failures=c.failures, excuse=c.excuse)
    p50 = middle(c.figures)
    ratio = p50 / base if base else None
    met = None
    if goal is not None and (base is not None or goal.kind in ("most", "least")):
        met = not c.failures and goal.met(p50, base or 0.0)
    return Figure(
        name=c.name, p50=p50, p99=worst_percent(c.figures, unit), ratio=ratio, rounds=len(c.figures), goal=wanted,
        met=met, failures=c.failures,
    )  # fmt: skip


def machine(load: float) -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "system": _system(),
        "kernel": platform.release(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "load before the run": f"{load:.2f}",
        **{name: _version(argv) for name, argv in VERSIONS.items()},
    }


VERSIONS = {
    "Python": ["/usr/bin/python3", "--version"],
    "Node": ["node", "--version"],
    "runc": ["runc", "--version"],
    "runsc": ["runsc", "--version"],
    "bubblewrap": ["bwrap", "--version"],
    "podman": ["podman", "--version"],
    "firejail": ["firejail", "--version"],
    "systemd-nspawn": ["systemd-nspawn", "--version"],
}


def _version(argv: list[str]) -> str:
    try:
        said = subprocess.run([find(argv[0]), *argv[1:]], capture_output=True, text=True, timeout=30).stdout
    except (Unavailable, OSError, subprocess.TimeoutExpired):
        return "not installed"
    words = said.strip().splitlines()[0].split() if said.strip() else ["unknown"]
    numbers = [word for word in words if any(letter.isdigit() for letter in word)]
    return numbers[0].strip("()") if numbers else words[0]


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "Linux"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def save(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def load(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)
