"""Tokens of sandboxes, and the signatures of URLs that are made with them.

A token is derived from the daemon's secret and the sandbox's id: it is stored nowhere, survives every restart, and opens
that sandbox alone.
"""

import base64
import hashlib
import hmac
import secrets
import time
from typing import Literal

from atoll import errors
from atoll.core.store.records import Store

SECRET = "e2b_secret"  # its name in the store
Purpose = Literal["envd", "traffic", "upload", "volume"]


class Tokens:
    """The tokens of one daemon."""

    def __init__(self, store: Store) -> None:
        found = store.meta(SECRET)
        if found is None:
            found = secrets.token_hex(32)
            store.set_meta(SECRET, found)
        self._secret = bytes.fromhex(found)

    def make(self, purpose: Purpose, sandbox: str) -> str:
        return hmac.new(self._secret, f"{purpose}:{sandbox}".encode(), hashlib.sha256).hexdigest()

    def fits(self, purpose: Purpose, sandbox: str, given: str) -> bool:
        """Return whether this is the sandbox's token. The time it takes says nothing about it."""
        return hmac.compare_digest(self.make(purpose, sandbox).encode(), given.encode("utf-8", "replace"))


def sign(path: str, operation: str, user: str, token: str, expires: str = "") -> str:
    """Return the signature of a URL for one file."""
    text = f"{path}:{operation}:{user}:{token}" + (f":{expires}" if expires else "")
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return "v1_" + base64.b64encode(digest).decode().rstrip("=")


def is_signed(query: dict[str, str], method: str, token: str) -> bool:
    """Return whether the query's signature was made with this token for this request; its time is looked at elsewhere."""
    operation = "read" if method == "GET" else "write"
    expires = query.get("signature_expiration", "")
    expected = sign(query.get("path", ""), operation, query.get("username", ""), token, expires)
    return hmac.compare_digest(expected.encode(), query.get("signature", "").encode("utf-8", "replace"))


def check_expiry(query: dict[str, str]) -> None:
    """Raise Unauthenticated when the signature's time is over. The SDKs know the message."""
    expires = query.get("signature_expiration", "")
    if not expires:
        return
    if not (expires.isascii() and expires.isdigit() and len(expires) <= 15) or int(expires) < time.time():
        raise errors.Unauthenticated("signature is already expired")
