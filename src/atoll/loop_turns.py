"""Turns on the daemon's loop for work that comes in many pieces, such as long lists.

In each round of the loop one piece is done, whoever asks: owners take turns, and the requests of one owner take turns among
themselves. So twenty long lists at once delay a short request as much as one does. What many agents send in bulk is read in the
same way (`guest/connection.py`).
"""

import asyncio
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary


class LoopTurns:
    """Wait with `turn` before each piece. A piece is short: a few hundred entries."""

    def __init__(self) -> None:
        self._waiting: dict[
            str, deque[asyncio.Future[None]]
        ] = {}  # by owner, in the order in which they have their turn
        self._scheduled = False

    async def turn(self, owner: str) -> None:
        """Return when this owner may do one piece; others have had theirs."""
        await self._queue(owner)

    def call(self, owner: str, work: Callable[[], None]) -> None:
        """Let `work` be done when this owner may do one piece."""
        self._queue(owner).add_done_callback(lambda _: work())

    def _queue(self, owner: str) -> asyncio.Future[None]:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._give)
        return place

    def _give(self) -> None:
        """Let one piece be done, and look again in the next round of the loop."""
        while self._waiting:
            owner = next(iter(self._waiting))
            queue = self._waiting.pop(owner)
            place = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind the others
            if not place.done():  # else its caller has gone
                place.set_result(None)
                break
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._give)


_bulk: "WeakKeyDictionary[asyncio.AbstractEventLoop, LoopTurns]" = WeakKeyDictionary()


def bulk_turns() -> LoopTurns:
    """The turns of the running loop for what comes in bulk from agents."""
    loop = asyncio.get_running_loop()
    found = _bulk.get(loop)
    if found is None:
        found = _bulk[loop] = LoopTurns()
    return found
