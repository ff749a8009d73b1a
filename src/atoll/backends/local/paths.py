"""Where things of a home directory lie. Everything of a sandbox is named after its id, so that it can be found
without a record."""

import hashlib
import os
import re
import secrets
from base64 import b32encode
from pathlib import Path

from atoll.errors import InvalidArgument, Unsupported

ID = re.compile(r"[a-z2-7]{20}")
_STAGES = ("/mnt", "/media", "/srv", "/opt", "/var/tmp", "/tmp")


class Paths:
    """The layout below $ATOLL_HOME."""

    def __init__(self, home: Path, *, plain_disks: bool = False) -> None:
        self._plain_disks = plain_disks
        self.home = Path(os.path.abspath(home))
        # Two daemons on one machine must not bury each other's sandboxes.
        self.mark = hashlib.sha256(os.fsencode(self.home)).hexdigest()[:8]
        self.runs = self.home / "run"
        self.boxes = self.home / "boxes"
        self.disks = self.home / "disks"
        self.engine = self.home / "engine"
        self._engine = str(self.engine)
        self.probes = self.home / "probes.json"
        self.memories = self.home / "memories"

    def make(self) -> None:
        """Directories are 0711 where the sandbox's own ids pass through, else 0700."""
        for path, mode in [
            (self.home, 0o711),
            (self.runs, 0o711),
            (self.boxes, 0o711),
            (self.disks, 0o700),
            (self.engine, 0o711),
        ]:
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(mode)

    def run(self, box: str) -> Path:
        return self.runs / check_id(box)

    def box(self, box: str) -> Path:
        return self.boxes / check_id(box)

    def disk(self, box: str) -> Path:
        """A file with a file system in it; where those cannot be mounted, a directory."""
        return self.box(box) / ("disk" if self._plain_disks else "disk.img")

    def volume(self, volume: str) -> Path:
        """The disk of a volume."""
        return self.home / "volumes" / check_id(volume) / "disk.img"

    def state(self, engine: str, box: str) -> Path:
        return self.engine / engine / check_id(box)

    def has_state(self, engine: str, box: str) -> bool:
        return os.path.lexists(f"{self._engine}/{engine}/{check_id(box)}")

    def stage(self) -> str:
        """A directory that anybody can reach and that holds nothing of ours: launchers cover it in their own mount namespace."""
        for candidate in _STAGES:
            covered = any(
                path == Path(candidate) or Path(candidate) in path.parents for path in (self.home, self.home.resolve())
            )
            if (
                not covered
                and os.path.isdir(candidate)
                and not os.path.islink(candidate)
                and os.stat(candidate).st_mode & 1
            ):
                return candidate
        raise Unsupported("no directory to build sandboxes on", hint=f"make one of {', '.join(_STAGES)} with mode 0755")


def new_id() -> str:
    """A sandbox id: 100 random bits in lower-case base32."""
    return b32encode(secrets.token_bytes(13)).decode().lower()[:20]


def check_id(box: str) -> str:
    """An id becomes part of paths: anything but the one form is refused."""
    if not ID.fullmatch(box):
        raise InvalidArgument(f"not a sandbox id: {box[:64]!r}")
    return box
