"""Makes the image `code-interpreter-v1`: the `host` image with two layers over /usr, built once and then at hand offline.

interpreter/packages-KEY    the packages, which take a minute to bring
interpreter/programs-KEY    our programs, written anew with each version
interpreter/known.json      which images there have been: digest -> (digest of the host image, packages, programs)
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from atoll.images.interpreter import packages
from atoll.images.layers.tree import OverlayFlavour, remove_tree, sync_tree, write_atomically
from atoll.images.progress import Progress, ProgressCallback
from atoll.images.sources.host import HostImage

NAME = "code-interpreter-v1"
KEPT = 16


def build(
    root: Path, host: HostImage, flavour: OverlayFlavour, ca_file: Path | None, progress: ProgressCallback
) -> HostImage:
    """Return the image, whose layers are made if they are not there. The caller holds the lock of `root`."""
    python = packages.find_python()
    brought = _made(
        root, f"packages-{packages.key_of(python)}", lambda at: packages.install(at, python, flavour, ca_file, progress)
    )
    programs = _made(root, f"programs-{packages.programs_key()}", packages.write_programs)
    image = _stacked(root, host, brought.name, programs.name)
    known = _known(root)
    if known.get(image.digest) != [host.digest, brought.name, programs.name]:
        known.pop(image.digest, None)
        kept = dict(list(known.items())[-KEPT:])
        _save(root, {**kept, image.digest: [host.digest, brought.name, programs.name]})
        progress(Progress("done", NAME))
    return image


def is_built(root: Path) -> bool:
    """Return whether the packages for this machine's Python are here."""
    return (root / f"packages-{packages.key_of(packages.find_python())}").is_dir()


def find(root: Path, digest: str, find_host: Callable[[str], HostImage | None]) -> HostImage | None:
    """Return the very image that a sandbox was made from, as long as its layers are kept."""
    found = _known(root).get(digest)
    host = find_host(found[0]) if found else None
    if not found or host is None or not all((root / name).is_dir() for name in found[1:]):
        return None
    return _stacked(root, host, *found[1:])


def hosts_of(root: Path, in_use: frozenset[str]) -> frozenset[str]:
    """Return the digests of the host images below those images that are in use."""
    return frozenset(found[0] for digest, found in _known(root).items() if digest in in_use)


def forget(root: Path, in_use: frozenset[str]) -> None:
    """Remove the layers of all but the newest image and those in use."""
    known = _known(root)
    kept = {
        digest: found for at, (digest, found) in enumerate(known.items()) if at == len(known) - 1 or digest in in_use
    }
    if root.is_dir():
        _save(root, kept)
        needed = {name for found in kept.values() for name in found[1:]}
        for entry in os.scandir(root):
            if entry.is_dir(follow_symlinks=False) and entry.name not in needed:
                remove_tree(Path(entry.path))


def _stacked(root: Path, host: HostImage, brought: str, programs: str) -> HostImage:
    digest = hashlib.sha256(f"{host.digest} {brought} {programs}".encode()).hexdigest()
    above = (root / programs, root / brought)
    return replace(host, name=NAME, digest=f"sha256:{digest}", above_usr=above, notes=("Jupyter kernels on `host`",))


def _made(root: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Return a directory that is wholly there: it is filled under another name and then renamed."""
    target = root / name
    if not target.is_dir():
        root.mkdir(mode=0o711, parents=True, exist_ok=True)
        work = root / f"work-{os.urandom(8).hex()}"
        try:
            work.mkdir(mode=0o755)
            fill(work)
            sync_tree(work)
            os.rename(work, target)
        finally:
            remove_tree(work)
    return target


def _known(root: Path) -> dict[str, list[str]]:
    try:
        found = json.loads((root / "known.json").read_bytes())
        return {str(digest): [str(part) for part in parts] for digest, parts in found.items() if len(parts) == 3}
    except (FileNotFoundError, ValueError, AttributeError):
        return {}


def _save(root: Path, known: dict[str, list[str]]) -> None:
    write_atomically(root / "known.json", json.dumps(known).encode())
