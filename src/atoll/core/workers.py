"""Threads for heavy work, shared fairly: archives, manifests, snapshot lists.

Each owner has so many threads at once (`[accounts.owner] threads`) and a queue of its own behind them, all together as many
as `[accounts.total] threads`, of which the last eighth is for owners that have none. So nobody waits for another's archive,
and short work of the daemon, which uses the loop's own threads, never waits behind one.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from atoll import errors
from atoll.accounts import THREADS, Accounts, Lease, owner

MOST = 16  # threads, where the config sets no cap
MAX_WAITING = 64  # of one owner
T = TypeVar("T")


class Workers:
    """A pool of threads that is charged to the owners of the work."""

    def __init__(self, books: Accounts) -> None:
        self._books = books
        self._pool = ThreadPoolExecutor(books.cap(THREADS) or MOST, thread_name_prefix="work")
        self._waiting: dict[str, deque[asyncio.Future[Lease]]] = {}

    async def run(self, name: str, work: Callable[..., T], *args: object) -> T:
        """Run `work` in a thread of this owner's share and return its result. Exhausted when too much waits already."""
        loop = asyncio.get_running_loop()
        lease = await self._place(name)
        try:
            done: Future[T] = self._pool.submit(work, *args)
        except BaseException:
            self._leave(lease)
            raise
        # The thread goes on when its caller leaves, and keeps its place until it ends.
        done.add_done_callback(lambda _: _tell(loop, self._leave, lease))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _place(self, name: str) -> Lease:
        if name not in self._waiting:
            try:
                return self._books.lease(THREADS, 1, owner(name))
            except errors.Exhausted:
                pass
        queue = self._waiting.setdefault(name, deque())
        if len(queue) >= MAX_WAITING:
            raise errors.Exhausted(
                f"{MAX_WAITING} heavy requests of yours are waiting already", hint="wait until some are done"
            )
        turn: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(turn.result())
            raise

    def _leave(self, lease: Lease) -> None:
        lease.end()
        self._give_places()

    def _give_places(self) -> None:
        """The first of each owner's queue gets a place, if there is one for it; then the second, and so on."""
        given = True
        while given:
            given = False
            for name, queue in list(self._waiting.items()):
                while queue and queue[0].done():
                    queue.popleft()
                if queue:
                    try:
                        lease = self._books.lease(THREADS, 1, owner(name))
                    except errors.Exhausted:
                        continue
                    queue.popleft().set_result(lease)
                    given = True
                if not queue:
                    del self._waiting[name]


def _tell(loop: asyncio.AbstractEventLoop, leave: Callable[[Lease], None], lease: Lease) -> None:
    with suppress(RuntimeError):  # the daemon has ended meanwhile
        loop.call_soon_threadsafe(leave, lease)
