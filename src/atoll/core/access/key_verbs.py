"""The verbs of API keys and of the certificates issued for them.

A key is in the answer that makes it and never again. All of it needs the local user or a key with the admin scope.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from atoll import errors
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.credentials import KeyHolder
from atoll.core.access.key_confirmation import Granting
from atoll.core.access.keys import Key, Keys, parse_ttl
from atoll.core.access.principals import Principal
from atoll.core.access.rights_watch import RightsWatch
from atoll.model import ChallengeKey, CreateKey, ImportKeys, KeyFields, NamedCertificate, NamedKey


class NewKey(KeyFields):
    key: str
    e2b_key: str


class RevokedKey(KeyFields):
    ok: bool


Told = Mapping[str, object]  # a line of the ledger, which is the server's
Ledger = list[Told]


class Certificates(Protocol):
    """The ledger of the daemon's certificate authority."""

    def issued(self) -> list[Any]: ...

    def revoke(self, finger: str) -> Any: ...

    def revoke_key(self, key_id: str) -> list[Any]: ...


class Issuer(Protocol):
    """The daemon's certificate authority."""

    def issue(self, csr_pem: str, key_name: str, key_id: str, *, device: str = "", until: int | None = None) -> Any: ...


class KeyVerbs(Part):
    """`certificates` opens the ledger; None where no certificate was ever issued."""

    def __init__(self, keys: Keys, granting: Granting, watch: RightsWatch) -> None:
        self._keys = keys
        self._watch = watch
        self._granting = granting
        self.certificates: Callable[[], Certificates | None] = lambda: None

    @verb("keys.list")
    async def list(self, who: Principal, revoked: bool = False) -> list[KeyFields]:
        return [shown(key) for key in self._keys.list(revoked=revoked)]

    @verb("keys.create")
    async def create(self, who: Principal, asked: CreateKey) -> NewKey:
        """Make a key. The answer is the only place that shows it."""
        self._granting.check(who, asked.name, asked.scopes, asked.answer)
        made = self._keys.create(
            asked.name,
            ttl_days=parse_ttl(asked.ttl),
            scopes=asked.scopes,
            quotas=asked.quotas,
            created_by=who.owner,
        )
        return {**shown(made.key), "key": made.secret, "e2b_key": made.e2b}

    @verb("keys.challenge")
    async def challenge(self, who: Principal, asked: ChallengeKey) -> bool:
        """Show on the caller's terminal what a key that can approve takes; whether anything is needed."""
        return await self._granting.challenge(who, asked.name, asked.scopes)

    @verb("keys.revoke")
    async def revoke(self, who: Principal, asked: NamedKey) -> RevokedKey:
        """End a key, every certificate issued for it, and what they have open."""
        key = self._keys.revoke(asked.name)
        if (ledger := self.certificates()) is not None:
            await asyncio.to_thread(ledger.revoke_key, key.id)
        self._watch.look()
        return {"ok": True, **shown(key)}

    @verb("keys.import")
    async def bring_in(self, who: Principal, asked: ImportKeys) -> dict[str, str]:
        """Take over K8E's keys.json. Returns what became of each name."""
        self._granting.check(who, "import", asked.scopes, None)
        maker = who.owner if isinstance(who, KeyHolder) else "import"
        return self._keys.import_k8e(asked.text, scopes=asked.scopes, created_by=maker)

    @verb("certificates.issue")
    async def issue_certificate(self, who: Principal, issuer: Issuer, request: str, device: str) -> Any:
        """Return a client certificate that says the key's name. It counts only as long as the key does."""
        if not isinstance(who, KeyHolder):
            raise errors.FailedPrecondition("a local caller needs no certificate", hint="log in with an API key")
        key = self._keys.current(who.key_id)
        return issuer.issue(request, key.name, key.id, device=device, until=key.expires_at)

    @verb("certificates.list")
    async def list_certificates(self, who: Principal) -> Ledger:
        ledger = self.certificates()
        found = await asyncio.to_thread(ledger.issued) if ledger is not None else []
        return [{**vars(line), "revoked": bool(line.revoked_at)} for line in found]

    @verb("certificates.revoke")
    async def revoke_certificate(self, who: Principal, asked: NamedCertificate) -> Told:
        ledger = self.certificates()
        line = await asyncio.to_thread(ledger.revoke, asked.fingerprint) if ledger is not None else None
        if line is None:
            raise errors.NotFound("no certificate with this fingerprint")
        self._watch.look()
        return {"ok": True, **vars(line)}


def shown(key: Key) -> KeyFields:
    return {
        "name": key.name,
        "scopes": list(key.scopes),
        "quotas": dict(key.quotas),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "ttl_days": key.ttl_days,
        "expired": key.expired(time.time()),
        "revoked_at": key.revoked_at,
    }
