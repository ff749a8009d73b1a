"""Whether a crowd keeps the broker busy: many sandboxes at once that together make it work without end.

The broker goes before programs that compute, so that it answers at once. When many sandboxes keep it busy without end, that same
priority gives it a whole processor, and a neighbour's own program, and the servers it talks to, wait for what is left. So the
broker gives its priority up while a crowd is there, and gets it back when it is calm.
"""

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Final

LANES: Final = 4  # that are served in the time between two looks; fewer are no crowd
SHARE: Final = 0.4  # of a processor that the broker uses then
LOOK_SECONDS: Final = 0.5
CALM_LOOKS: Final = 4  # in a row, so that a flood with pauses does not change the priority all the time


class Crowd:
    """Looks at the turns of the loop now and then. `tell` is called with True when a crowd has come, with False when it has gone."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        self._loop, self._clock, self._used = loop, clock, used
        self.tell: Callable[[bool], None] = lambda there: None
        self.there = False
        self._served: set[Hashable] = set()
        self._turns = self._behind = self._calm = 0
        self._since = (0.0, 0.0)  # when it last looked, and the processor time until then
        self._looking = False

    def count(self, lane: Hashable) -> None:
        """Count a lane that is served."""
        self._served.add(lane)
        if not self._looking:
            self._looking = True
            self._since = (self._clock(), self._used())
            self._loop.call_later(LOOK_SECONDS, self.look)

    def turn(self, waiting: int) -> None:
        """Count a turn that left so many lanes waiting."""
        self._turns += 1
        self._behind += waiting >= LANES

    def look(self) -> None:
        """Judge what happened since the last look.

        What is used tells how busy the broker is while it is preferred; when it is not, programs that compute may keep it from
        using more, and then lanes are left waiting.
        """
        now, used = self._clock(), self._used()
        share = (used - self._since[1]) / max(now - self._since[0], 0.001)
        busy = len(self._served) >= LANES and (share >= SHARE or 2 * self._behind > self._turns)
        anything = bool(self._served)
        self._served.clear()
        self._turns = self._behind = 0
        self._since = (now, used)
        self._calm = 0 if busy else self._calm + 1
        there = busy or (self.there and self._calm < CALM_LOOKS)
        if there != self.there:
            self.there = there
            self.tell(there)
        self._looking = there or anything
        if self._looking:
            self._loop.call_later(LOOK_SECONDS, self.look)
