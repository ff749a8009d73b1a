"""Ports of sandboxes that answer at a URL. The URL holds a secret nobody guesses; who has it needs nothing else.

Exposures are kept with their sandbox: they survive restarts of both and end with it. The door that listens belongs to
the gateway; it asks here whose a secret is.
"""

import hashlib
import ipaddress
import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from atoll import errors
from atoll.core.access.audited_verbs import Part, verb
from atoll.core.access.credentials import Doorkeeper, KeyHolder
from atoll.core.access.principals import Principal
from atoll.core.commands.history import History
from atoll.core.sandboxes.verbs import Sandboxes
from atoll.core.store.records import Store
from atoll.core.store.typed import KeptExposure, SandboxRow
from atoll.model import Exposure

MOST = 64  # of one sandbox
TOKEN_BYTES = 20


@dataclass(frozen=True, slots=True)
class Target:
    """Where a secret leads."""

    owner: str
    sandbox: str
    port: int
    host: str

    @property
    def principal(self) -> Principal:
        """The owner's rights for this one purpose."""
        return Principal(self.owner, -1, -1, "exposure")


class Door(Protocol):
    """The listener outside."""

    async def open(self) -> None: ...  # idempotent

    def url(self, token: str) -> str: ...

    def site_url(self, token: str) -> str: ...

    def cut(self, target: Target) -> None: ...  # end the connections that lead there


class Exposures(Part):
    """All exposed ports of this daemon."""

    def __init__(self, sandboxes: Sandboxes, store: Store, history: History, keeper: Doorkeeper) -> None:
        self._sandboxes = sandboxes
        self._keeper = keeper
        self._store = store
        self._history = history
        self._targets: dict[bytes, Target] = {}
        self._door: Door | None = None

    async def attach(self, door: Door) -> None:
        """From now on this is the door; it opens when the first port is exposed, or at once if some are already."""
        self._door = door
        for row in self._store.living():
            for port, kept in _kept(row).items():
                target = Target(row["owner"], row["id"], int(port), kept["host"])
                digest = _digest(kept["token"])
                self._targets[digest] = target
                if not self._keeper.follow_owner(row["owner"], kept.get("key", "")):
                    self._end(digest, target)
        if self._targets:
            await door.open()

    @verb("ports.expose")
    async def expose(self, who: Principal, ref: str, port: int, host: str = "127.0.0.1") -> Exposure:
        """A URL for a port inside, whether or not something listens there yet. Again for the same port: the same URL."""
        if not 1 <= port <= 65535:
            raise errors.InvalidArgument("a port is a number from 1 to 65535")
        host = _address(host)
        key = who.key_id if isinstance(who, KeyHolder) else ""
        live = self._sandboxes.reach(who, ref)
        door = self._need_door()
        await door.open()
        async with live.changing:
            row, kept = self._record(live.id)
            found = kept.get(str(port))
            if found is None and len(kept) >= MOST:
                raise errors.Exhausted(f"{MOST} ports of this sandbox are exposed already", hint="unexpose some")
            if found is None or found["host"] != host or found.get("key", key) != key:
                same = found is not None and found.get("key", key) == key  # another key gets another secret
                token = found["token"] if found is not None and same else secrets.token_hex(TOKEN_BYTES)
                if found is not None:
                    self._targets.pop(_digest(found["token"]), None)
                found = {"token": token, "host": host, "started_at": time.time(), "key": key}
                self._write(row, {**kept, str(port): found})
                self._targets[_digest(token)] = Target(live.owner, live.id, port, host)
                self._history.record(live.id, live.owner, "exposed", port=port, host=host, by=who.owner)
        live.touch()
        return self._shown(door, live.id, port, found)

    @verb("ports.unexpose")
    async def unexpose(self, who: Principal, ref: str, port: int) -> bool:
        """Close it and what is open through it; false when it was not exposed."""
        row = self._sandboxes.known(who, ref)
        live = self._sandboxes.live.get((who.owner, row["id"]))
        if live is not None:
            async with live.changing:
                return self._close(who, row["id"], port)
        return self._close(who, row["id"], port)

    def _close(self, who: Principal, sandbox: str, port: int) -> bool:
        row, kept = self._record(sandbox)
        found = kept.pop(str(port), None)
        if found is None:
            return False
        self._write(row, kept)
        target = self._targets.pop(_digest(found["token"]), None)
        if target is not None and self._door is not None:
            self._door.cut(target)
        self._history.record(sandbox, who.owner, "unexposed", port=port, by=who.owner)
        return True

    def end_all(self, owner: str) -> None:
        """Close every URL of an owner whose key counts no more: who had the key knows them."""
        for digest, target in list(self._targets.items()):
            if target.owner == owner:
                self._end(digest, target)

    def _end(self, digest: bytes, target: Target) -> None:
        """Nobody comes in from now on; the record follows when it can be written."""
        self._targets.pop(digest, None)
        if self._door is not None:
            self._door.cut(target)
        self._sandboxes.tasks.spawn(self._forget(digest, target))

    async def _forget(self, digest: bytes, target: Target) -> None:
        """Take a URL out of its sandbox's record, unless the port has another one by now."""
        live = self._sandboxes.live.get((target.owner, target.sandbox))
        async with live.changing if live is not None else nullcontext():
            found = self._record(target.sandbox)[1].get(str(target.port))
            if found is not None and _digest(found["token"]) == digest:
                self._close(target.principal, target.sandbox, target.port)

    @verb("ports.list")
    async def list(self, who: Principal, ref: str) -> "list_of[Exposure]":
        row = self._sandboxes.known(who, ref)
        kept = _kept(row)
        if not kept:
            return []
        door = self._need_door()
        return [self._shown(door, row["id"], int(port), found) for port, found in sorted(kept.items(), key=_by_port)]

    def find(self, token: str) -> Target | None:
        """Whose secret is this? One of a sandbox that has ended is nobody's."""
        digest = _digest(token)
        target = self._targets.get(digest)
        if target is None:
            return None
        row = self._store.sandbox(target.sandbox)
        if row is None or row["state"] in ("ending", "ended") or str(target.port) not in _kept(row):
            del self._targets[digest]
            return None
        return target

    def _need_door(self) -> Door:
        if self._door is None:
            raise errors.Unsupported("this process has no listener for exposed ports")
        return self._door

    def _record(self, sandbox: str) -> tuple[SandboxRow, dict[str, KeptExposure]]:
        row = self._store.sandbox(sandbox)
        if row is None or row["state"] in ("ending", "ended"):
            raise errors.FailedPrecondition("the sandbox has ended")
        return row, dict(_kept(row))

    def _write(self, row: SandboxRow, kept: dict[str, KeptExposure]) -> None:
        self._store.update_sandbox(row["id"], record={**row["record"], "exposed": kept})

    @staticmethod
    def _shown(door: Door, sandbox: str, port: int, found: KeptExposure) -> Exposure:
        token = found["token"]
        return Exposure(
            sandbox_id=sandbox,
            port=port,
            host=found["host"],
            url=door.url(token),
            site_url=door.site_url(token),
            started_at=found["started_at"],
        )


list_of = list  # the class has a verb of that name

_by_port: Callable[[tuple[str, Any]], int] = lambda item: int(item[0])  # noqa: E731


def _kept(row: SandboxRow) -> dict[str, KeptExposure]:
    return row["record"].get("exposed") or {}


def _digest(token: str) -> bytes:
    """Secrets are compared by their digest, so that the time it takes says nothing about them."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _address(host: str) -> str:
    """An address as seen from inside; names are not looked up there."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        raise errors.InvalidArgument(
            f"{host!r:.80} is not an IP address", hint="127.0.0.1 is where programs inside listen"
        ) from None
