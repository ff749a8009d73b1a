"""IPv4 addresses that stand for IPv6 ones, so that a sandbox, which has no IPv6, reaches hosts that have nothing else.

The resolver hands one out for an allowed name, the router's rules and the grants treat it like any other address, and only
the broker knows where it leads. They come from 198.18.0.0/15, which no name may lead to by itself, and mean something in
one sandbox only.
"""

import secrets
import socket
from collections.abc import Callable
from typing import Final

_BASE: Final = int.from_bytes(socket.inet_aton("198.18.0.0"), "big")
_SPAN: Final = 1 << 17
MAX_STANDINS: Final = 4096


class StandIns:
    """The table of one sandbox. Bounded: when full, those that `in_use` knows no more are forgotten first."""

    def __init__(self, in_use: Callable[[str], bool]) -> None:
        self._in_use = in_use
        self._real: dict[str, str] = {}
        self._standing: dict[str, str] = {}
        # Anywhere, so that an address a program kept from an earlier broker hardly ever means another host now.
        self._next = secrets.randbelow(_SPAN)

    def __contains__(self, address: str) -> bool:
        return address in self._real

    def real(self, address: str) -> str:
        """Where this address leads: the IPv6 one it stands for, or itself."""
        return self._real.get(address, address)

    def give(self, real: str) -> str | None:
        """The address that stands for an IPv6 one; None when there is no room."""
        if real in self._standing:
            return self._standing[real]
        if len(self._real) >= MAX_STANDINS:
            for old in [old for old in self._real if not self._in_use(old)]:
                del self._standing[self._real.pop(old)]
        if len(self._real) >= MAX_STANDINS:
            return None
        while True:
            self._next = (self._next + 1) % _SPAN
            address = socket.inet_ntoa((_BASE + self._next).to_bytes(4, "big"))
            if address not in self._real and not self._in_use(address):
                break
        self._real[address], self._standing[real] = real, address
        return address
