"""The frame stream of the REST surface: `u8 kind | u32 length | payload`, ended by a result or an error.

A stream without one of those two was cut. Frames of kind 0 mean nothing but "still here".
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

from atoll import errors, model
from atoll.model import CellOutcome, Chunk, ExecResult, Gap, SandboxInfo, SessionInfo, Started
from atoll.server.request import Exchange, internal, wire

KEEPALIVE, STDOUT, STDERR, EVENT, RESULT, ERROR = range(6)
CONTENT_TYPE = "application/x-atoll-frames"
QUIET = 20.0  # seconds of silence after which a keepalive is sent

Item = Started | Chunk | Gap | CellOutcome | ExecResult | SandboxInfo | SessionInfo | Mapping[str, object]


def frame(kind: int, payload: bytes) -> bytes:
    return bytes((kind,)) + len(payload).to_bytes(4, "big") + payload


def wanted(exchange: Exchange) -> bool:
    return CONTENT_TYPE in exchange.header(b"accept")


async def send(exchange: Exchange, items: AsyncIterator[Item]) -> None:
    """Pass a stream on. Until its first item a failure is an ordinary HTTP error; after it, an error frame.

    When the caller goes away the iterator is closed, which for a foreground command means that it is killed.
    """
    await exchange.while_connected(_send(exchange, items))


async def _send(exchange: Exchange, items: AsyncIterator[Item]) -> None:
    async with aclosing(items):  # type: ignore[type-var]  # only generators come here
        first = await anext(items, None)
        await exchange.start(200, [(b"content-type", CONTENT_TYPE.encode()), (b"cache-control", b"no-store")])
        exchange.last_words = _fail
        beat = asyncio.create_task(_beat(exchange))
        try:
            if first is not None:
                await _write(exchange, first)
            async for item in items:
                await _write(exchange, item)
        except errors.AtollError as error:
            await exchange.write(_fail(error))
        except (OSError, RuntimeError, ValueError, TypeError, AssertionError, KeyError) as bug:
            await exchange.write(_fail(internal(bug)))
        finally:
            beat.cancel()
        await exchange.end()


def _fail(error: errors.AtollError) -> bytes:
    return frame(ERROR, model.encode(wire(error)))


async def _write(exchange: Exchange, item: Item) -> None:
    if isinstance(item, Chunk):
        await exchange.write(frame(item.channel, item.data))
    elif isinstance(item, Started):
        await exchange.write(frame(EVENT, model.encode({"started": item})))
    elif isinstance(item, Gap):
        await exchange.write(frame(EVENT, model.encode({"gap": item})))
    elif isinstance(item, CellOutcome | ExecResult | SandboxInfo | SessionInfo):
        await exchange.write(frame(RESULT, model.encode(item)))
    else:
        await exchange.write(frame(EVENT, model.encode(item)))


async def _beat(exchange: Exchange) -> None:
    while True:
        await asyncio.sleep(QUIET)
        await exchange.write(frame(KEEPALIVE, b""))
