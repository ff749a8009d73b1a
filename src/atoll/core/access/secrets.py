"""Secrets that sandboxes may use as environment variables, kept encrypted at rest.

Each owner has a set of names, each name a set of keys (K8E writes `VAR=name:key`). Values lie in `secrets.json`, sealed with
AES-256-GCM under a key of this machine (`secrets.key`, 0600) and bound to owner, name and key: a value moved to another row does
not open. A reference is resolved at every exec; values never enter the sandbox's record, events or snapshots.
"""

import asyncio
import base64
import json
import os
import re
import secrets as random
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.access.audited_verbs import Part, verb
from atoll.errors import FailedPrecondition, Internal, InvalidArgument, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from atoll.core.access.principals import Principal
    from atoll.model import SecretRef

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_MAX_VALUE = 64 << 10
Names = list[str]


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

    def set(self, owner: str, name: str, key: str, value: str) -> None:
        check_name(name)
        check_name(key, "secret key")
        if "\0" in value or len(value.encode()) > _MAX_VALUE:
            raise InvalidArgument(f"a secret's value has at most {_MAX_VALUE} bytes and no NUL")
        rows = self._load()
        nonce = random.token_bytes(12)
        sealed = self._cipher().encrypt(nonce, value.encode(), _bound(owner, name, key))
        rows.setdefault(owner, {}).setdefault(name, {})[key] = base64.b64encode(nonce + sealed).decode()
        self._save(rows)

    def list(self, owner: str) -> dict[str, list[str]]:
        """Names and their keys; never values."""
        return {name: sorted(keys) for name, keys in sorted(self._load().get(owner, {}).items())}

    def remove(self, owner: str, name: str, key: str = "") -> None:
        rows = self._load()
        mine = rows.get(owner, {})
        if name not in mine or (key and key not in mine[name]):
            raise NotFound(f"no secret {name}{':' + key if key else ''}")
        if key and len(mine[name]) > 1:
            del mine[name][key]
        else:
            del mine[name]
        self._save(rows)

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
            fd = os.open(self._key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(random.token_bytes(32))
        except FileExistsError:
            pass
        return AESGCM(self._key_file.read_bytes())

    def _load(self) -> dict[str, dict[str, dict[str, str]]]:
        try:
            rows: dict[str, dict[str, dict[str, str]]] = json.loads(self._file.read_text())
        except FileNotFoundError:
            return {}
        return rows

    def _save(self, rows: dict[str, dict[str, dict[str, str]]]) -> None:
        fresh = self._file.with_suffix(".new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(rows, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._file)


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
