"""The order in which the broker serves lanes, counted in pieces of work and not in seconds."""

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

from atoll.egress.broker.crowd import Crowd
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


async def test_a_crowd_is_told_of_once_and_so_is_its_end(turns: Turns, flooders: list[Flooder]) -> None:
    told, changed = list[bool](), asyncio.Event()

    def tell(there: bool) -> None:
        told.append(there)
        changed.set()

    turns.crowd.tell = tell
    await serve_until(changed)
    assert told == [True] and turns.crowd.there
    changed.clear()
    for each in flooders[3:]:  # what is left is busy without end, and no crowd
        each.close()
    await serve_until(changed)
    assert told == [True, False]


class Looks:
    """A crowd whose looks come when the test says so, and whose processor time is what the test says."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.told: list[bool] = []
        loop = asyncio.get_running_loop()
        self.crowd = Crowd(loop, lambda: self.now, lambda: self.used)
        self.crowd.tell = self.told.append

    def look(self, lanes: int, used: float, behind: int = 0) -> None:
        """Let half a second pass in which so many lanes were served in ten turns, and so many of these left a crowd waiting."""
        for lane in range(lanes):
            self.crowd.count(lane)
        for turn in range(10):
            self.crowd.turn(20 if turn < behind else 0)
        self.now += 0.5
        self.used += used
        self.crowd.look()


async def test_few_or_idle_lanes_are_no_crowd() -> None:
    looks = Looks()
    for lanes, used in ((3, 0.5), (20, 0.1), (0, 0.5)):
        looks.look(lanes, used)
    assert looks.told == []


async def test_a_crowd_goes_when_it_was_calm_for_a_while() -> None:
    looks = Looks()
    for used in (0.3, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0):  # a flood with pauses
        looks.look(20, used)
    assert looks.told == [True]
    looks.look(20, 0.0)
    assert looks.told == [True, False]


async def test_a_crowd_that_is_kept_waiting_by_other_programs_is_one_still() -> None:
    looks = Looks()
    looks.look(20, 0.4)
    for _ in range(10):
        looks.look(20, 0.02, behind=9)
    assert looks.told == [True]
