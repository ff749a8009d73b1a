"""API keys: named, expiring, shown once, kept as hashes, with scopes and quotas.

A key is 256 random bits as 64 hex digits (the E2B form only adds `e2b_`), so one round of SHA-256 is as good as a slow
hash: there is nothing to guess. The name is the identity that owns sandboxes; a key made later under the same name takes
them over, which is how keys are rotated. A row is looked up again at every call, so a revocation counts at once.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atoll.core.store.columns import Row
from atoll.core.store.database import Database, Taken
from atoll.core.store.sqlite import SqliteConnection
from atoll.errors import AlreadyExists, InvalidArgument, NotFound, Unauthenticated

SCOPES = ("use", "approve", "admin")
QUOTAS = ("sandboxes", "cpus", "memory_mb", "disk_mb", "write_burst", "write_rate", "read_burst", "read_rate")
MAX_TTL_DAYS = 3650
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_KEY = re.compile(r"(?:e2b_)?([0-9a-f]{64})")
_DAY = 86400

_TABLE = (
    """CREATE TABLE IF NOT EXISTS api_key(
    id TEXT PRIMARY KEY, name TEXT NOT NULL, hash TEXT NOT NULL, scopes TEXT NOT NULL, quotas TEXT NOT NULL,
    created_at BIGINT NOT NULL, expires_at BIGINT, ttl_days BIGINT, revoked_at BIGINT, created_by TEXT NOT NULL DEFAULT '')""",
    "CREATE UNIQUE INDEX IF NOT EXISTS api_key_name ON api_key(name) WHERE revoked_at IS NULL",
    "CREATE UNIQUE INDEX IF NOT EXISTS api_key_hash ON api_key(hash)",
)


@dataclass(frozen=True)
class Key:
    """The stored record of a key: everything but the secret."""

    id: str
    name: str
    scopes: tuple[str, ...]
    quotas: Mapping[str, float]
    created_at: int
    expires_at: int | None
    ttl_days: int | None
    revoked_at: int | None = None
    created_by: str = ""

    def expired(self, now: float) -> bool:
        return self.expires_at is not None and now >= self.expires_at

    def may(self, scope: str) -> bool:
        """`admin` includes the rest; `approve` does not include `use`, so that an approver's key can do nothing else."""
        return scope in self.scopes or "admin" in self.scopes


@dataclass(frozen=True)
class NewKey:
    """A key right after it was made; `secret` is never to be had again."""

    key: Key
    secret: str = field(repr=False)

    @property
    def e2b(self) -> str:
        return f"e2b_{self.secret}"


class Keys:
    """The keys of one daemon, or of all gateways on one database. The table is made here.

    A path is that of the daemon's file of records.
    """

    def __init__(self, records: Database | Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._db = SqliteConnection(records) if isinstance(records, Path) else records
        with self._db.transaction():
            for statement in _TABLE:
                self._db.change(statement)

    def close(self) -> None:
        self._db.close()

    def create(
        self,
        name: str,
        *,
        ttl_days: int | None = 30,
        scopes: Iterable[str] = ("use",),
        quotas: Mapping[str, float] | None = None,
        created_by: str = "",
    ) -> NewKey:
        """Make a key; its secret is in the answer and nowhere else."""
        secret = secrets.token_hex(32)
        now = int(self._clock())
        if ttl_days is not None and not 1 <= ttl_days <= MAX_TTL_DAYS:
            raise InvalidArgument(f"a key lives 1 to {MAX_TTL_DAYS} days, or forever")
        expires = None if ttl_days is None else now + ttl_days * _DAY
        return NewKey(self._insert(name, secret, now, expires, ttl_days, scopes, quotas or {}, created_by), secret)

    def authenticate(self, bearer: str) -> Key:
        """The living key behind a bearer credential. Every failure reads the same, and takes the same path."""
        shaped = _KEY.fullmatch(bearer)
        digest = _digest(shaped.group(1) if shaped else bearer)
        found = self._rows("hash = ?", digest)
        if not shaped or not found or not hmac.compare_digest(found[0]["hash"], digest):
            raise _refused()
        return self._living(_key(found[0]))

    def current(self, key_id: str) -> Key:
        """The key with this id if it still counts: asked again for certificates and for open streams."""
        found = self._rows("id = ?", key_id)
        if not found:
            raise _refused()
        return self._living(_key(found[0]))

    def get(self, name: str) -> Key:
        found = self._rows("name = ? AND revoked_at IS NULL", name)
        if not found:
            raise NotFound(f"no key named {name!r}")
        return _key(found[0])

    def makers(self, key_id: str) -> set[str]:
        """The owners that a key comes from: who made it, who made the keys that made it, and so on."""
        found: set[str] = set()
        makers = {row["created_by"] for row in self._rows("id = ?", key_id)}
        while makers:
            maker = makers.pop()
            if maker and maker not in found:
                found.add(maker)
                makers |= {row["created_by"] for row in self._rows("name = ?", maker.removeprefix("key:"))}
        return found

    def list(self, *, revoked: bool = False) -> list[Key]:
        return [_key(row) for row in self._rows("1 = 1" if revoked else "revoked_at IS NULL")]

    def revoke(self, name: str) -> Key:
        """End a key for good; it is refused from the next call on."""
        key = self.get(name)
        self._write("UPDATE api_key SET revoked_at = ? WHERE id = ?", int(self._clock()), key.id)
        return _key(self._rows("id = ?", key.id)[0])

    def import_k8e(
        self, text: str | bytes, *, scopes: Iterable[str] = ("use",), created_by: str = "import"
    ) -> dict[str, str]:
        """Take over K8E's keys.json, in its present or its old flat form. Answers what became of each name."""
        try:
            data = json.loads(text)
            entries = data["keys"] if isinstance(data.get("version"), int) else data
            parsed = {name: _k8e_entry(name, entry) for name, entry in entries.items()}
        except (ValueError, KeyError, AttributeError, TypeError) as bad:
            raise InvalidArgument("this is not a K8E keys.json") from bad
        outcome: dict[str, str] = {}
        for name, (secret, created, expires, ttl) in parsed.items():
            known = self._rows("hash = ?", _digest(secret))
            if known:
                outcome[name] = "present" if known[0]["revoked_at"] is None else "revoked"
                continue
            try:
                self._insert(name, secret, created or int(self._clock()), expires, ttl, scopes, {}, created_by)
                outcome[name] = "imported"
            except AlreadyExists:
                outcome[name] = "name taken"
        return outcome

    def _living(self, key: Key) -> Key:
        if key.revoked_at is not None or key.expired(self._clock()):
            raise _refused()
        return key

    def _insert(
        self,
        name: str,
        secret: str,
        created: int,
        expires: int | None,
        ttl_days: int | None,
        scopes: Iterable[str],
        quotas: Mapping[str, float],
        created_by: str,
    ) -> Key:
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"key name {name!r} is not valid", hint="letters, digits and . _ @ -, at most 63")
        chosen = tuple(scope for scope in SCOPES if scope in set(scopes))
        if not chosen or set(scopes) - set(SCOPES):
            raise InvalidArgument(f"scopes are one or more of {', '.join(SCOPES)}")
        row = (secrets.token_hex(8), name, _digest(secret), ",".join(chosen), json.dumps(_checked_quotas(quotas)))
        try:
            self._write(
                "INSERT INTO api_key VALUES(?,?,?,?,?,?,?,?,NULL,?)", *row, created, expires, ttl_days, created_by
            )
        except Taken:
            raise AlreadyExists(f"a key named {name!r} exists") from None
        return _key(self._rows("id = ?", row[0])[0])

    def _rows(self, where: str, *values: object) -> Sequence[Row]:
        with self._lock:
            found = self._db.rows(f"SELECT * FROM api_key WHERE {where} ORDER BY created_at, id", *values)
            return [dict(row) for row in found]

    def _write(self, statement: str, *values: object) -> None:
        with self._lock:
            self._db.change(statement, *values)


def parse_ttl(text: str) -> int | None:
    """`30d`, `720h` (rounded up to days), bare days; `never`, `none` and `0` are no end."""
    if text.lower() in ("never", "none", "0"):
        return None
    shaped = re.fullmatch(r"([0-9]{1,6})([dh]?)", text)
    days = 0 if not shaped else math.ceil(int(shaped[1]) / 24) if shaped[2] == "h" else int(shaped[1])
    if not 1 <= days <= MAX_TTL_DAYS:
        raise InvalidArgument(f"not a lifetime: {text!r}", hint="for example 30d, 720h, 30 or never")
    return days


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _refused() -> Unauthenticated:
    return Unauthenticated("the API key is missing, wrong, expired or revoked")


def _key(row: Mapping[str, Any]) -> Key:
    return Key(
        row["id"],
        row["name"],
        tuple(row["scopes"].split(",")),
        json.loads(row["quotas"]),
        row["created_at"],
        row["expires_at"],
        row["ttl_days"],
        row["revoked_at"],
        row["created_by"],
    )


def _checked_quotas(quotas: Mapping[str, float]) -> dict[str, float]:
    for name, value in quotas.items():
        if name not in QUOTAS:
            raise InvalidArgument(f"no such quota: {name}", hint=", ".join(QUOTAS))
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise InvalidArgument(f"quota {name} must be a number of 0 or more")
    return dict(quotas)


def _k8e_entry(name: str, entry: object) -> tuple[str, int | None, int | None, int | None]:
    fields: Mapping[str, Any] = {"key": entry} if isinstance(entry, str) else entry  # type: ignore[assignment]
    shaped = _KEY.fullmatch(str(fields["key"]))
    if shaped is None:
        raise InvalidArgument(f"the key of {name!r} is not 64 hex digits; make a new one instead")
    ttl = fields.get("ttl_days")
    expires = _instant(fields.get("expires_at"))
    created = _instant(fields.get("created_at"))
    if expires is None and isinstance(ttl, int) and ttl > 0 and created is not None:
        expires = created + ttl * _DAY
    return shaped.group(1), created, expires, ttl if isinstance(ttl, int) and ttl > 0 else None


def _instant(value: object) -> int | None:
    if value is None or value == "" or value == 0:
        return None
    if isinstance(value, int | float):
        return int(value)
    when = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())
