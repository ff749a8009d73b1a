"""Secrets that sandboxes may use as environment variables, kept encrypted at rest.

Each owner has a set of names, each name a set of keys (K8E writes `VAR=name:key`). Values lie in `secrets.json`, sealed with
AES-256-GCM under a key of this machine (`secrets.key`, 0600) and bound to owner, name and key: a value moved to another row does
not open. A reference is resolved at every exec; values never enter the sandbox's record, events or snapshots.

All owners' values are in one file, so it is replaced as a whole, and one caller at a time reads, changes and replaces it: the lock
is on `secrets.lock` and holds between processes too. What one owner keeps is bounded, because everybody's reads cost it.
"""

import asyncio
import base64
import copy
import fcntl
import json
import os
import re
import secrets as random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.access.audited_verbs import Part, verb
from atoll.errors import Exhausted, FailedPrecondition, Internal, InvalidArgument, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from atoll.core.access.principals import Principal
    from atoll.model import SecretRef

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_MAX_VALUE = 64 << 10
MAX_KEYS = 256  # of one owner, of all its names together
MAX_BYTES = 1 << 20  # of one owner, as they are on disk
Names = list[str]
Rows = dict[str, dict[str, dict[str, str]]]  # owner, name, key: the sealed value


def check_name(name: str, what: str = "secret name") -> str:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{what} {name!r} is not valid",
            hint="letters, digits, '_', '.', '-', at most 63, starting with a letter or digit",
        )
    return name


class Secrets:
    def __init__(self, directory: Path) -> None:
        self._file = directory / "secrets.json"
        self._key_file = directory / "secrets.key"
        self._lock_file = directory / "secrets.lock"
        self._read: tuple[tuple[int, int, int], Rows] = ((0, 0, 0), {})  # the file that was read last, and its rows

    def set(self, owner: str, name: str, key: str, value: str) -> None:
        check_name(name)
        check_name(key, "secret key")
        if "\0" in value or len(value.encode()) > _MAX_VALUE:
            raise InvalidArgument(f"a secret's value has at most {_MAX_VALUE} bytes and no NUL")
        nonce = random.token_bytes(12)
        with self._changing() as rows:
            sealed = self._cipher().encrypt(nonce, value.encode(), _bound(owner, name, key))
            mine = rows.setdefault(owner, {})
            mine.setdefault(name, {})[key] = base64.b64encode(nonce + sealed).decode()
            kept = [len(one) for keys in mine.values() for one in keys.values()]
            if len(kept) > MAX_KEYS or sum(kept) > MAX_BYTES:
                raise Exhausted(
                    f"an owner keeps at most {MAX_KEYS} secrets of {MAX_BYTES >> 10} KiB together",
                    hint="remove one: atoll secret rm NAME [KEY]",
                )

    def list(self, owner: str) -> dict[str, list[str]]:
        """Names and their keys; never values."""
        return {name: sorted(keys) for name, keys in sorted(self._load().get(owner, {}).items())}

    def remove(self, owner: str, name: str, key: str = "") -> None:
        with self._changing() as rows:
            mine = rows.get(owner, {})
            if name not in mine or (key and key not in mine[name]):
                raise NotFound(f"no secret {name}{':' + key if key else ''}")
            if key and len(mine[name]) > 1:
                del mine[name][key]
            else:
                del mine[name]
            if not mine:
                del rows[owner]

    def resolve(self, owner: str, name: str, key: str) -> str:
        """The value, or FailedPrecondition: a command must not run without a secret it was promised."""
        sealed = self._load().get(owner, {}).get(name, {}).get(key)
        if sealed is None:
            raise FailedPrecondition(
                f"secret {name}:{key} does not exist", hint=f"set it with: atoll secret set {name} {key}"
            )
        raw = base64.b64decode(sealed)
        from cryptography.exceptions import InvalidTag

        try:
            return str(self._cipher().decrypt(raw[:12], raw[12:], _bound(owner, name, key)).decode())
        except InvalidTag:
            raise Internal(f"secret {name}:{key} does not open with this machine's key") from None

    def _cipher(self) -> "AESGCM":
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            return AESGCM(self._key_file.read_bytes())
        except FileNotFoundError:
            self._make_key()
        return AESGCM(self._key_file.read_bytes())

    def _make_key(self) -> None:
        """Write this machine's key, whole or not at all; one that another has made meanwhile stays."""
        fresh = self._key_file.with_suffix(f".{random.token_hex(8)}")
        try:
            _write(fresh, random.token_bytes(32))
            os.link(fresh, self._key_file)
        except FileExistsError:
            pass
        finally:
            fresh.unlink(missing_ok=True)

    @contextmanager
    def _changing(self) -> Iterator[Rows]:
        """All rows, to be changed by one caller at a time; written when the block ends without an error."""
        fd = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # of this open file, so it holds between threads as well
            rows = copy.deepcopy(self._load())
            yield rows
            fresh = self._file.with_suffix(f".{random.token_hex(8)}")
            try:
                _write(fresh, json.dumps(rows).encode())
                fresh.replace(self._file)
                self._read = ((0, 0, 0), {})
            except BaseException:
                fresh.unlink(missing_ok=True)
                raise
        finally:
            os.close(fd)

    def _load(self) -> Rows:
        """All rows, for reading; the file is parsed only when it is another one, because every command with a secret asks."""
        try:
            with self._file.open("rb") as file:
                found = os.fstat(file.fileno())
                mark = (found.st_ino, found.st_mtime_ns, found.st_size)
                if self._read[0] != mark:
                    self._read = (mark, json.loads(file.read()))
        except FileNotFoundError:
            return {}
        return self._read[1]


class Vault(Part):
    """The verbs: each caller sees and uses its own secrets only, and a value goes in but never comes out again."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets

    @verb("secrets.set")
    async def set(self, who: "Principal", name: str, key: str, value: str) -> None:
        await asyncio.to_thread(self._secrets.set, who.owner, name, key, value)

    @verb("secrets.list")
    async def list(self, who: "Principal") -> dict[str, Names]:
        return await asyncio.to_thread(self._secrets.list, who.owner)

    @verb("secrets.remove")
    async def remove(self, who: "Principal", name: str, key: str = "") -> None:
        await asyncio.to_thread(self._secrets.remove, who.owner, name, key)

    def check(self, owner: str, refs: "Iterable[SecretRef]") -> None:
        """FailedPrecondition when one of them does not exist."""
        for ref in refs:
            self._secrets.resolve(owner, ref.name, ref.key)

    def resolve(self, owner: str, refs: "Iterable[SecretRef]") -> dict[str, str]:
        """The variables for one command."""
        return {ref.env: self._secrets.resolve(owner, ref.name, ref.key) for ref in refs}


def _bound(owner: str, name: str, key: str) -> bytes:
    return json.dumps([owner, name, key]).encode()


def _write(path: Path, data: bytes) -> None:
    """A new file of ours alone, on disk when this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
