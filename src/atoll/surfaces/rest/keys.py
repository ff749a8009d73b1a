"""REST routes for API keys and the certificates issued for them. Imported for its entries in the table of `rest`.

A key is in the answer that makes it and never again. All of it needs the local user or a key with the admin scope.
"""

import asyncio
import os
import time
from typing import Annotated, Any

from msgspec import Meta, field

from atoll import errors, model
from atoll.core.access.audited_verbs import SOURCE
from atoll.core.access.credentials import KeyHolder
from atoll.core.access.keys import Key, parse_ttl
from atoll.server.request import Exchange, flag
from atoll.surfaces.rest.routes import Rest, route

MAX_IMPORT = 4 * 1024 * 1024


class CreateKey(model.Request, kw_only=True):
    """`ttl`: `30d`, `720h`, days, or `never`. `answer`: what the challenge showed, for a key that can approve."""

    name: str
    ttl: Annotated[str, Meta(max_length=20)] = "30d"
    scopes: list[str] = field(default_factory=lambda: ["use"])
    quotas: dict[str, float] = field(default_factory=dict)
    answer: Annotated[str, Meta(max_length=100)] | None = None


class ChallengeKey(model.Request, kw_only=True):
    """The key that is to be made."""

    name: str
    scopes: list[str]


class NamedKey(model.Request, kw_only=True):
    name: str


class ImportKeys(model.Request, kw_only=True):
    """The text of K8E's keys.json."""

    text: Annotated[str, Meta(max_length=MAX_IMPORT)]
    scopes: list[str] = field(default_factory=lambda: ["use"])


class NamedCertificate(model.Request, kw_only=True):
    fingerprint: Annotated[str, Meta(pattern="^[0-9A-Fa-f]{64}$")]


@route("GET", "/v1/keys", "API keys, without the keys themselves", query=("revoked",), scope="admin")
async def list_keys(rest: Rest, exchange: Exchange) -> None:
    found = rest.core.keys.list(revoked=flag(exchange.query("revoked"), "revoked"))
    await exchange.answer({"keys": [_shown(key) for key in found]})


@route("POST", "/v1/keys", "Make a key; the answer is the only place it is shown", CreateKey, status=201, scope="admin")
async def create_key(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(CreateKey)
    rest.core.granting.check(exchange.who, asked.name, asked.scopes, asked.answer)
    _write_down(rest, exchange, "keys.create", name=asked.name, scopes=list(asked.scopes))
    made = rest.core.keys.create(
        asked.name,
        ttl_days=parse_ttl(asked.ttl),
        scopes=asked.scopes,
        quotas=asked.quotas,
        created_by=exchange.who.owner,
    )
    await exchange.answer({**_shown(made.key), "key": made.secret, "e2b_key": made.e2b}, 201)


@route(
    "POST",
    "/v1/keys/challenge",
    "Show on the caller's terminal what a key that can approve takes",
    ChallengeKey,
    scope="admin",
)
async def challenge_key(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(ChallengeKey)
    await exchange.answer({"needed": await rest.core.granting.challenge(exchange.who, asked.name, asked.scopes)})


@route("POST", "/v1/keys/revoke", "End a key, and every certificate issued for it, at once", NamedKey, scope="admin")
async def revoke_key(rest: Rest, exchange: Exchange) -> None:
    name = (await exchange.json(NamedKey)).name
    _write_down(rest, exchange, "keys.revoke", name=name)
    key = rest.core.keys.revoke(name)
    if os.path.isdir(rest.core.home / "tls"):
        await asyncio.to_thread(_authority(rest).revoke_key, key.id)
    await exchange.answer({"ok": True, **_shown(key)})


@route("POST", "/v1/keys/import", "Take over K8E's keys.json", ImportKeys, scope="admin")
async def import_keys(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(ImportKeys)
    rest.core.granting.check(exchange.who, "import", asked.scopes, None)
    _write_down(rest, exchange, "keys.import")
    maker = exchange.who.owner if isinstance(exchange.who, KeyHolder) else "import"
    await exchange.answer({"keys": rest.core.keys.import_k8e(asked.text, scopes=asked.scopes, created_by=maker)})


@route("GET", "/v1/keys/certificates", "Client certificates that Login has issued", scope="admin")
async def list_certificates(rest: Rest, exchange: Exchange) -> None:
    found = await asyncio.to_thread(_authority(rest).issued)
    await exchange.answer({"certificates": [{**vars(line), "revoked": bool(line.revoked_at)} for line in found]})


@route("POST", "/v1/keys/certificates/revoke", "End one certificate at once", NamedCertificate, scope="admin")
async def revoke_certificate(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(NamedCertificate)
    _write_down(rest, exchange, "certificates.revoke", fingerprint=asked.fingerprint)
    authority = _authority(rest)
    line = await asyncio.to_thread(authority.revoke, asked.fingerprint) if authority.directory.is_dir() else None
    if line is None:
        raise errors.NotFound("no certificate with this fingerprint")
    await exchange.answer({"ok": True, **vars(line)})


def _write_down(rest: Rest, exchange: Exchange, action: str, **details: Any) -> None:
    """Keys are power: what is done to them is in the audit log before it is done."""
    rest.core.audit.record(exchange.who.owner, action, result="begun", source=SOURCE.get(), **details)


def _authority(rest: Rest) -> Any:
    from atoll.server.tls import Authority

    return Authority(rest.core.home / "tls")


def _shown(key: Key) -> dict[str, Any]:
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
