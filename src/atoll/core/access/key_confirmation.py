"""Decide who may make a key that can approve.

A key with the scope `approve`, or `admin` which includes it, decides in a person's place. So a key made by a caller who is
known only by the user id, which every program of that user shares, takes what an approval by that user takes: a person at a
terminal, who is not in a login session that waits for an approval itself. Where no terminal is to be had, the operator
allows it in config.toml: `[security] approve_keys_without_terminal = true`.
"""

import asyncio
from collections.abc import Iterable

from atoll import errors
from atoll.core.access.approved_text import visible
from atoll.core.access.challenges import Challenges, Place, place_of_caller
from atoll.core.access.credentials import KeyHolder
from atoll.core.access.principals import Principal
from atoll.core.store.records import Store

POWERFUL = frozenset(("approve", "admin"))
HINT = "run `atoll key create` in a terminal, or see approve_keys_without_terminal in SECURITY.md"


class Granting:
    def __init__(self, store: Store, *, freely: bool) -> None:
        self._store = store
        self._freely = freely
        self._challenges = Challenges()

    async def challenge(self, who: Principal, name: str, scopes: Iterable[str]) -> bool:
        """Show on the caller's terminal what it takes to make this key; whether anything is needed."""
        if not self._needed(who, scopes):
            return False
        wanted = _subject(name, scopes)
        asks = f"a key {visible(name[:80])} is about to be made that can approve in your place."
        await asyncio.to_thread(self._challenges.ask, wanted, asks, self._place())
        return True

    def check(self, who: Principal, name: str, scopes: Iterable[str], answer: str | None) -> None:
        """PermissionDenied unless this caller may make this key."""
        if self._needed(who, scopes):
            self._challenges.check(_subject(name, scopes), answer, self._place(), HINT)

    def _needed(self, who: Principal, scopes: Iterable[str]) -> bool:
        return not self._freely and not isinstance(who, KeyHolder) and not POWERFUL.isdisjoint(scopes)

    def _place(self) -> Place:
        place = place_of_caller("a key that can approve", HINT)
        if any(place[0] & frozenset(row["sessions"]) for row in self._store.approvals(None)):
            raise errors.PermissionDenied(
                "this login session waits for an approval itself", hint="make the key in another terminal"
            )
        return place


def _subject(name: str, scopes: Iterable[str]) -> str:
    return f"{name}\0{','.join(sorted(set(scopes)))}"
