"""From a credential to a principal: the one place that decides who is calling, for every front door.

A bearer key counts before anything else, and a wrong one is refused even where none was needed. Then a client
certificate, then the peer of a Unix socket, then the user who owns a loopback connection's socket. Nothing else is known,
and what is not known is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from atoll.errors import NotFound, PermissionDenied, Unauthenticated

from .keys import Key, Keys
from .principals import Principal, local
from .ratelimit import DEFAULTS, Class, Limiter, Rate
from .rights_watch import RightsWatch

NOBODY = 65534


@dataclass(frozen=True, slots=True)
class KeyHolder(Principal):
    """A principal known by an API key or a certificate issued for one. Host paths are opened as nobody."""

    name: str = ""
    key_id: str = ""
    scopes: tuple[str, ...] = ()
    quotas: Mapping[str, float] = field(default_factory=dict, compare=False)
    fingerprint: str = ""


@dataclass(frozen=True)
class Peer:
    """The far end of a connection, as the listener saw it; nothing in here was said by the client."""

    address: str  # "unix" or "ip:port", for logs
    uid: int | None = None  # of a Unix socket's peer, or of a loopback connection (`server/socket_owner.py` at accept)
    gid: int | None = None
    fingerprint: str | None = None
    pid: int = 0  # of a Unix socket's peer; 0 is unknown


class Ledger(Protocol):
    """The part of the certificate authority that is asked here."""

    def find(self, finger: str) -> LedgerLine | None: ...


class LedgerLine(Protocol):
    @property
    def key_id(self) -> str: ...
    @property
    def revoked_at(self) -> int: ...


class Doorkeeper:
    def __init__(self, keys: Keys, ledger: Ledger | None = None, *, users: frozenset[int] | None = None) -> None:
        self.keys = keys
        self.ledger = ledger
        self.limiter = Limiter()
        self.watch = RightsWatch(self.recheck)
        self._users = users if users is not None else frozenset((os.geteuid(),))

    def identify(self, peer: Peer, bearer: str | None) -> Principal:
        """Return the caller's principal, or raise Unauthenticated. `bearer`: the key without that word, None when none was sent."""
        if bearer is not None:
            return _holder(self.keys.authenticate(bearer))
        if peer.fingerprint is not None:
            return self._by_certificate(peer.fingerprint)
        if peer.uid is not None:
            return self._local(peer.uid, NOBODY if peer.gid is None else peer.gid)
        raise Unauthenticated("an API key is needed", hint="send `authorization: Bearer <key>`")

    def recheck(self, who: Principal) -> None:
        """Raise when a credential has been revoked or has expired since."""
        if not isinstance(who, KeyHolder):
            return
        self.keys.current(who.key_id)
        if who.fingerprint:
            self._by_certificate(who.fingerprint)

    def follow_owner(self, owner: str, key_id: str = "") -> bool:
        """Watch the key that something lasting belongs to; False when it counts no more. Without an id: by its name."""
        if not owner.startswith("key:"):
            return True
        try:
            found = self.keys.current(key_id or self.keys.get(owner.removeprefix("key:")).id)
        except (NotFound, Unauthenticated):
            return False
        self.watch.follow(_holder(found))
        return True

    def stand_in(self, owner: str) -> Principal:
        """Return the caller that holds a token of one of this owner's sandboxes: the owner's rights, as they are now.

        Unauthenticated when the key they come from counts no more.
        """
        if not owner.startswith("key:"):
            return Principal(owner, -1, -1, "token")
        try:
            return _holder(self.keys.current(self.keys.get(owner.removeprefix("key:")).id))
        except NotFound:
            raise Unauthenticated("the key of this sandbox counts no more") from None

    def admit(self, who: Principal, kind: Class) -> None:
        """Count a call against the identity's rate; local callers have none."""
        if not isinstance(who, KeyHolder):
            return
        usual = DEFAULTS[kind]
        burst, per_second = who.quotas.get(f"{kind}_burst"), who.quotas.get(f"{kind}_rate")
        rate = Rate(usual.burst if burst is None else burst, usual.per_second if per_second is None else per_second)
        self.limiter.take(who.owner, kind, rate)

    def _by_certificate(self, fingerprint: str) -> KeyHolder:
        line = self.ledger.find(fingerprint) if self.ledger is not None else None
        if line is None:
            raise Unauthenticated("this certificate is not known here")
        if line.revoked_at:
            raise PermissionDenied("this certificate has been revoked")
        return _holder(self.keys.current(line.key_id), fingerprint)

    def _local(self, uid: int, gid: int) -> Principal:
        if uid not in self._users:
            raise Unauthenticated("this daemon serves another user", hint="use an API key, or your own daemon")
        return local(uid, gid)


def may(who: Principal, scope: str) -> bool:
    """Whether a principal has a scope. Local callers have `use` and `admin`; `approve` asks for more than a credential
    from them, and that is decided where approvals are."""
    if isinstance(who, KeyHolder):
        return scope in who.scopes or "admin" in who.scopes
    return True


def require(who: Principal, scope: str) -> None:
    if not may(who, scope):
        raise PermissionDenied(f"this key does not have the scope {scope!r}")


def bearer_of(header: str | None) -> str | None:
    """The key of an Authorization header; None without one. Any other scheme is a wrong credential, not a missing one."""
    if header is None:
        return None
    scheme, _, value = header.partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""


def _holder(key: Key, fingerprint: str = "") -> KeyHolder:
    return KeyHolder(f"key:{key.name}", NOBODY, NOBODY, "key", key.name, key.id, key.scopes, key.quotas, fingerprint)
