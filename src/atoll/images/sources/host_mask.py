"""A layer over the machine's /usr that hides what a sandbox must not see.

Root inside a sandbox owns the mapped view of /usr, so a file there that only root may read would be readable. The mask
has a deletion mark for every such file and directory, and for the marker that keeps pip from installing. It also has a
`python` where the machine has only a `python3`, as Debian does, and a program in front of apt, which cannot work
without the machine's package database, that says what to use instead.

Finding them means looking at every file of /usr, about a second. The answer is kept with the change stamps of every
directory, and looking at those alone takes some 40 ms. A `chmod` of a file changes no directory, so the answer is also
given up after an hour.
"""

import hashlib
import json
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from atoll.images.layers.tree import OverlayFlavour, remove_tree, sync_tree, write_atomically

_VERSION = 3
_MAX_AGE_SECONDS = 3600
_PIP_MARKER = "EXTERNALLY-MANAGED"
OTHER_NAMES = {"python": "python3"}  # programs of /usr/bin that have a second name inside
_PACKAGE_TOOLS = ("apt", "apt-get")
_IN_FRONT = "local/sbin"  # the first place of the PATH
_NO_PACKAGES = """\
#!/bin/sh
echo "${0##*/}: the image 'host' has this machine's programs but not its package database, so nothing can be installed \
with ${0##*/}." >&2
echo "Use pip, npm, cargo or another language's tool here, or start from an image with packages of its own:" >&2
echo "  atoll sandbox create --image debian:12" >&2
exit 100
"""


@dataclass(frozen=True, slots=True)
class _Scan:
    hidden: tuple[str, ...]  # relative to /usr
    stamps: dict[str, int]  # every visible directory and when it last changed


def build_mask(cache: Path, usr: Path, flavour: OverlayFlavour) -> Path:
    """The mask for the present state of /usr, made if needed."""
    index = cache / "usr-scan.json"
    known = _load(index, usr)
    if known is not None and (cache / known).is_dir():
        return cache / known
    scan = _scan(usr)
    every_directory = _needs_every_directory(usr)
    shape = sorted(scan.stamps) if every_directory else []
    links, tools = other_names(usr), _tools_to_stand_before(usr, scan)
    key = json.dumps([_VERSION, flavour.prefix, scan.hidden, shape, links, tools, _NO_PACKAGES])
    name = f"usr-mask-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    if not (cache / name).is_dir():
        _make(cache, name, usr, scan, links, tools, flavour, every_directory)
    _save(index, usr, name, scan)
    return cache / name


def other_names(usr: Path) -> dict[str, str]:
    """Return the paths of second names that programs of /usr/bin get, each with the program it leads to."""
    return {
        f"bin/{name}": program
        for name, program in OTHER_NAMES.items()
        if (usr / "bin" / program).exists() and not os.path.lexists(usr / "bin" / name)
    }


def _needs_every_directory(usr: Path) -> bool:
    """In a user namespace that does not map the owner of /usr, nothing can be made in directories that are not ours:
    the mask then brings them all along, owned by us."""
    return os.stat(usr).st_uid != 0 or os.geteuid() != 0


def _tools_to_stand_before(usr: Path, scan: _Scan) -> list[str]:
    """The package tools the machine has, where nothing of its own stands before them."""
    place = usr / _IN_FRONT
    if _IN_FRONT not in scan.stamps:
        return []
    return [tool for tool in _PACKAGE_TOOLS if (usr / "bin" / tool).exists() and not os.path.lexists(place / tool)]


def _scan(usr: Path) -> _Scan:
    hidden: list[str] = []
    stamps: dict[str, int] = {}
    top, pending = str(usr), [""]
    while pending:
        directory = pending.pop()
        start = f"{directory}/" if directory else ""
        try:
            stamps[directory] = os.stat(f"{top}/{directory}").st_ctime_ns
            with os.scandir(f"{top}/{directory}") as entries:
                for entry in entries:
                    if entry.is_symlink():  # known without asking, and hidden by its name alone
                        mode = stat.S_IFLNK
                    else:
                        mode = entry.stat(follow_symlinks=False).st_mode
                        if mode & 0o170004 == 0o100004 and entry.name != _PIP_MARKER:
                            continue  # a file that everybody may read, as nearly all are
                    if _is_hidden(entry.name, mode):
                        hidden.append(start + entry.name)
                    elif stat.S_ISDIR(mode):
                        pending.append(start + entry.name)
        except FileNotFoundError:
            # Packages are being installed right now: a stamp that never matches makes the next call look again.
            stamps[directory] = 0
    return _Scan(tuple(sorted(hidden)), stamps)


def _is_hidden(name: str, mode: int) -> bool:
    if name == _PIP_MARKER:
        return True
    if stat.S_ISLNK(mode):
        return False
    if stat.S_ISDIR(mode):
        return mode & 0o005 != 0o005
    return not stat.S_ISREG(mode) or mode & 0o004 == 0


def _load(index: Path, usr: Path) -> str | None:
    """The name of the mask, if nothing it was made from has changed."""
    try:
        with index.open("rb") as file:
            kept = json.loads(file.read())
        if (
            kept["version"] != _VERSION
            or kept["usr"] != str(usr)
            or not 0 <= time.time() - kept["at"] < _MAX_AGE_SECONDS
        ):
            return None
        root = os.open(usr, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for path, stamp in kept["stamps"].items():
                if os.stat(path or ".", dir_fd=root, follow_symlinks=False).st_ctime_ns != stamp:
                    return None
        finally:
            os.close(root)
        return str(kept["mask"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save(index: Path, usr: Path, name: str, scan: _Scan) -> None:
    kept = {"version": _VERSION, "usr": str(usr), "at": time.time(), "mask": name, "stamps": scan.stamps}
    write_atomically(index, json.dumps(kept).encode())


def _make(
    cache: Path,
    name: str,
    usr: Path,
    scan: _Scan,
    links: dict[str, str],
    tools: list[str],
    flavour: OverlayFlavour,
    every_directory: bool,
) -> None:
    work = cache / f"work-{os.urandom(8).hex()}"
    try:
        work.mkdir(mode=0o755)
        wanted = set(scan.stamps) - {""} if every_directory else set()
        for path in (*scan.hidden, *links):
            wanted.update(str(parent) for parent in Path(path).parents if str(parent) != ".")
        if tools:
            wanted.update(("local", _IN_FRONT))
        for path in sorted(wanted):
            (work / path).mkdir()
        for tool in tools:
            (work / _IN_FRONT / tool).write_text(_NO_PACKAGES)
            (work / _IN_FRONT / tool).chmod(0o755)
        for path in scan.hidden:
            _whiteout(work, path, flavour)
        for path, program in links.items():
            (work / path).symlink_to(program)
        for path in sorted(wanted, reverse=True):
            _copy_look(usr / path, work / path)
        _copy_look(usr, work)
        sync_tree(work)
        os.rename(work, cache / name)
    finally:
        remove_tree(work)


def _whiteout(work: Path, path: str, flavour: OverlayFlavour) -> None:
    parent = os.open((work / path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flavour.make_whiteout(os.path.basename(path), parent)
    finally:
        os.close(parent)


def _copy_look(source: Path, target: Path) -> None:
    """A directory that merges shows the top-most one's owner, mode and time: they must be the real one's."""
    try:
        found = os.stat(source)
    except FileNotFoundError:
        return  # gone since the scan
    if os.geteuid() == 0 and found.st_uid <= 65533 and found.st_gid <= 65533:
        try:
            os.chown(target, found.st_uid, found.st_gid)
        except OSError:
            pass  # not an id of this user namespace: the directory stays ours, which is what a sandbox needs
    target.chmod(stat.S_IMODE(found.st_mode) & 0o1777)
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
