"""Connections over TCP and the callers on them, for every protocol of the TLS port.

A connection is charged to its address until a caller on it is known, and to the caller's owner from then on. Until then it
may have `STRANGER_CALLS` calls refused and lives for `STRANGER_SECONDS`; its protocol takes `STRANGER_BYTES` from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import struct
from collections.abc import Callable

from atoll import accounts
from atoll.core.access.credentials import Peer
from atoll.core.access.principals import Principal
from atoll.errors import Exhausted
from atoll.server.socket_owner import loopback_owner

MAX_CONNECTIONS = 2048
MAX_STRANGERS = 512  # of them, connections on which nobody is known yet
STRANGER_BYTES = 64 * 1024  # what is taken from a connection before its caller is known
STRANGER_CALLS = 16  # calls that may be refused before anybody is known
STRANGER_SECONDS = 60.0
UNIX = "unix"
_log = logging.getLogger(__name__)


class Visits:
    """All connections of one gateway, and how many of them have no known caller."""

    def __init__(self, books: accounts.Accounts | None = None) -> None:
        self.books = books or accounts.Accounts()
        self.strangers = 0
        self._all: set[Visit] = set()

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, transport: asyncio.Transport, cut: Callable[[str], None]) -> Visit | None:
        """Return a place for one more connection, or None. The last eighth is for those that have none.

        `cut` ends the connection, and is told why.
        """
        holder = _stranger(transport)
        others = self.books.held(accounts.CONNECTIONS, holder)
        for count, most in ((len(self._all), MAX_CONNECTIONS), (self.strangers, MAX_STRANGERS)):
            if count >= (most - most // accounts.KEPT_FOR_OTHERS if others else most):
                _log.warning("too many connections; one of %s was refused", holder)
                return None
        try:
            place = self.books.lease(accounts.CONNECTIONS, 1, holder)
        except Exhausted as full:
            _log.warning("a connection was refused: %s", full)
            return None
        visit = Visit(self, place, cut, timed=holder.name != UNIX)
        self._all.add(visit)
        self.strangers += 1
        return visit

    def leave(self, visit: Visit) -> None:
        if visit in self._all:
            self._all.discard(visit)
            self.strangers -= not visit.known


class Visit:
    """One connection: whether its caller is known, and the place it takes."""

    def __init__(self, visits: Visits, place: accounts.Lease, cut: Callable[[str], None], *, timed: bool) -> None:
        self.known = False
        self._visits = visits
        self._place = place
        self._cut = cut
        self._refused = 0
        self._clock: asyncio.TimerHandle | None = None
        if timed:
            self._clock = asyncio.get_running_loop().call_later(STRANGER_SECONDS, self._expire)

    def admit(self, who: Principal) -> bool:
        """Charge the connection to the owner of its caller; False, and the connection is cut, if it has too many."""
        if self.known:
            return True
        try:
            place = self._visits.books.lease(accounts.CONNECTIONS, 1, accounts.owner(who.owner))
        except Exhausted as full:
            self._cut(str(full))
            return False
        self.known = True
        self._visits.strangers -= 1
        self._place.end()
        self._place = place
        self._stop_clock()
        return True

    def refuse(self) -> None:
        """Count a call of an unknown caller; too many of them end a connection on which nobody is known."""
        self._refused += 1
        if not self.known and self._refused >= STRANGER_CALLS:
            self._cut("its callers are not known")

    def leave(self) -> None:
        """The connection has ended. Again is no error."""
        self._stop_clock()
        self._place.end()
        self._visits.leave(self)

    def _expire(self) -> None:
        self._clock = None
        self._cut("nobody on it is known")

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


def peer_of(transport: asyncio.Transport) -> Peer:
    """The far end of a connection, as the kernel and the TLS handshake show it."""
    sock = transport.get_extra_info("socket")
    if sock.family == socket.AF_UNIX:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, gid = struct.unpack("3i", raw)
        return Peer(UNIX, uid, gid, pid=pid)
    theirs, ours = transport.get_extra_info("peername")[:2], transport.get_extra_info("sockname")[:2]
    channel = transport.get_extra_info("ssl_object")
    der = channel.getpeercert(binary_form=True) if channel is not None else None
    finger = hashlib.sha256(der).hexdigest() if der else None
    shown = f"[{theirs[0]}]:{theirs[1]}" if ":" in theirs[0] else f"{theirs[0]}:{theirs[1]}"
    return Peer(shown, loopback_owner(theirs, ours), None, finger)


def _stranger(transport: asyncio.Transport) -> accounts.Holder:
    """The holder of a connection on which nobody is known yet."""
    sock = transport.get_extra_info("socket")
    if sock.family == socket.AF_UNIX:
        return accounts.Holder("stranger", UNIX)
    name = transport.get_extra_info("peername")
    return accounts.stranger(name[0] if name else "")
