"""The output of one command as the daemon keeps it: the first bytes up to a limit, and the newest ones for followers.

The first part decides results and `poll`: kept in memory for a foreground command, in a file for a background one, so
that a restarted daemon still has it. The newest part lets somebody who reads along go on past the limit. Who reads too
slowly skips what was lost in between and is told how much; the command never waits for a follower.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from atoll import errors
from atoll.accounts import Lease

TAIL = 512 * 1024
PIECE = 256 * 1024
STUCK = 10.0  # seconds in which a reader of output that is not kept has to take some

UNCHARGED = 64 * 1024  # bytes of a stream in memory that are not worth an account
STEP = 256 * 1024  # what is charged at once beyond them

Grant = Callable[[int], int]  # asked before bytes are kept on the host: how many of so many may be


class OutputRefused(errors.Exhausted):
    """Output that its owner may not hold in the daemon's memory."""


class Held:
    """The account of what a foreground command's output takes of the daemon's memory. `make_room` forgets something else of the
    same sandbox; it is False when there is nothing to forget."""

    def __init__(self, lease: Lease, make_room: Callable[[], bool]) -> None:
        self._lease = lease
        self._make_room = make_room

    def take(self, size: int) -> None:
        """Charge so much more, or OutputRefused."""
        while True:
            try:
                return self._lease.grow(size)
            except errors.Exhausted as full:
                if not self._make_room():
                    hint = "send the output to a file inside, run it in the background, or set a lower output limit"
                    raise OutputRefused(full.message, hint=hint, details=full.details) from None

    def end(self) -> None:
        self._lease.end()


class Kept:
    """One stream. `total` counts every byte; `first` are the kept ones; the tail ends at `total`."""

    def __init__(
        self,
        limit: int,
        path: Path | None = None,
        grant: Grant | None = None,
        held: Held | None = None,
        *,
        tail: bool = False,
    ) -> None:
        self.limit = limit
        self._only_tail = tail
        self._held = held
        self._charged = UNCHARGED
        self._grant = grant or (lambda wanted: wanted)
        self.total = 0
        self.missed = 0  # bytes lost before they came here
        self._path = path
        self._fd = -1
        self._memory = bytearray()
        self._size = 0
        self._tail = bytearray()
        self._tail_start = 0
        if path is not None:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._size = self.total = self._tail_start = os.fstat(self._fd).st_size

    @property
    def size(self) -> int:
        """Bytes kept from the beginning."""
        return self._size

    @property
    def truncated(self) -> bool:
        return self.total > self._size or self.missed > 0

    def add(self, data: bytes) -> None:
        room = self.limit - self._size
        if room > 0 and self.total == self._size:
            part = data[:room]
            if self._fd >= 0:
                self._size += self._write(part)
            else:
                if self._held is not None and self._size + len(part) > self._charged:
                    self._held.take(step := max(STEP, len(part)))
                    self._charged += step
                self._memory += part
                self._size += len(part)
        self.total += len(data)
        if self._fd >= 0 or self._only_tail:
            self._tail += data
            if len(self._tail) > 2 * TAIL:
                del self._tail[: len(self._tail) - TAIL]
            self._tail_start = self.total - len(self._tail)

    def _write(self, part: bytes) -> int:
        """How many bytes could be kept: a full disk costs output, which is then cut, and no command its result."""
        granted = self._grant(len(part))
        try:
            return os.pwrite(self._fd, part[:granted], self._size) if granted else 0
        except OSError:
            return 0

    def skip(self, count: int) -> None:
        """`count` bytes were lost: what follows cannot be joined to what was kept."""
        self.missed += count
        self.total += count
        self._tail.clear()
        self._tail_start = self.total

    def first(self, start: int = 0, most: int | None = None) -> bytes:
        end = self._size if most is None else min(self._size, start + most)
        if start >= end:
            return b""
        if self._fd >= 0:
            return os.pread(self._fd, end - start, start)
        if self._path is None:
            return bytes(self._memory[start:end])
        try:
            with open(self._path, "rb") as file:
                return os.pread(file.fileno(), end - start, start)
        except FileNotFoundError:  # it made room for newer output
            self._size = 0
            return b""

    def read(self, offset: int) -> tuple[int, bytes]:
        """Return one piece of output from `offset` on, and its real offset, which is later when bytes are gone."""
        if offset < self._size:
            return offset, self.first(offset, PIECE)
        start = max(offset, self._tail_start)
        gone = self._fd < 0 and not self._only_tail
        if gone or start >= self.total:
            return max(offset, self.total if gone else start), b""
        at = start - self._tail_start
        return start, bytes(self._tail[at : at + PIECE])

    def close(self, *, remove: bool = False) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if remove and self._path is not None:
            self._path.unlink(missing_ok=True)
        self._tail = bytearray()
        self._tail_start = self.total


class Output:
    """Both streams of one command, and a bell for those who follow them."""

    def __init__(
        self,
        limit: int,
        directory: Path | None = None,
        command: str = "",
        grant: Grant | None = None,
        held: Held | None = None,
    ) -> None:
        self._held = held
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.kept = {
            channel: Kept(limit, None if directory is None else directory / f"{command}.{channel}", grant, held)
            for channel in (1, 2)
        }
        self.finished = False
        self._bell = asyncio.Event()

    def add(self, channel: int, data: bytes) -> None:
        self.kept[channel].add(data)
        self.ring()

    def forget(self) -> None:
        """Nobody asks for it any more: what it held in memory is given back."""
        if self._held is not None:
            self._held.end()

    def finish(self) -> None:
        self.finished = True
        self.ring()

    def ring(self) -> None:
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()

    async def room(self) -> None:
        """Wait for nobody: only passed-on output does."""

    def let_go(self) -> None:
        """Give back what is kept on the host when the command has ended."""
        for kept in self.kept.values():
            kept.close()

    def _positions(self, offsets: dict[int, int]) -> dict[int, int]:
        return {c: (self.kept[c].total if offsets.get(c, 0) < 0 else offsets.get(c, 0)) for c in self.kept}

    async def follow(self, offsets: dict[int, int]) -> AsyncIterator[tuple[int, int, bytes]]:
        """(channel, offset, bytes) from the given offsets until the command has ended; -1 means from now on."""
        async for item in self._read(self._positions(offsets)):
            yield item

    async def _read(self, at: dict[int, int]) -> AsyncIterator[tuple[int, int, bytes]]:
        while True:
            bell, finished, quiet = self._bell, self.finished, True
            for channel, kept in self.kept.items():
                start, data = kept.read(at[channel])
                at[channel] = start + len(data)
                if data:
                    quiet = False
                    yield channel, start, data
            if not quiet:
                continue
            if finished:
                return
            await bell.wait()


class Reader:
    """Somebody who reads passed-on output, and how far."""

    def __init__(self, at: dict[int, int]) -> None:
        self.at = at
        self.moved = asyncio.get_running_loop().time()
        self.cut = False


class PassedOn(Output):
    """Output that is not kept: it goes to those who read at that moment, none of it is lost while they do, and a reader
    that takes nothing for `STUCK` seconds is cut so that it holds up neither the command nor others.

    With `awaited` the caller who started the command is about to read from the beginning.
    """

    def __init__(self, *, awaited: bool) -> None:
        super().__init__(0)
        self.kept = {channel: Kept(0, tail=True) for channel in (1, 2)}
        self._first = Reader(dict.fromkeys(self.kept, 0)) if awaited else None
        self._readers = [self._first] if self._first is not None else []
        self._taken = asyncio.Event()

    async def room(self) -> None:
        """Wait until every reader has at most half a tail before it."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while late := [reader for reader in self._readers if self._lag(reader) > TAIL // 2]:
            due = {reader: max(reader.moved, began) + STUCK for reader in late}
            self._taken.clear()
            try:
                async with asyncio.timeout_at(min(due.values())):
                    await self._taken.wait()
            except TimeoutError:
                for reader in (reader for reader, at in due.items() if at <= clock()):
                    reader.cut = True
                    self._readers.remove(reader)

    def _lag(self, reader: Reader) -> int:
        return max(self.kept[channel].total - at for channel, at in reader.at.items())

    async def follow(self, offsets: dict[int, int]) -> AsyncIterator[tuple[int, int, bytes]]:
        at = self._positions(offsets)
        reader, self._first = self._first if self._first and not any(at.values()) else Reader(at), None
        if reader not in self._readers and not reader.cut:
            self._readers.append(reader)
        try:
            async for channel, start, data in self._read(dict(at)):
                if reader.cut:
                    break
                yield channel, start, data
                reader.at[channel] = start + len(data)
                reader.moved = asyncio.get_running_loop().time()
                self._taken.set()
            if reader.cut:
                raise errors.Exhausted("the output was not read for too long", hint="connect again to go on reading")
        finally:
            if reader in self._readers:
                self._readers.remove(reader)
            self._taken.set()
            if self.finished:
                self.let_go()

    def let_go(self) -> None:
        if not self._readers:
            super().let_go()
