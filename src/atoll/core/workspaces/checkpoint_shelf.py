"""The caller's checkpoints on disk: one small file each, which is the checkpoint. The backend keeps the memory it names.

    checkpoints/<32 hex of owner and name>.json

What a stranger may see of one, and what was asked of the sandbox sealed under the owner's key, because environment values may be
secrets. A file appears by a rename and goes by an unlink: a crash leaves the old one or nothing.
"""

import base64
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.core.workspaces.index import check_name
from atoll.errors import Internal, NotFound

_KEY = 32


class Kept(TypedDict):
    """A checkpoint as it is known without its owner's key."""

    owner: str
    name: str
    memory: str  # the name the backend has for it
    created_at: float
    sandbox_id: str
    runtime: str
    image: str
    size_bytes: int


class Body(TypedDict):
    """What only its owner's key opens: the request, the image's digest, and the backend's record."""

    spec: Mapping[str, object]
    image: str | None
    record: Mapping[str, object]


class CheckpointShelf:
    def __init__(self, home: Path) -> None:
        self._root = home / "checkpoints"
        self._key_file = home / "memory.key"

    def key_of(self, owner: str) -> bytes:
        """The key that seals what belongs to this owner."""
        derived = HKDF(algorithm=hashes.SHA256(), length=_KEY, salt=None, info=b"atoll owner\0" + owner.encode())
        return derived.derive(self._master())

    def put(self, kept: Kept, body: Body) -> None:
        """Write a checkpoint down; one of the same name is replaced in the same step."""
        self._root.mkdir(mode=0o700, exist_ok=True)
        nonce = secrets.token_bytes(12)
        sealed = AESGCM(self.key_of(kept["owner"])).encrypt(nonce, json.dumps(body).encode(), _bound(kept))
        path = self._place(kept["owner"], kept["name"])
        fresh = path.with_suffix(".new")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
            json.dump({**kept, "sealed": base64.b64encode(nonce + sealed).decode()}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)

    def get(self, owner: str, name: str) -> Kept:
        kept, _ = self._read(self._place(owner, name), name)
        if kept["owner"] != owner or kept["name"] != name:
            raise NotFound(f"no checkpoint {name!r}")
        return kept

    def open(self, owner: str, name: str) -> tuple[Kept, Body]:
        """A checkpoint with what its owner's key opens."""
        kept, raw = self._read(self._place(owner, name), name)
        if kept["owner"] != owner or kept["name"] != name:
            raise NotFound(f"no checkpoint {name!r}")
        try:
            body: Body = json.loads(AESGCM(self.key_of(owner)).decrypt(raw[:12], raw[12:], _bound(kept)))
        except InvalidTag:
            raise Internal(f"checkpoint {name!r} was changed on the disk", hint="remove it") from None
        return kept, body

    def remove(self, owner: str, name: str) -> None:
        with suppress(FileNotFoundError):
            self._place(owner, name).unlink()

    def all(self) -> Iterator[Kept]:
        """Every owner's, in no order; one that cannot be read is left out."""
        for path in self._root.glob("*.json"):
            with suppress(NotFound, Internal):
                yield self._read(path, path.stem)[0]

    def _place(self, owner: str, name: str) -> Path:
        digest = hashlib.sha256(json.dumps([owner, check_name(name)]).encode()).hexdigest()[:32]
        return self._root / f"{digest}.json"

    def _read(self, path: Path, name: str) -> tuple[Kept, bytes]:
        try:
            found = json.loads(path.read_text())
            raw = base64.b64decode(found.pop("sealed"))
            kept: Kept = found
        except FileNotFoundError:
            raise NotFound(f"no checkpoint {name!r}") from None
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise Internal(f"checkpoint {name!r} cannot be read: {error}", hint="remove it") from None
        return kept, raw

    def _master(self) -> bytes:
        with suppress(FileExistsError):
            fd = os.open(self._key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(secrets.token_bytes(_KEY))
                file.flush()
                os.fsync(file.fileno())
        key = self._key_file.read_bytes()
        if len(key) != _KEY:
            raise Internal(f"{self._key_file} is not whole", hint="remove it; checkpoints made with it are lost")
        return key


def _bound(kept: Kept) -> bytes:
    return json.dumps([kept["owner"], kept["name"], kept["memory"]]).encode()
