"""Fair shares of the broker's one loop: each sandbox has a lane, and lanes are served in turn.

Everything that a sandbox makes the broker do waits in its lane: the sockets of its connections in an epoll set of their own,
which is one descriptor to the loop however many there are, and its DNS packets and new connections in a short queue. The time
spent on a lane is charged to it. A lane that has used less than the average of those that were active in the last moments is
served at once. The others wait in a row, and together get a slice of each turn of the loop. So a lane that uses little waits
for one slice at most, whatever the others send, and a lane that is alone gets everything.
"""

import asyncio
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final

SLICE: Final = 0.001  # seconds of processor time for busy lanes, in each turn of the loop
QUANTUM: Final = 0.0005  # of one busy lane, before the next one has its turn
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
    """What is wanted of one socket."""

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
        self._level = turns.level - BURST  # what it has used, on the scale of `Turns.level`
        self.used = 0.0
        self.busy = False
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
        self._turns.wake(self)
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

    def is_light(self) -> bool:
        """Has the lane used less than the average?"""
        return self._level < self._turns.level

    def weight(self) -> float:
        return self._level

    def charge(self, seconds: float) -> None:
        self.used += seconds
        average = self._turns.count(self, seconds)
        self._level = min(max(self._level, average - BURST) + seconds, average + DEBT)

    def serve(self, seconds: float) -> bool:
        """Work for about that long; is there more to do?"""
        start = time.thread_time()
        try:
            # Half of the time for what is new, so that it cannot keep what is open from going on.
            while self._jobs and not self.closed:
                callback, args = self._jobs.popleft()
                _call(callback, args)
                if time.thread_time() - start >= seconds / 2:
                    break
            return not self.closed and (self._serve_sockets(start + seconds) or bool(self._jobs))
        finally:
            self.charge(time.thread_time() - start)

    def _serve_sockets(self, end: float) -> bool:
        while True:
            events = self._epoll.poll(0, _BATCH)
            for fd, mask in events:
                watch = self._watched.get(fd)
                if watch is not None and mask & _WRITE and watch.on_write is not None:
                    _call(*watch.on_write)
                    watch = self._watched.get(fd)
                if watch is not None and mask & _READ and watch.on_read is not None:
                    _call(*watch.on_read)
                if self.closed:
                    return False
                if time.thread_time() >= end:
                    return True
            if len(events) < _BATCH:
                return False


class Turns:
    """All lanes, and the loop that serves them."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._busy: deque[Lane] = deque()
        self._scheduled = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._active: set[Lane] = set()
        self._active_before = 0
        self._woken: dict[Lane, None] = {}
        self._epoch = 0.0
        self.level = 0.0  # what a lane that is always active has used on average

    def watch(self, lane: Lane) -> None:
        self._loop.add_reader(lane.fileno(), self.ready, lane)

    def unwatch(self, lane: Lane) -> None:
        self._loop.remove_reader(lane.fileno())

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def ready(self, lane: Lane) -> None:
        """A lane has work: serve it now, or let it wait for its turn."""
        if lane.busy or lane.closed:
            return
        if lane.is_light() and not lane.serve(QUANTUM):
            return
        if not lane.closed:
            self._queue(lane)

    def wake(self, lane: Lane) -> None:
        """A lane got a job. It is looked at when everything that has arrived is in its lane."""
        if not lane.busy and lane not in self._woken:
            if not self._woken:
                self._loop.call_soon(self._serve_woken)
            self._woken[lane] = None

    def _serve_woken(self) -> None:
        """The light ones at once, the others in their turn. Those that have used the least are first."""
        woken, self._woken = self._woken, {}
        for lane in sorted(woken, key=Lane.weight):
            self.ready(lane)

    def count(self, lane: Lane, seconds: float) -> float:
        """Add to what was used in all; the average of the active lanes after that."""
        now = time.monotonic()
        if now - self._epoch > ACTIVE_SECONDS:
            self._active_before = len(self._active) if now - self._epoch < 2 * ACTIVE_SECONDS else 0
            self._active.clear()
            self._epoch = now
        self._active.add(lane)
        self.level += seconds / max(len(self._active), self._active_before)
        return self.level

    def _queue(self, lane: Lane) -> None:
        lane.busy = True
        self.unwatch(lane)
        self._busy.append(lane)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """One slice for the busy lanes; the loop looks at everybody else before the next one."""
        end = time.thread_time() + SLICE
        for _ in range(len(self._busy)):
            lane = self._busy.popleft()
            if not lane.closed and lane.serve(QUANTUM):
                self._busy.append(lane)
            else:
                lane.busy = False
                if not lane.closed:
                    self.watch(lane)
            if time.thread_time() >= end:
                break
        self._scheduled = bool(self._busy)
        if self._scheduled:
            self._loop.call_soon(self._turn)


class _Charged:
    """Awaits a coroutine and charges the time of each of its steps."""

    def __init__(self, lane: Lane, work: Any) -> None:
        self._lane, self._work = lane, work

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = self._work.send
        value: Any = None
        while True:
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


def _call(callback: Callback, args: tuple[Any, ...]) -> None:
    """Run a callback; nothing it raises may stop the broker."""
    try:
        callback(*args)
    except Exception:
        _log.exception("in %s", getattr(callback, "__name__", callback))
