"""Fair shares of the broker's one loop: each sandbox has a lane, and the lane that has used the least is served first.

Everything that a sandbox makes the broker do waits in its lane: its listening sockets and connections in an epoll set of their
own, which is one descriptor to the loop however many there are, and the steps of its lookups in a queue. The processor time spent
on a lane is charged to it. Each turn of the loop is short and serves the lanes in the order of what they have used. So a lane that
uses less than its share waits for the rest of one turn at most, whatever the others send, and a lane that is alone gets
everything.
"""

import asyncio
import heapq
import itertools
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final

from atoll.egress.broker.crowd import Crowd

SLICE: Final = 0.001  # seconds of processor time for all lanes, in each turn of the loop
QUANTUM: Final = 0.0005  # of one lane, before the next one has its turn
STEP: Final = 0.0002  # what a step of a coroutine is taken for, before it is done and charged
BURST: Final = 0.004  # what a lane that was idle may use at once
DEBT: Final = 0.05  # the most a lane can owe, so that it is forgiven soon after it stops
ACTIVE_SECONDS: Final = 0.5
MAX_JOBS: Final = 8192  # a backstop: connections have a cap of their own
_BATCH: Final = 16
_READ: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
_WRITE: Final = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
_log = logging.getLogger(__name__)

Callback = Callable[..., None]


class _Watch:
    """The events wanted of one socket."""

    __slots__ = ("fd", "on_read", "on_write")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.on_read: tuple[Callback, tuple[Any, ...]] | None = None
        self.on_write: tuple[Callback, tuple[Any, ...]] | None = None

    @property
    def mask(self) -> int:
        return (select.EPOLLIN if self.on_read else 0) | (select.EPOLLOUT if self.on_write else 0)


class Lane:
    """The work of one sandbox. It has the four verbs of a loop for sockets, so that a relay can use it as one."""

    def __init__(self, turns: "Turns") -> None:
        self._turns = turns
        self._epoll = select.epoll()
        self._watched: dict[int, _Watch] = {}
        self._jobs: deque[tuple[Callback, tuple[Any, ...]]] = deque()
        self._steps: deque[asyncio.Future[None]] = deque()
        self._level = turns.level - BURST  # what it has used, on the scale of `Turns.level`
        self.used = 0.0
        self.waiting = False  # for its turn
        self.ready_in = 0  # the turn in which it began to wait
        self.longest_wait = 0  # in turns of the loop
        self.watched = False  # by the loop; not while it waits for longer than one turn
        self.closed = False
        turns.watch(self)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        """Stop for good: what still waits is forgotten."""
        if not self.closed:
            self.closed = True
            self._turns.unwatch(self)
            self._epoll.close()
            self._watched.clear()
            self._jobs.clear()
            while self._steps:
                _release(self._steps.popleft())

    # Sockets

    def add_reader(self, sock: socket.socket, callback: Callback, *args: Any) -> None:
        self._change(sock, read=(callback, args))

    def add_writer(self, sock: socket.socket, callback: Callback, *args: Any) -> None:
        self._change(sock, write=(callback, args))

    def remove_reader(self, sock: socket.socket) -> None:
        self._change(sock, read=None)

    def remove_writer(self, sock: socket.socket) -> None:
        self._change(sock, write=None)

    def forget(self, sock: socket.socket) -> None:
        """Want nothing more of a socket; before it is closed."""
        self._change(sock, read=None, write=None)

    def _change(self, sock: socket.socket, **wanted: tuple[Callback, tuple[Any, ...]] | None) -> None:
        fd = sock.fileno()
        if self.closed or fd < 0:
            return
        watch = self._watched.get(fd)
        if watch is None:
            watch = _Watch(fd)
        before = watch.mask
        if "read" in wanted:
            watch.on_read = wanted["read"]
        if "write" in wanted:
            watch.on_write = wanted["write"]
        after = watch.mask
        if not after:
            if before:
                del self._watched[fd]
                self._epoll.unregister(fd)
        elif not before:
            self._watched[fd] = watch
            self._epoll.register(fd, after)
        elif before != after:
            self._epoll.modify(fd, after)

    # Work

    def submit(self, callback: Callback, *args: Any) -> bool:
        """Do something for this sandbox in its turn; False when too much waits already."""
        if self.closed or len(self._jobs) >= MAX_JOBS:
            return False
        self._jobs.append((callback, args))
        self._turns.ready(self)
        return True

    @property
    def backlog(self) -> int:
        """How many jobs wait."""
        return len(self._jobs)

    def spawn(self, work: Generator[Any, Any, Any] | Any) -> asyncio.Task[Any]:
        """Run a coroutine whose steps are charged to this lane."""
        return self._turns.spawn(self._charged(work))

    async def _charged(self, work: Any) -> Any:
        return await _Charged(self, work)

    def wait_for_turn(self) -> "asyncio.Future[None] | None":
        """Return what the next step of a coroutine waits for; None where it may go on at once."""
        if self.closed or self._level < self._turns.level - BURST / 2 or not self._turns.contended:
            return None
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._steps.append(turn)
        self._turns.ready(self)
        return turn

    def weight(self) -> float:
        return self._level

    def charge(self, seconds: float) -> None:
        self.used += seconds
        average = self._turns.count(self, seconds)
        self._level = min(max(self._level, average - BURST) + seconds, average + DEBT)

    def serve(self, seconds: float, start: float) -> bool:
        """Work for about that long; is there more to do? `start` is the thread's processor time now."""
        # How long it may go on is told by the cheap clock; what is charged, by that of the processor.
        end = time.monotonic() + seconds
        try:
            if self._steps:
                _release(self._steps.popleft())
                self._turns.spend(STEP)
            # Half of the time for what is new, so that it cannot keep what is open from going on.
            while self._jobs and not self.closed:
                callback, args = self._jobs.popleft()
                _call(callback, args)
                if time.monotonic() >= end - seconds / 2:
                    break
            return not self.closed and (self._serve_sockets(end) or bool(self._jobs or self._steps))
        finally:
            self._turns.now = time.thread_time()
            self.charge(self._turns.now - start)

    def _serve_sockets(self, end: float) -> bool:
        """Serve each socket that is ready once, until none is left or the time is over; is there more?

        A socket is not served again in the same turn: what comes meanwhile is then read in larger pieces.
        """
        served: set[int] = set()
        while events := [event for event in self._epoll.poll(0, _BATCH) if event[0] not in served]:
            for fd, mask in events:
                served.add(fd)
                watch = self._watched.get(fd)
                if watch is not None and mask & _WRITE and watch.on_write is not None:
                    _call(*watch.on_write)
                    watch = self._watched.get(fd)
                if watch is not None and mask & _READ and watch.on_read is not None:
                    _call(*watch.on_read)
                if self.closed:
                    return False
                if time.monotonic() >= end:
                    return True
        return False


class Turns:
    """All lanes, and the loop that serves them."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._waiting: list[tuple[float, int, Lane]] = []  # a heap, by what each lane has used
        self._order = itertools.count()
        self._scheduled = False
        self._number = 0  # of the turns so far
        self._end = 0.0
        self.now = 0.0  # processor time of this thread, when a lane was last served
        self._tasks: set[asyncio.Task[Any]] = set()
        self._active: set[Lane] = set()
        self._active_before = 0
        self._epoch = 0.0
        self.level = 0.0  # what a lane that is always active has used on average
        self.contended = False  # did the last turn leave a lane waiting?
        self.crowd = Crowd(self._loop)

    def watch(self, lane: Lane) -> None:
        if not lane.watched:
            lane.watched = True
            self._loop.add_reader(lane.fileno(), self.ready, lane)

    def unwatch(self, lane: Lane) -> None:
        if lane.watched:
            lane.watched = False
            self._loop.remove_reader(lane.fileno())

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def ready(self, lane: Lane) -> None:
        """A lane has work: it waits for its turn, which begins when everything that has arrived is known."""
        if not lane.waiting and not lane.closed:
            lane.waiting = True
            lane.ready_in = self._number
            self._push(lane)
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._turn)

    def spend(self, seconds: float) -> None:
        """Count time of this turn that is used after it, by what the turn has set off."""
        self._end -= seconds

    def count(self, lane: Lane, seconds: float) -> float:
        """Add to what was used in all; the average of the active lanes after that."""
        now = time.monotonic()
        if now - self._epoch > ACTIVE_SECONDS:
            self._active_before = len(self._active) if now - self._epoch < 2 * ACTIVE_SECONDS else 0
            self._active.clear()
            self._epoch = now
        self._active.add(lane)
        self.crowd.count(lane)
        self.level += seconds / max(len(self._active), self._active_before)
        return self.level

    def _push(self, lane: Lane) -> None:
        heapq.heappush(self._waiting, (lane.weight(), next(self._order), lane))

    def _turn(self) -> None:
        """Serve lanes for one slice; the loop looks for what is new before the next one."""
        self.now = time.thread_time()
        self._end = self.now + SLICE
        self._number += 1
        while self._waiting:
            lane = heapq.heappop(self._waiting)[2]
            lane.longest_wait = max(lane.longest_wait, self._number - lane.ready_in)
            if not lane.closed and lane.serve(QUANTUM, self.now):
                lane.ready_in = self._number
                self._push(lane)
            else:
                lane.waiting = False
                if not lane.closed:
                    self.watch(lane)
            if self.now >= self._end:
                break
        self._scheduled = self.contended = bool(self._waiting)
        self.crowd.turn(len(self._waiting))
        if self._scheduled:
            for _, _, lane in self._waiting:
                self.unwatch(lane)
            self._loop.call_soon(self._turn)


class _Charged:
    """Awaits a coroutine and charges the time of each of its steps."""

    def __init__(self, lane: Lane, work: Any) -> None:
        self._lane, self._work = lane, work

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = self._work.send
        value: Any = None
        while True:
            turn = self._lane.wait_for_turn()
            if turn is not None:
                try:
                    yield from turn
                except GeneratorExit:
                    self._work.close()
                    raise
                except BaseException as err:
                    value, step = err, self._work.throw
            start = time.thread_time()
            try:
                waiting = step(value)
            except StopIteration as end:
                return end.value
            finally:
                self._lane.charge(time.thread_time() - start)
            try:
                value, step = (yield waiting), self._work.send
            except GeneratorExit:
                self._work.close()
                raise
            except BaseException as err:
                value, step = err, self._work.throw


def _release(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)


def _call(callback: Callback, args: tuple[Any, ...]) -> None:
    """Run a callback; nothing it raises may stop the broker."""
    try:
        callback(*args)
    except Exception:
        _log.exception("in %s", getattr(callback, "__name__", callback))
