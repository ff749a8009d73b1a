"""Ends what a key or certificate has open when it is revoked or expires.

Every door asks who is calling when a call begins. Most calls are over before anything changes; what stays open is
registered here: calls by their task, and what outlives a call (sessions, URLs, requests for approval) by its key. The
daemon's own revocations are looked for at once, all others within `INTERVAL` seconds.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from atoll.core.access.principals import Principal
from atoll.errors import AtollError, PermissionDenied, Unauthenticated

if TYPE_CHECKING:
    from atoll.core.access.credentials import KeyHolder

log = logging.getLogger("atoll.rights")

INTERVAL = 2.0
End = Callable[[AtollError], None]
Recheck = Callable[["KeyHolder"], None]


class RightsWatch:
    """The credentials in use, and what each has open."""

    def __init__(self, recheck: Recheck) -> None:
        self._recheck = recheck
        self._followed: dict[KeyHolder, set[End]] = {}
        self._lost: list[Callable[[str], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def on_lost_key(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the owner's name whenever a key that was followed counts no more."""
        self._lost.append(tell)

    def during(self, who: Principal) -> AbstractContextManager["OpenCall | None"]:
        """The current task ends with the refusal as its error when the credential is taken away meanwhile."""
        return OpenCall(self, who) if who.kind == "key" else nullcontext()

    def hold(self, who: Principal, end: End) -> Callable[[], None]:
        """Call `end` once when the credential is taken away; the answer releases it."""
        if who.kind != "key":
            return lambda: None
        holder: KeyHolder = who  # type: ignore[assignment]  # a principal of that kind is one
        self.follow(replace(holder, fingerprint=""))
        self.follow(holder)
        self._followed[holder].add(end)
        return lambda: self._release(holder, end)

    def follow(self, who: "KeyHolder") -> None:
        """Look at this credential from now on. A key is followed until it is lost, a certificate while it is used."""
        self._followed.setdefault(who, set())
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._tick)

    def look(self) -> None:
        """End what is open with credentials that no longer count."""
        for who in list(self._followed):
            try:
                self._recheck(who)
            except (PermissionDenied, Unauthenticated) as refusal:
                self._end(who, refusal)
            except (AtollError, sqlite3.Error) as trouble:  # new calls are refused meanwhile
                log.error("credentials cannot be checked: %s", trouble)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._followed.clear()

    def _tick(self) -> None:
        self._timer = None
        self.look()
        if self._followed:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._tick)

    def _end(self, who: "KeyHolder", refusal: AtollError) -> None:
        for end in self._followed.pop(who, set()):
            end(refusal)
        if not who.fingerprint:
            for tell in self._lost:
                tell(who.owner)

    def _release(self, who: "KeyHolder", end: End) -> None:
        found = self._followed.get(who)
        if found is not None:
            found.discard(end)
            if not found and who.fingerprint:
                del self._followed[who]


class OpenCall:
    """One call: its task is cancelled at the loss of its credential, and the cancellation becomes the refusal."""

    def __init__(self, watch: RightsWatch, who: Principal) -> None:
        self._watch = watch
        self._who = who
        self._task: asyncio.Task[Any] | None = None
        self.refusal: AtollError | None = None
        self._release: Callable[[], None] = lambda: None

    def __enter__(self) -> "OpenCall":
        self._task = asyncio.current_task()
        self._release = self._watch.hold(self._who, self._cancel)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._release()
        if self.refusal is not None and kind is asyncio.CancelledError:
            assert self._task is not None
            self._task.uncancel()
            raise self.refusal from None

    def _cancel(self, refusal: AtollError) -> None:
        self.refusal = refusal
        if self._task is not None:
            self._task.cancel()
