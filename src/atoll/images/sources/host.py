"""The `host` image: the machine's own programs, and nothing of its people, secrets or state.

It has two stacks. `/` is a skeleton made here: empty directories, the links `/bin` and friends as the machine has them,
and an `/etc` of a short list of files. `/usr` is the machine's own, under a mask that hides what root alone may read and
Debian's marker against plain `pip install`. Both are kept and made again only when what they come from has changed.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atoll.images.image import DEFAULT_PATH, ImageFields, describe
from atoll.images.layers.tree import OverlayFlavour, remove_tree, sync_tree, write_atomically
from atoll.images.sources import host_etc, host_mask

_VERSION = 2
_CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
_ENV = {"PATH": DEFAULT_PATH, "SSL_CERT_FILE": _CA_BUNDLE, "LANG": "C.UTF-8"}
_DIRECTORIES = {
    "boot": 0o755, "dev": 0o755, "etc": 0o755, "etc/skel": 0o755, "home": 0o755, "media": 0o755, "mnt": 0o755, "opt": 0o755,
    "proc": 0o555, "root": 0o700, "run": 0o755, "run/lock": 0o1777, "srv": 0o755, "sys": 0o555, "tmp": 0o1777, "usr": 0o755,
    "var": 0o755, "var/cache": 0o755, "var/lib": 0o755, "var/log": 0o755, "var/opt": 0o755, "var/spool": 0o755,
    "var/tmp": 0o1777, "workspace": 0o755, "home/user": 0o755,
}  # fmt: skip
_LINKS = {"var/run": "/run", "var/lock": "/run/lock"}
_USER_ID = 1000


@dataclass(frozen=True, slots=True)
class HostImage:
    """The machine's own image. Stack `lowers` for `/` and `usr_lowers` for `/usr`, each under a writable layer."""

    name: str
    digest: str
    skeleton: Path
    usr_mask: Path
    usr: Path
    env: Mapping[str, str]
    user: str = ""
    workdir: str = "/workspace"
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    size: int = 0
    created: str = ""
    source: Literal["host"] = "host"
    platform: str = ""
    notes: tuple[str, ...] = ()
    above_usr: tuple[Path, ...] = ()  # layers over the machine's /usr, of an image that adds to `host`

    @property
    def lowers(self) -> tuple[Path, ...]:
        return (self.skeleton,)

    @property
    def usr_lowers(self) -> tuple[Path, ...]:
        return (*self.above_usr, self.usr_mask, self.usr)

    def to_json(self) -> ImageFields:
        return describe(self, (self.skeleton, *self.usr_lowers))


def build_host_image(
    cache: Path, flavour: OverlayFlavour, *, extra_ca: Path | None = None, usr: Path = Path("/usr")
) -> HostImage:
    """The image, from `cache` if it still fits the machine. The caller holds the cache's lock."""
    etc = host_etc.plan(Path("/"), extra_ca)
    links = host_etc.top_links(Path("/"))
    key = json.dumps([_VERSION, etc.fingerprint, sorted(links.items()), os.geteuid()])
    skeleton = cache / f"skeleton-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    if not skeleton.is_dir():
        _make_skeleton(cache, skeleton, etc, links)
    mask = host_mask.build_mask(cache, usr, flavour)
    digest = hashlib.sha256(f"{skeleton.name} {mask.name}".encode()).hexdigest()
    _remember(cache, skeleton.name, mask.name)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(skeleton.stat().st_mtime))
    return HostImage("host", f"sha256:{digest}", skeleton, mask, usr, dict(_ENV), created=created)


def find_host_image(cache: Path, digest: str, usr: Path = Path("/usr")) -> HostImage | None:
    """The very image a stopped sandbox was made from, as long as its directories are kept."""
    for skeleton, mask in _known(cache):
        found = hashlib.sha256(f"{skeleton} {mask}".encode()).hexdigest()
        if f"sha256:{found}" == digest and (cache / skeleton).is_dir() and (cache / mask).is_dir():
            return HostImage("host", digest, cache / skeleton, cache / mask, usr, dict(_ENV))
    return None


def forget_host_images(cache: Path, in_use: frozenset[str]) -> None:
    """Remove all but the newest and those in use."""
    kept: list[tuple[str, str]] = []
    known = _known(cache)
    for position, (skeleton, mask) in enumerate(known):
        digest = hashlib.sha256(f"{skeleton} {mask}".encode()).hexdigest()
        if position == len(known) - 1 or f"sha256:{digest}" in in_use:
            kept.append((skeleton, mask))
    write_atomically(cache / "known.json", json.dumps(kept).encode())
    needed = {name for pair in kept for name in pair}
    for entry in os.scandir(cache):
        if entry.is_dir(follow_symlinks=False) and entry.name not in needed:
            remove_tree(Path(entry.path))


def _known(cache: Path) -> list[tuple[str, str]]:
    try:
        return [(str(skeleton), str(mask)) for skeleton, mask in json.loads((cache / "known.json").read_bytes())]
    except (FileNotFoundError, ValueError):
        return []


def _remember(cache: Path, skeleton: str, mask: str) -> None:
    known = _known(cache)
    if known[-1:] != [(skeleton, mask)]:
        kept = [pair for pair in known if pair != (skeleton, mask)]
        write_atomically(cache / "known.json", json.dumps([*kept, (skeleton, mask)]).encode())


def _make_skeleton(cache: Path, target: Path, etc: host_etc.EtcPlan, links: dict[str, str]) -> None:
    work = cache / f"work-{os.urandom(8).hex()}"
    try:
        work.mkdir(mode=0o755)
        for name, mode in _DIRECTORIES.items():
            (work / name).mkdir()
            (work / name).chmod(mode)
        for name, link in {**links, **_LINKS}.items():
            (work / name).symlink_to(link)
        if os.geteuid() == 0:
            _try_chown(work / "home/user", _USER_ID)
        host_etc.write(etc, work / "etc")
        sync_tree(work)
        os.rename(work, target)
    finally:
        remove_tree(work)


def _try_chown(path: Path, owner: int) -> None:
    """With a single id in the user namespace there is no such owner; the directory then stays root's."""
    try:
        os.chown(path, owner, owner)
    except OSError:
        path.chmod(0o777)
