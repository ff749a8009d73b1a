"""The order in which the broker serves lanes, counted in pieces of work and not in seconds."""

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

from atoll.egress.broker.turns import BURST, Lane, Turns

LANES = 20


def work(seconds: float = 0.0002) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Flooder:
    """A lane that always has work: a socket that is never emptied."""

    def __init__(self, turns: Turns) -> None:
        self.lane, self.served = Lane(turns), 0
        self._ours, self._theirs = socket.socketpair()
        self._theirs.send(b"x")
        self.lane.add_reader(self._ours, self._serve)

    def _serve(self) -> None:
        self.served += 1
        work()

    def close(self) -> None:
        self.lane.close()
        self._ours.close()
        self._theirs.close()


@pytest.fixture
async def turns() -> Turns:
    return Turns()


@pytest.fixture
def flooders(turns: Turns) -> Iterator[list[Flooder]]:
    made = [Flooder(turns) for _ in range(LANES)]
    yield made
    for each in made:
        each.close()


async def serve_until(check: asyncio.Event) -> None:
    async with asyncio.timeout(60):
        await check.wait()


async def test_a_lane_that_uses_little_is_served_in_the_next_turn(turns: Turns, flooders: list[Flooder]) -> None:
    """Count what others were served between the arrival of a byte and its being read."""
    await asyncio.sleep(0.2)
    ours, theirs = socket.socketpair()
    lane, delays = Lane(turns), []
    read = asyncio.Event()

    def take() -> None:
        ours.recv(10)
        delays.append(sum(each.served for each in flooders) - before)
        read.set()

    lane.add_reader(ours, take)
    for _ in range(30):
        before = sum(each.served for each in flooders)
        theirs.send(b"x")
        await serve_until(read)
        read.clear()
        await asyncio.sleep(0.003)
    lane.close()
    ours.close()
    theirs.close()
    # One turn is a millisecond, that is about five pieces, and the lane that is served when it ends may be a little longer.
    assert sorted(delays)[len(delays) * 9 // 10] <= 20, delays


async def test_lanes_that_want_everything_get_the_same(turns: Turns, flooders: list[Flooder]) -> None:
    await asyncio.sleep(0.6)
    before = [each.lane.used for each in flooders]
    await asyncio.sleep(1.0)
    used = [each.lane.used - start for each, start in zip(flooders, before, strict=True)]
    assert max(used) <= min(used) + 2 * BURST, used


async def test_steps_of_a_busy_lane_wait_for_its_turn(turns: Turns, flooders: list[Flooder]) -> None:
    """Run the coroutines of one lane with those of others in between, however many are ready at once."""
    await asyncio.sleep(0.2)
    busy, steps = flooders[0].lane, 0

    async def look_up() -> None:
        nonlocal steps
        for _ in range(5):
            await asyncio.sleep(0)
            steps += 1
            work()

    before = sum(each.served for each in flooders[1:])
    async with asyncio.timeout(60):
        await asyncio.gather(*(busy.spawn(look_up()) for _ in range(20)))
    others = sum(each.served for each in flooders[1:]) - before
    assert steps == 100 and others >= 10 * steps, f"{others} pieces of others beside {steps} steps"


async def test_a_closed_lane_lets_its_coroutines_end(turns: Turns, flooders: list[Flooder]) -> None:
    await asyncio.sleep(0.2)
    lane = flooders[0].lane
    tasks = [lane.spawn(asyncio.sleep(0)) for _ in range(50)]
    await asyncio.sleep(0)
    lane.close()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)


async def test_a_coroutine_is_cancelled_while_it_waits_for_its_turn(turns: Turns, flooders: list[Flooder]) -> None:
    await asyncio.sleep(0.2)
    ended = []

    async def look_up() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    tasks = [flooders[0].lane.spawn(look_up()) for _ in range(10)]
    while len(ended) < 10:
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        if all(task.done() for task in tasks):
            break
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)
