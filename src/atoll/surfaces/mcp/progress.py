"""Output of a running command as progress: soon, but never more often than a client can bear."""

import asyncio
import codecs
from collections.abc import Awaitable, Callable

from atoll import errors

Report = Callable[[float, str], Awaitable[None]]  # bytes so far, and the text since the last report

PAUSE = 0.1
MOST = 16_000  # characters of one report; what came between its two ends is left out


class Live:
    """Collects output and reports it: the first at once, then at most ten times a second."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._decoders = {1: _decoder(), 2: _decoder()}
        self._waiting: list[str] = []
        self._size = 0
        self._told = 0
        self._news, self._over = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._pump())

    def add(self, channel: int, data: bytes) -> None:
        self._size += len(data)
        self._waiting.append(self._decoders[channel].decode(data))
        if len(self._waiting) > 64:
            self._waiting = [_shortened("".join(self._waiting))]
        self._news.set()

    async def close(self) -> None:
        """Report what is left. A report under way is let finish: what it carries is nowhere else."""
        self._over.set()
        self._news.set()
        try:
            await self._task
        finally:
            self._task.cancel()

    async def _pump(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._size > self._told:
                await self._tell()
            if self._over.is_set():
                return
            try:
                async with asyncio.timeout(PAUSE):
                    await self._over.wait()
            except TimeoutError:
                continue

    async def _tell(self) -> None:
        text, self._waiting, self._told = _shortened("".join(self._waiting)), [], self._size
        try:
            await self._report(float(self._size), text)
        except (errors.AtollError, OSError, RuntimeError):
            self._told = self._size  # nobody listens; the result will say the same


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _shortened(text: str) -> str:
    if len(text) <= MOST:
        return text
    half = MOST // 2
    return f"{text[:half]}\n... [{len(text) - MOST} characters omitted] ...\n{text[-half:]}"
