"""Shares of this machine's ports towards each destination.

A connection to a server takes one of the machine's ports for that server's address and port. When the broker ends it first, the kernel
keeps the port for a minute more. Without shares a few sandboxes that open and close connections would take all ports towards a
server that others use too, and long before that each further dial would cost a search through thousands of taken ports.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from atoll.accounts import Holder

KEPT_SECONDS: Final = 60.0
OWN: Final = 64  # ports towards one destination that every sandbox may have, whatever the others hold
_RANGE_FILE: Final = "/proc/sys/net/ipv4/ip_local_port_range"
_USUAL_COUNT: Final = 28232

Destination = tuple[str, int]


def count_ports() -> int:
    """How many ports the kernel chooses from in this network namespace."""
    try:
        with open(_RANGE_FILE, encoding="ascii") as handle:
            low, high = map(int, handle.read().split())
    except (OSError, ValueError):
        return _USUAL_COUNT
    return max(1, high - low + 1)


@dataclass(slots=True)
class _Taken:
    """The ports towards one destination: all of them, by holder, and those that the kernel keeps until a time."""

    count: int = 0
    held: dict[Holder, int] = field(default_factory=dict)
    kept: deque[tuple[float, Holder]] = field(default_factory=deque)

    def free(self, who: Holder) -> None:
        self.count -= 1
        left = self.held[who] - 1
        if left:
            self.held[who] = left
        else:
            del self.held[who]


class LocalPorts:
    """Counts ports by destination and sandbox. `count` is how many there are; three eighths of them may be taken, because the
    kernel looks at one half first and finds a free port there quickly while a quarter of it is free."""

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = count * 3 // 8
        self._clock = clock
        self._taken: dict[Destination, _Taken] = {}

    def take(self, who: Holder, to: Destination) -> bool:
        """Count one more port; False when this sandbox has its share. A share is as much as is still free, so that one who comes
        later gets as much as those before it."""
        self._expire(to)
        taken = self._taken.setdefault(to, _Taken())
        mine = taken.held.get(who, 0)
        if mine >= OWN and mine >= self._most - taken.count:
            return False
        taken.count += 1
        taken.held[who] = mine + 1
        return True

    def give(self, who: Holder, to: Destination, *, kept: bool) -> None:
        """One port less: at once, or in a minute when the kernel keeps it."""
        taken = self._taken[to]
        if kept:
            taken.kept.append((self._clock() + KEPT_SECONDS, who))
        else:
            taken.free(who)
            if not taken.count:
                del self._taken[to]

    def expire(self) -> None:
        """Forget the ports that the kernel keeps no longer."""
        for to in list(self._taken):
            self._expire(to)

    def _expire(self, to: Destination) -> None:
        taken, now = self._taken.get(to), self._clock()
        if taken is None:
            return
        while taken.kept and taken.kept[0][0] <= now:
            taken.free(taken.kept.popleft()[1])
        if not taken.count:
            del self._taken[to]

    def __len__(self) -> int:
        """The number of destinations with a taken port."""
        return len(self._taken)
