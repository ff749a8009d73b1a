"""The daemon's line to its broker: orders and answers, what the broker says of its own accord, and a pulse.

A broker that hangs holds the line and passes nothing. So it is asked for a sign of life now and then, and one that gives
none for too long counts as gone.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from atoll.egress.control import wire
from atoll.egress.router.router import Link, LinkSockets
from atoll.errors import Internal, Unavailable

ORDER_SECONDS: Final = 20.0
PULSE_SECONDS = 5.0
SILENT_SECONDS = 10.0  # twice in a row is too long: once may be a daemon that was itself held up
_log = logging.getLogger(__name__)

Hear = Callable[["BrokerLine", wire.Message], None]


class BrokerLine:
    """One connection. `hear` gets every message that is not an answer; `gone` is set when the broker hangs up."""

    def __init__(self, hear: "Hear") -> None:
        self._hear = hear
        self._writer: asyncio.StreamWriter
        self._answers: dict[int, asyncio.Future[wire.Message]] = {}
        self._number = 0
        self._work: list[asyncio.Task[None]] = []
        self._handover: socket.socket | None = None
        self.holds: set[str] = set()  # the links whose sockets the broker has, by interface
        self.gone = asyncio.Event()

    @classmethod
    async def open(cls, connection: socket.socket, handover: socket.socket | None, hear: "Hear") -> "BrokerLine":
        self = cls(hear)
        self._handover = handover
        reader, self._writer = await asyncio.open_unix_connection(sock=connection, limit=1 << 20)
        loop = asyncio.get_running_loop()
        self._work = [loop.create_task(self._listen(reader)), loop.create_task(self._feel())]
        return self

    async def order(self, message: wire.Message, seconds: float = ORDER_SECONDS) -> wire.Message:
        """Tell the broker something and wait for its answer; Unavailable when it is gone or does not answer."""
        if self.gone.is_set():
            raise Unavailable("the egress broker went away")
        self._number += 1
        number = self._number
        waiting: asyncio.Future[wire.Message] = asyncio.get_running_loop().create_future()
        self._answers[number] = waiting
        try:
            self._writer.write(wire.encode({"n": number, **message}))
            async with asyncio.timeout(seconds):
                answer = await waiting
        except TimeoutError:
            raise Unavailable("the egress broker does not answer") from None
        finally:
            del self._answers[number]
        if not answer.get("ok"):
            raise Internal(f"the egress broker refused: {answer.get('error')}")
        return answer

    def tell(self, message: wire.Message) -> None:
        if not self.gone.is_set():
            self._writer.write(wire.encode(message))

    def hand_over(self, link: Link, sockets: LinkSockets) -> None:
        """Give the broker the sockets of a link, before it is told of the sandbox."""
        if self._handover is None or self.gone.is_set():
            raise Unavailable("the egress broker went away")
        try:
            socket.send_fds(self._handover, [link.ifname.encode()], sockets.filenos())
        except OSError as err:
            raise Unavailable(f"the egress broker takes no sockets: {err}") from None
        self.holds.add(link.ifname)

    def hand_over_carrier(self, sandbox: str, sock: socket.socket) -> None:
        """Give the broker the end of a socket over which a sandbox without a link is carried, before the order to use it."""
        if self._handover is None or self.gone.is_set():
            raise Unavailable("the egress broker went away")
        try:
            socket.send_fds(self._handover, [sandbox.encode()], [sock.fileno()])
        except OSError as err:
            raise Unavailable(f"the egress broker takes no sockets: {err}") from None

    async def close(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._writer.close()
        if self._handover is not None:
            self._handover.close()

    async def _feel(self) -> None:
        """Until it is gone: does it still answer?"""
        silent = 0
        while silent < 2 and not self.gone.is_set():
            await asyncio.sleep(0 if silent else PULSE_SECONDS)
            try:
                await self.order({"op": "ping"}, SILENT_SECONDS)
                silent = 0
            except (Unavailable, Internal):
                silent += 1
        if not self.gone.is_set():
            _log.error("the egress broker hangs")
            self._work[0].cancel()  # the listener's end is what says that it is gone

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Read until the broker is gone, or says something it never would."""
        try:
            while True:
                message = await wire.receive(reader)
                if "n" not in message:
                    self._hear(self, message)
                    continue
                waiting = self._answers.get(message["n"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
        except (asyncio.IncompleteReadError, OSError) as err:
            _log.info("the egress broker hung up: %s", err)
        except Exception:
            _log.exception("the egress broker talks nonsense")
        finally:
            self.gone.set()
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(Unavailable("the egress broker went away"))
