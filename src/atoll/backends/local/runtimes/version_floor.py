"""Versions of the programs below us, against a floor of known holes: one table.

Distributions mend old versions without changing their number, so being below the floor is a warning with the names of the
holes and whether our own set-up closes them; `security.version_floor = "refuse"` makes it a refusal.
"""

import re
from dataclasses import dataclass

Version = tuple[int, ...]

_NO_LINKS = "places to mount on are checked to be plain directories, and /dev is always fresh"
_OWN_TREE = "nobody else can change a sandbox's tree while it is put together, and root in it is nobody outside"
_NUMBERS = "ids are numbers we looked up, and commands are started by our agent"
_DESCRIPTORS = "the agent gets two descriptors and starts every command itself"


@dataclass(frozen=True, slots=True)
class Hole:
    """A known weakness and what of ours closes it; nothing: it is open."""

    name: str
    closed_by: str = ""


@dataclass(frozen=True, slots=True)
class Floor:
    """`mended`: the first good version of each branch that was mended; later branches are good."""

    mended: tuple[Version, ...]
    holes: tuple[Hole, ...]
    fix: str


FLOORS = {
    "runc": Floor(
        ((1, 3, 6), (1, 4, 3)),
        (
            Hole("CVE-2024-21626", _DESCRIPTORS),
            Hole("CVE-2025-31133", _OWN_TREE),
            Hole("CVE-2025-52565", _OWN_TREE),
            Hole("CVE-2025-52881", _OWN_TREE),
            Hole("CVE-2026-41579", _NO_LINKS),
        ),
        "install runc 1.3.6, 1.4.3 or later, or your distribution's security updates",
    ),
    "crun": Floor(
        ((1, 28),),
        (
            Hole("CVE-2026-30892", _NUMBERS),
            Hole("CVE-2026-47766", _NO_LINKS),
            Hole("CVE-2026-88264", _NO_LINKS),
            Hole("CVE-2026-88265", _NO_LINKS),
        ),
        "install crun 1.28 or later, or your distribution's security updates",
    ),
    "runsc": Floor(
        ((20240101,),),
        (Hole("gVisor builds of 2022, without the mends of later years"),),
        "install a build of gVisor of 2024 or later (scripts/install-runsc.sh)",
    ),
    "firecracker": Floor(((1, 14, 4), (1, 15, 1)), (Hole("CVE-2026-5747"),), "install Firecracker 1.15.1 or later"),
    "libkrun": Floor(((1, 18),), (Hole("CVE-2026-46695"),), "install libkrun 1.18 or later"),
    "linux": Floor(
        ((5, 19),),
        (Hole("overlays cannot lie on shifted layers"),),
        "use Linux 5.19 or later",
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A version below its floor, in words for a person."""

    program: str
    version: str
    warning: str
    fix: str
    open_holes: tuple[str, ...]


def judge(program: str, version: str) -> Finding | None:
    """None: good, or nothing is known about it."""
    floor, numbers = FLOORS.get(program), parse(program, version)
    if floor is None or not numbers or _is_good(numbers, floor.mended):
        return None
    still = tuple(hole.name for hole in floor.holes if not hole.closed_by)
    closed = [hole.name for hole in floor.holes if hole.closed_by]
    parts = [f"{program} {version} is older than the oldest without known holes"]
    if still:
        parts.append(f"open: {', '.join(still)}")
    if closed:
        reasons = dict.fromkeys(hole.closed_by for hole in floor.holes if hole.closed_by)
        parts.append(f"closed by our set-up: {', '.join(closed)} ({'; '.join(reasons)})")
    return Finding(program, version, "; ".join(parts), floor.fix, still)


def parse(program: str, version: str) -> Version:
    """The numbers of a version; gVisor's are dates. Empty when it is none."""
    if program == "runsc":
        date = re.search(r"20\d{6}", version)
        return (int(date.group()),) if date else ()
    found = re.match(r"\D{0,8}(\d+(?:\.\d+){0,3})", version)
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def _is_good(version: Version, mended: tuple[Version, ...]) -> bool:
    """At least the mended version of its own branch, or of a branch later than all of them."""
    for floor in mended:
        branch = floor[:-1]
        if branch and version[: len(branch)] == branch and version >= floor:
            return True
    newest = mended[-1]
    return version[: len(newest) - 1] > newest[:-1] if len(newest) > 1 else version >= newest
