"""The daemon's side of the channel to one sandbox: connect, greet, ask, and connect again when the channel is lost.

Losing the channel loses nothing: what only reads is asked again, a process is found again by its id (`process.py`), and
what may or may not have happened is reported as OutcomeUnknown.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from atoll import errors
from atoll.guest import wire
from atoll.guest.connection import WINDOW, Bytes, Connection, Stream
from atoll.guest.refusals import ConnectionLost
from atoll.guest.wire import Message

Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]

HELLO_TIMEOUT = 5.0
RECONNECT_TIMEOUT = 15.0
REQUEST_TIMEOUT = 60.0
MAX_FILE_OPERATIONS = 28  # the agent runs 32 at a time and refuses more; ours wait instead
MAX_EVENTS = 32 * 1024 * 1024  # bytes of one operation's events that are held at once
READ_ONLY = frozenset(["poll", "output", "stat", "list", "du", "ps", "procs", "usage", "info", "foreground", "grep"])


class GuestClient:
    """Speaks with the agent of one sandbox. Connects when first needed; safe for concurrent use on one event loop."""

    def __init__(
        self,
        connect: Dial,
        *,
        host_secret: str,
        agent_secret: str,
        agent_first: bool = False,
        needs: Iterable[str] = (),
    ) -> None:
        self._dial = connect
        self._host_secret = host_secret
        self._agent_secret = agent_secret
        self._agent_first = agent_first
        self._needs = frozenset(needs)  # features without which this sandbox is not what was asked for
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._over: errors.AtollError | None = None
        self._files = asyncio.Semaphore(MAX_FILE_OPERATIONS)
        self.connections = 0
        self.started = 0  # processes this client has asked for
        self.opened = 0  # operations
        self.owner = ""  # whose turns its bulk is read in; until it is known, the sandbox is its own
        self.before: Callable[[], Awaitable[None]] | None = None  # a sandbox that sleeps is woken by this
        self.agent: Message = {}

    # Connecting

    async def connection(self) -> Connection:
        """The living connection, made anew if needed; one attempt is shared by all who wait for it."""
        if self._over is not None:
            raise self._over
        if self._connection is not None and not self._connection.closed.done():
            return self._connection
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect(), name="guest-connect")
        try:
            return await asyncio.shield(self._connecting)
        except asyncio.CancelledError:
            if self._over is not None and self._connecting.cancelled():
                raise self._over from None
            raise

    async def _connect(self) -> Connection:
        deadline = asyncio.get_running_loop().time() + RECONNECT_TIMEOUT
        pause = 0.002
        while True:
            try:
                return await asyncio.wait_for(self._connect_once(), HELLO_TIMEOUT)
            except errors.Internal:
                raise
            except (OSError, ConnectionLost, TimeoutError, wire.WireError) as error:
                if self._over is not None:
                    raise self._over from None
                if asyncio.get_running_loop().time() + pause > deadline:
                    raise errors.Unavailable(f"the guest agent cannot be reached: {error or 'no answer'}") from None
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.25)

    async def _connect_once(self) -> Connection:
        reader, writer = await self._dial()
        connection = Connection(lambda: self.owner or self._host_secret)
        connection.dialled_by = writer
        transport = writer.transport
        connection.connection_made(transport)
        early = bytes(getattr(reader, "_buffer", b""))  # an agent that speaks first may have spoken already
        transport.set_protocol(connection)
        if early:
            connection.feed(early)
        if reader.at_eof():
            connection.close("the guest agent hung up")
        try:
            ours = wire.control(wire.HELLO, 0, {"v": 1, "secret": self._host_secret, "after": self.connections})
            if not self._agent_first:
                connection.write(ours)
            theirs = await connection.hello()
            secret = theirs.get("secret")
            if theirs.get("v") != 1 or not isinstance(secret, str):
                raise errors.Internal("the guest agent speaks another protocol")
            if not hmac.compare_digest(secret.encode(), self._agent_secret.encode()):
                raise errors.Internal("whoever answered is not this sandbox's agent")
            features = theirs.get("features")
            if not self._needs <= {
                name for name in (features if isinstance(features, list) else []) if isinstance(name, str)
            }:
                raise errors.Internal(
                    "the guest agent is of another version", hint="run `make binaries`, or install atoll anew"
                )
            connection.greeted = True
            if self._agent_first:
                connection.write(ours)
        except BaseException:
            connection.close("no valid hello")
            raise
        self.agent = {key: theirs.get(key) for key in ("boot", "features", "uptime_ms")}
        self.connections += 1
        self._connection = connection
        return connection

    async def close(self, reason: errors.AtollError | None = None) -> None:
        """Nothing is asked from now on; what is under way ends with `reason`. Kills nothing in the sandbox."""
        if self._over is None:
            self._over = reason or errors.Unavailable("the guest client is closed")
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close("closed by the daemon")

    def renew(self, *, host_secret: str, agent_secret: str) -> None:
        """Take the secrets by which daemon and agent know each other from the next connection on."""
        self._host_secret, self._agent_secret = host_secret, agent_secret

    @property
    def over(self) -> errors.AtollError | None:
        return self._over

    def drop_connection(self) -> None:
        """Cut the channel as a fault would (for tests and for an agent that hangs)."""
        if self._connection is not None:
            self._connection.close("dropped")

    # Asking

    async def open(self, op: str, windows: tuple[int, ...] = (), window: int = WINDOW, **fields: Any) -> Stream:
        """Start an operation; None fields are left out."""
        request = {"op": op}
        request.update((key, value) for key, value in fields.items() if value is not None)
        self.opened += 1
        if self.before is not None:
            await self.before()
        connection = await self.connection()
        try:
            return connection.open(request, windows, window)
        except wire.WireError as error:
            raise errors.TooLarge(f"the request is too large: {error}") from None

    async def request(self, op: str, *, timeout: float | None = REQUEST_TIMEOUT, **fields: Any) -> Message:
        """An operation with no data: its result."""
        result, _ = await self.collect(op, timeout=timeout, **fields)
        return result

    async def collect(
        self, op: str, *, timeout: float | None = REQUEST_TIMEOUT, **fields: Any
    ) -> tuple[Message, list[Message]]:
        """An operation with no data: its result and all its events. More than `MAX_EVENTS` bytes of them are too large."""
        for attempt in (1, 2, 3):
            stream: Stream | None = None
            events: list[Message] = []
            try:
                async with asyncio.timeout(timeout):
                    stream = await self.open(op, **fields)
                    size = 0
                    async for item in stream:
                        if item.kind == wire.EVENT:
                            size += item.cost
                            if size > MAX_EVENTS:
                                raise errors.TooLarge(f"the answer to `{op}` is larger than {MAX_EVENTS >> 20} MiB")
                            events.append(item.event)
                assert stream.result is not None
                return stream.result, events
            except TimeoutError:
                late = f"the guest agent did not answer `{op}` in {timeout:g} s"
                raise (errors.Timeout(late) if op in READ_ONLY else errors.OutcomeUnknown(late)) from None
            except ConnectionLost as lost:
                if stream is not None and op not in READ_ONLY:
                    raise await self.lost(op, lost) from None
                if attempt == 3:
                    raise errors.Unavailable(str(lost)) from None
            finally:
                if stream is not None:
                    stream.cancel()
        raise AssertionError("unreachable")

    async def lost(self, op: str, lost: ConnectionLost) -> errors.AtollError:
        """The error for an operation whose answer was lost: why the sandbox ended if it did, else OutcomeUnknown."""
        if self._over is not None and not isinstance(self._over, errors.Unavailable):
            return self._over
        return errors.OutcomeUnknown(f"`{op}` was under way when the channel broke: {self._over or lost}")

    # Bulk data

    async def download(self, op: str, **fields: Any) -> "Download":
        """`read` or `tar_out`: bytes from the sandbox. Close it, or use it as a context manager."""
        await self._files.acquire()
        try:
            return Download(await self.open(op, (wire.STDOUT,), **fields), self)
        except BaseException:
            self._files.release()
            raise

    async def upload(self, op: str, source: AsyncIterator[Bytes] | Bytes, **fields: Any) -> Message:
        """`write` or `tar_in`: bytes into the sandbox. If the source fails or the caller goes away it is undone."""
        async with self._files:
            stream: Stream | None = None
            try:
                stream = await self.open(op, **fields)
                try:
                    if isinstance(source, bytes | bytearray | memoryview):
                        await stream.send(source)
                    else:
                        async for piece in source:
                            await stream.send(piece)
                    stream.send_eof()
                except BrokenPipeError:
                    pass  # the agent has answered already
                return await stream.finish()
            except ConnectionLost as lost:
                raise await self.lost(op, lost) from None
            finally:
                if stream is not None:
                    stream.cancel()

    def release_file_slot(self) -> None:
        self._files.release()


class Download:
    """Bytes on their way out of a sandbox. `head` is the first event (a file's stat), `result` the last word."""

    def __init__(self, stream: Stream, client: GuestClient) -> None:
        self._stream = stream
        self._client = client
        self._closed = False
        self.head: Message = {}

    async def start(self) -> Message:
        """Wait for the first event, so that an error is known before any byte is passed on."""
        async for item in self._stream:
            if item.kind == wire.EVENT:
                self.head = item.event
                return self.head
        return self.head

    def __aiter__(self) -> "Download":
        return self

    async def __anext__(self) -> bytes:
        try:
            async for item in self._stream:
                if item.kind == wire.DATA:
                    return item.data
        except ConnectionLost as lost:
            raise self._client.over or errors.Unavailable(f"the transfer was cut: {lost}") from None
        raise StopAsyncIteration

    @property
    def result(self) -> Message:
        return self._stream.result or {}

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._stream.cancel()
            self._client.release_file_slot()

    async def __aenter__(self) -> "Download":
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
