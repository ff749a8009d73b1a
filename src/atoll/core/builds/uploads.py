"""The files of builds, as they are uploaded: bounded, charged to their owner, gone after a while."""

import asyncio
import hashlib
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from atoll import errors
from atoll.accounts import DISK, Accounts, Lease, owner
from atoll.core.access.principals import Principal, new_id
from atoll.core.store.space import Space

KEPT_S = 3600.0
MOST = 256  # uploads of one owner at once
_NAME = re.compile(r"[a-z0-9]{1,64}\Z")


class Upload:
    """An archive that has come completely."""

    def __init__(self, path: Path, lease: Lease) -> None:
        self.path = path
        self.lease = lease
        self.used = time.monotonic()


class Uploads:
    """Archives by owner and name. None outlives the daemon."""

    def __init__(self, directory: Path, books: Accounts, space: Space, most: int) -> None:
        self._directory = directory
        self._books = books
        self._space = space
        self._most = most
        self._held: dict[tuple[str, str], Upload] = {}

    def start(self) -> None:
        """Remove what an earlier daemon has left."""
        from atoll.images.layers.tree import remove_tree

        if self._directory.is_dir():
            remove_tree(self._directory)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def take(self, who: Principal, pieces: AsyncIterator[bytes], name: str = "") -> str:
        """Keep an archive as it comes, under a name of the caller's or a new one; return the name. A cut one leaves nothing."""
        self._expire()
        name = name or new_id()
        if not _NAME.match(name):
            raise errors.InvalidArgument(f"{name!r:.80} is no name of an upload")
        if sum(1 for whose, _ in self._held if whose == who.owner) >= MOST:
            raise errors.Exhausted(f"{MOST} uploads of yours wait for a build", hint="build, or wait until they expire")
        path = self._directory / f"{hashlib.sha256(who.owner.encode()).hexdigest()[:16]}-{new_id()}"
        lease = self._books.lease(DISK, 0, owner(who.owner))
        try:
            with open(path, "xb", opener=_private) as file:  # noqa: ASYNC230  # its writes go to threads
                size = 0
                async for piece in pieces:
                    size += len(piece)
                    if size > self._most:
                        raise errors.TooLarge(f"a build's files have at most {self._most >> 20} MB")
                    self._space.check(len(piece), "the files of a build")
                    lease.grow(len(piece))
                    await asyncio.to_thread(file.write, piece)
        except BaseException:
            lease.end()
            path.unlink(missing_ok=True)
            raise
        self._forget((who.owner, name))
        self._held[who.owner, name] = Upload(path, lease)
        return name

    def find(self, who: Principal, name: str) -> Path | None:
        """Return an upload of the caller's; None when there is none."""
        found = self._held.get((who.owner, name))
        if found is None:
            return None
        found.used = time.monotonic()
        return found.path

    def drop(self, who: Principal, name: str) -> None:
        self._forget((who.owner, name))

    def _expire(self) -> None:
        for key, upload in list(self._held.items()):
            if time.monotonic() - upload.used > KEPT_S:
                self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        upload = self._held.pop(key, None)
        if upload is not None:
            upload.lease.end()
            with suppress(OSError):
                upload.path.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
