"""Addresses the resolver has handed to one sandbox: for which names, and until when."""

from collections.abc import Callable, Iterator
from typing import Final

MAX_ADDRESSES: Final = 8192
MAX_NAMES_PER_ADDRESS: Final = 64


class Grants:
    """The table of one sandbox. Bounded: when full, new grants fail until old ones run out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._table: dict[str, dict[str, float]] = {}

    def add(self, address: str, name: str, seconds: float) -> bool:
        """Record that `name` was answered with `address`; False when the table is full."""
        names = self._table.get(address)
        if names is None:
            if len(self._table) >= MAX_ADDRESSES:
                self.expire()
            if len(self._table) >= MAX_ADDRESSES:
                return False
            names = self._table[address] = {}
        if name not in names and len(names) >= MAX_NAMES_PER_ADDRESS:
            del names[min(names, key=names.__getitem__)]
        names[name] = max(names.get(name, 0.0), self._clock() + seconds)
        return True

    def names(self, address: str) -> tuple[str, ...]:
        """The names for which this address may be used now, latest grant first."""
        now = self._clock()
        live = [(end, name) for name, end in self._table.get(address, {}).items() if end > now]
        return tuple(name for _, name in sorted(live, reverse=True))

    def holds(self, address: str, name: str) -> bool:
        return self._table.get(address, {}).get(name, 0.0) > self._clock()

    def live(self) -> Iterator[tuple[str, str, float]]:
        """Every grant in force: address, name, seconds left."""
        now = self._clock()
        for address, names in self._table.items():
            for name, end in names.items():
                if end > now:
                    yield address, name, end - now

    def expire(self) -> None:
        now = self._clock()
        for address in list(self._table):
            names = self._table[address]
            for name in [name for name, end in names.items() if end <= now]:
                del names[name]
            if not names:
                del self._table[address]

    def revoke(self, keep: Callable[[str], bool]) -> list[str]:
        """Drop the names `keep` refuses; the addresses that no longer have any name."""
        gone = []
        for address in list(self._table):
            names = self._table[address]
            for name in [name for name in names if not keep(name)]:
                del names[name]
            if not names:
                del self._table[address]
                gone.append(address)
        return gone
