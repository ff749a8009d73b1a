"""Hostile agents that flood the daemon with frames: what one loop turn does for them is bounded, counted, not timed."""

import asyncio
import socket
import time
from collections import Counter

import pytest
from lab.scripted_agent import AGENT_SECRET

from atoll.guest import connection, wire

HELLO = wire.control(wire.HELLO, 0, {"v": 1, "secret": AGENT_SECRET})
FLOODS = {
    "credit": wire.credit(7, 0, 1),
    "events of nothing": wire.control(wire.EVENT, 7, {}),
    "empty ends": wire.eof(7, 1),
    "pongs": wire.head(0, 0, wire.PONG),
}


class Counted(connection.Connection):
    """A connection that counts how many frames each turn of the loop handles for it."""

    turn = 0
    handled: "Counter[tuple[int, int]]" = Counter()

    def _take(self, frame: wire.Frame) -> None:
        Counted.handled[Counted.turn, id(self)] += 1
        super()._take(frame)


async def _flood(sock: socket.socket, text: bytes, greeted: asyncio.Event) -> None:
    _, writer = await asyncio.open_unix_connection(sock=sock)
    try:
        writer.write(HELLO)
        await greeted.wait()
        while True:
            writer.write(text)
            await writer.drain()
    except OSError:
        pass


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_turn_handles_few_frames_of_each_agent(kind: str) -> None:
    loop = asyncio.get_running_loop()
    Counted.turn, Counted.handled = 0, Counter()
    flood, made = FLOODS[kind] * (200_000 // len(FLOODS[kind])), []
    tasks = []
    for _ in range(20):
        ours, theirs = socket.socketpair()
        _, link = await loop.create_unix_connection(Counted, sock=ours)
        made.append(link)
        greeted = asyncio.Event()
        tasks.append(asyncio.create_task(_flood(theirs, flood, greeted)))
        await link.hello()
        link.greeted = True
        greeted.set()
    Counted.handled = Counter()
    until = time.monotonic() + 3
    while time.monotonic() < until:
        Counted.turn += 1
        await asyncio.sleep(0)
    total = sum(Counted.handled.values())
    assert total > 20 * connection.FRAMES, "the flood did come through"
    assert max(Counted.handled.values()) <= connection.FRAMES
    whole = Counter[int]()
    for (turn, _), count in Counted.handled.items():
        whole[turn] += count
    busiest = sorted(whole.values())[-1]
    assert busiest <= 20 * connection.FRAMES and sum(c > 0 for c in whole.values()) > 20
    # Together they get what one alone would: so many frames in each pause.
    assert total <= 20 * connection.FRAMES + 2 * connection.FRAMES * 3 / connection.PAUSE
    for link in made:
        link.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_large_message_of_many_values_takes_little_of_a_turn() -> None:
    """A megabyte of the smallest values in one message: the loop's CPU time for it is counted."""
    for inside in (list(range(100)) * 9000, [[] for _ in range(900_000)], [{"a": 1}] * 200_000):
        payload = wire.control(wire.EVENT, 1, {"entries": inside})[9:]
        begun = time.thread_time()
        assert len(wire.message(payload)["entries"]) == len(inside)
        assert time.thread_time() - begun < 0.5
    deep: object = 1
    for _ in range(wire.MAX_DEPTH):
        deep = [deep]
    with pytest.raises(wire.WireError, match="deeply"):
        wire.message(wire.control(wire.EVENT, 1, {"x": deep})[9:])
    with pytest.raises(wire.WireError):
        wire.message(b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0")
