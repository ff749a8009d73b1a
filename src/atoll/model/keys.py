"""API keys and the certificates issued for them: what is asked."""

from typing import Annotated, TypedDict

from msgspec import Meta, field

from atoll.model.fields import Request

__all__ = ["ChallengeKey", "CreateKey", "ImportKeys", "KeyFields", "NamedCertificate", "NamedKey"]

MAX_IMPORT = 4 * 1024 * 1024


class CreateKey(Request, kw_only=True):
    """`ttl`: `30d`, `720h`, days, or `never`. `answer`: what the challenge showed, for a key that can approve."""

    name: str
    ttl: Annotated[str, Meta(max_length=20)] = "30d"
    scopes: list[str] = field(default_factory=lambda: ["use"])
    quotas: dict[str, float] = field(default_factory=dict)
    answer: Annotated[str, Meta(max_length=100)] | None = None


class ChallengeKey(Request, kw_only=True):
    """The key that is to be made."""

    name: str
    scopes: list[str]


class KeyFields(TypedDict):
    """An API key as callers see it: everything but the secret."""

    name: str
    scopes: list[str]
    quotas: dict[str, float]
    created_at: int
    expires_at: int | None
    ttl_days: int | None
    expired: bool
    revoked_at: int | None


class NamedKey(Request, kw_only=True):
    name: str


class ImportKeys(Request, kw_only=True):
    """The text of K8E's keys.json."""

    text: Annotated[str, Meta(max_length=MAX_IMPORT)]
    scopes: list[str] = field(default_factory=lambda: ["use"])


class NamedCertificate(Request, kw_only=True):
    fingerprint: Annotated[str, Meta(pattern="^[0-9A-Fa-f]{64}$")]
