"""Answers of a hostile interpreter server, piece by piece: others have their turn, and memory is charged for."""

import asyncio
from collections.abc import AsyncIterator

import h11

from atoll.accounts import MEMORY, Accounts, owner
from atoll.core.interpreter.talk import Answer

PIECES = 20_000


async def test_many_small_pieces_leave_others_their_turn() -> None:
    """Lines of one byte in chunks of two: while they are read, another task of the loop runs hundreds of times."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    assert isinstance(connection.next_event(), h11.Response)

    async def received() -> AsyncIterator[bytes]:
        yield b"2\r\nx\n\r\n" * PIECES + b"0\r\n\r\n"

    turns = 0

    async def neighbour() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    accounts = Accounts()
    other = asyncio.create_task(neighbour())
    with accounts.lease(MEMORY, 0, owner("a")) as held:
        lines = [line async for line in Answer(200, connection, received()).lines(held)]  # type: ignore[arg-type]
    other.cancel()
    assert len(lines) == PIECES and turns >= PIECES // 100
    assert accounts.snapshot() == {}
