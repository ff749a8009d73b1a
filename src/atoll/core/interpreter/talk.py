"""HTTP with the interpreter's server inside a sandbox, read as it comes and within bounds.

Whoever listens on that port is a stranger. Heads, plain answers and lines have a bound each; every byte is looked at
once, and what is held is charged to the sandbox and its owner.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import h11

from atoll import errors
from atoll.accounts import Lease
from atoll.core.access.principals import Principal
from atoll.core.files.ports import Ports

MAX_HEAD = 64 * 1024
MAX_PLAIN = 1024 * 1024  # of an answer that is not a stream
MAX_LINE = 16 * 1024 * 1024
ANSWER_S = 200.0  # for a short answer; a new context starts a kernel
EVENTS, LINES = 64, 256  # taken in a row, before other tasks have their turn


class Answer:
    """An answer under way: its status, and its body as it comes."""

    def __init__(self, status: int, connection: h11.Connection, received: AsyncGenerator[bytes, None]) -> None:
        self.status = status
        self._connection = connection
        self._received = received

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the body's bytes. OutcomeUnknown when it is cut."""
        taken = 0
        while True:
            event = await _next(self._connection, self._received)
            taken += 1
            if taken % EVENTS == 0:
                await asyncio.sleep(0)
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise errors.OutcomeUnknown("the interpreter's answer was cut")

    async def plain(self) -> bytes:
        """Return a short body whole."""
        found = bytearray()
        async for data in self.body():
            found += data
            if len(found) > MAX_PLAIN:
                raise errors.TooLarge("the interpreter answered more than it may")
        return bytes(found)

    async def lines(self, held: Lease) -> AsyncGenerator[bytes, None]:
        """Yield the body's lines, each charged to `held` while it is put together."""
        line, charged, taken = bytearray(), 0, 0
        try:
            async for data in self.body():
                at = 0
                while (end := data.find(b"\n", at)) >= 0:
                    line += data[at:end]
                    at = end + 1
                    taken += 1
                    if taken % LINES == 0:
                        await asyncio.sleep(0)
                    if line:
                        whole, line = bytes(line), bytearray()
                        yield whole
                    held.shrink(charged)
                    charged = 0
                more = len(data) - at
                held.grow(more)
                charged += more
                line += data[at:]
                if len(line) > MAX_LINE:
                    raise errors.TooLarge(f"the interpreter sent a line of more than {MAX_LINE >> 20} MiB")
        finally:
            held.shrink(charged)


@asynccontextmanager
async def request(
    ports: Ports, who: Principal, sandbox: str, port: int, method: str, target: str, body: bytes = b""
) -> "AsyncGenerator[Answer, None]":
    """Ask, and return the answer once its head is there. Leaving early hangs up, which interrupts a running cell."""
    async with ports.connect(who, sandbox, port) as tunnel:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        headers = [("host", "localhost"), ("content-type", "application/json"), ("content-length", str(len(body)))]
        head = connection.send(h11.Request(method=method, target=target, headers=[*headers, ("connection", "close")]))
        data = connection.send(h11.Data(data=body)) if body else b""
        connection.send(h11.EndOfMessage())
        try:
            await tunnel.send((head or b"") + (data or b""))
        except BrokenPipeError:
            raise errors.Unavailable("the interpreter hung up") from None
        received = aiter(tunnel)
        event = await _next(connection, received)  # type: ignore[arg-type]  # it is a generator
        if not isinstance(event, h11.Response):
            raise errors.Unavailable("the interpreter did not answer")
        yield Answer(event.status_code, connection, received)  # type: ignore[arg-type]


async def ask(
    ports: Ports, who: Principal, sandbox: str, port: int, method: str, target: str, body: bytes = b""
) -> bytes:
    """Ask for a short answer, and return it or raise what it says is wrong."""
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            request(ports, who, sandbox, port, method, target, body) as answer,
        ):
            told = await answer.plain()
            if answer.status >= 300:
                raise refusal(answer.status, told)
            return told
    except TimeoutError:
        raise errors.Timeout(f"the interpreter did not answer within {ANSWER_S:g} s") from None


def refusal(status: int, told: bytes) -> errors.AtollError:
    """Return the error that an answer means; its text is the server's own, cut short."""
    text = "".join(char if char.isprintable() else "?" for char in told[:500].decode("utf-8", "replace"))
    if status == 404:
        return errors.NotFound(text)
    if 400 <= status < 500:
        return errors.InvalidArgument(text)
    return errors.FailedPrecondition(f"the interpreter failed: {text}")


async def _next(connection: h11.Connection, received: AsyncGenerator[bytes, None]) -> object:
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await anext(received, b""))
        return event
    except h11.RemoteProtocolError:
        raise errors.OutcomeUnknown("the interpreter's answer was cut, or is not HTTP") from None
