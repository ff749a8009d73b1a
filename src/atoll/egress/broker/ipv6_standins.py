"""IPv4 addresses that stand for others, and mean something in one sandbox only.

The resolver hands one out for an allowed name, the router's rules and the grants treat it like any other address, and only
the broker knows where it leads. A sandbox, which has no IPv6, so reaches hosts that have nothing else, by addresses of
198.18.0.0/15, which no name may lead to by itself. A sandbox without a link gets no other addresses than such, of
127.64.0.0/10: they exist on its loopback interface, where somebody listens and carries what comes to the broker.
"""

import secrets
import socket
from collections.abc import Callable
from typing import Final

PUBLIC: Final = ("198.18.0.0", 1 << 17)
LOOPBACK: Final = ("127.64.0.0", 1 << 22)
MAX_STANDINS: Final = 4096


class StandIns:
    """The table of one sandbox. Bounded: when full, those that `in_use` knows no more are forgotten first."""

    def __init__(self, in_use: Callable[[str], bool], of: tuple[str, int] = PUBLIC) -> None:
        self._in_use = in_use
        self._base, self._span = int.from_bytes(socket.inet_aton(of[0]), "big"), of[1]
        self._real: dict[str, str] = {}
        self._standing: dict[str, str] = {}
        # Anywhere, so that an address a program kept from an earlier broker hardly ever means another host now.
        self._next = secrets.randbelow(self._span)

    def __contains__(self, address: str) -> bool:
        return address in self._real

    def real(self, address: str) -> str:
        """Where this address leads: the one it stands for, or itself."""
        return self._real.get(address, address)

    def give(self, real: str) -> str | None:
        """The address that stands for another one; None when there is no room."""
        if real in self._standing:
            return self._standing[real]
        if len(self._real) >= MAX_STANDINS:
            for old in [old for old in self._real if not self._in_use(old)]:
                del self._standing[self._real.pop(old)]
        if len(self._real) >= MAX_STANDINS:
            return None
        while True:
            self._next = (self._next + 1) % self._span
            address = socket.inet_ntoa((self._base + self._next).to_bytes(4, "big"))
            if address not in self._real and not self._in_use(address):
                break
        self._real[address], self._standing[real] = real, address
        return address
