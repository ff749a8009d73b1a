"""Read an answer, or the lack of one, and tell what it means: shared by all drivers.

The drivers (`driver.py` of `_sync` and `_async`, with `secure.py` for TLS) say where the pieces of a body come from; all
that can be done with them is here, once for each way of waiting.
"""

from __future__ import annotations

from ..errors import AtollError, DaemonUnreachable, Internal, OutcomeUnknown, Timeout, Unavailable, from_wire
from .codec import loads
from .http import ERROR, EVENT, RESULT, STDERR, STDOUT, FrameParser, ProtocolError
from .portable import wait_ready
from .results import Event, Output, Started

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from typing import Any, TypeAlias

    from .wire import CommandWire

    # The last is the result: of a command, unless a stream says that it makes something else.
    Frame: TypeAlias = Started | Output | Event | CommandWire

    from .calls import Call
    from .http import Head, ResponseParser

ATTEMPTS = 3
_SHUT_RDWR = 2


def json_answer(head: Head, body: bytes) -> Any:
    """The decoded body of a good answer; the error of a bad one, raised as the class it had in the daemon."""
    if head.status < 400:
        try:
            return loads(body) if body else None
        except ValueError as bad:
            raise Internal(f"the daemon's answer is not JSON: {bad}") from None
    raise error_answer(head.status, body)


def error_answer(status: int, body: bytes) -> AtollError:
    try:
        wire = loads(body)["error"]
        if isinstance(wire, dict):
            return from_wire(wire)
    except (ValueError, KeyError, TypeError):
        pass
    text = body[:300].decode("utf-8", "replace").strip()
    kind = Unavailable if status == 503 else Internal
    return kind(f"the daemon answered HTTP {status}" + (f": {text}" if text else ""))


def lost(call: Call, why: str) -> AtollError:
    """The error for an answer that never came, or not in full, after the request went out."""
    if call.repeatable:
        return Unavailable(f"the connection to the daemon was lost ({why})", details={"request": call.target})
    details = {"request": f"{call.method} {call.target.partition('?')[0]}"}
    hint = "look at the sandbox before doing it again"
    if call.command_id:
        details["command_id"] = call.command_id
        hint = f"ask for command {call.command_id} before running it again"
    return OutcomeUnknown(f"the answer was lost ({why}); the work may have been done", hint=hint, details=details)


def late(call: Call) -> AtollError:
    """The error for an answer that did not come in time."""
    if call.repeatable:
        return Timeout(f"no answer from the daemon within {call.timeout:g} s")
    return lost(call, f"none within {call.timeout:g} s")


class BodyFailed(Exception):
    """The caller's own body could not be read; kept apart from what goes wrong with the socket."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Refused(OSError):
    """The server ended a connection by its TLS before it read anything from it: nothing was acted upon."""


class Again(Exception):
    """Nothing happened, or it may happen twice: the request can be sent once more."""

    def __init__(self, error: AtollError, consumed: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.consumed = consumed  # of the streamed body, which cannot be had again


def unsent(path: str, call: Call, why: str, acted: bool) -> AtollError:
    return lost(call, why) if acted else DaemonUnreachable(f"the daemon at {path} closed the connection: {why}")


def is_quiet(descriptor: int) -> bool:
    """Whether an idle connection is alive: readable while nothing was asked means it was closed, or is out of step."""
    return not any(wait_ready(descriptor, 0))


def frame_value(call: Call, kind: int, payload: bytes) -> Frame:
    """One frame as a value; the last one (RESULT) as its plain JSON object; ERROR raises."""
    if kind == STDOUT:
        return Output("stdout", payload)
    if kind == STDERR:
        return Output("stderr", payload)
    try:
        wire = loads(payload)
    except ValueError:
        raise lost(call, "a broken frame") from None
    if not isinstance(wire, dict):
        raise lost(call, "a broken frame")
    if kind == RESULT:
        return wire  # type: ignore[return-value]
    if kind == ERROR:
        raise from_wire(wire.get("error", wire))
    if kind == EVENT and "started" in wire:
        inner = wire["started"] if isinstance(wire["started"], dict) else wire
        command = str(inner.get("command_id") or call.command_id or "")
        return Started(command, inner.get("pid"), inner.get("stdout_start") or 0)
    return Event(wire)


class Answered:
    """An answer whose head is there and whose body is read piece by piece."""

    call: Call
    head: Head

    def read(self) -> bytes:
        """The next piece of the body; empty at its end."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go; a foreground command whose answer is still under way is thereby cancelled."""
        raise NotImplementedError

    def body(self) -> bytes:
        return b"".join(iter(self.read, b""))

    def json(self) -> Any:
        return json_answer(self.head, self.body())

    def raise_for_status(self) -> None:
        if self.head.status >= 400:
            raise error_answer(self.head.status, self.body())

    def frames(self) -> Iterator[Frame]:
        """Values of a frame stream; the plain dict is the result and the last. A stream without one was cut."""
        parser = FrameParser()
        try:
            while True:
                for value in _values(self.call, parser, self.read()):
                    yield value
                    if isinstance(value, dict):
                        return
        finally:
            self.close()


class AsyncAnswered:
    """As `Answered`, for asyncio."""

    call: Call
    head: Head

    async def read(self) -> bytes:
        """The next piece of the body; empty at its end."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go; a foreground command whose answer is still under way is thereby cancelled."""
        raise NotImplementedError

    async def body(self) -> bytes:
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    async def json(self) -> Any:
        return json_answer(self.head, await self.body())

    async def raise_for_status(self) -> None:
        if self.head.status >= 400:
            raise error_answer(self.head.status, await self.body())

    async def frames(self) -> AsyncIterator[Frame]:
        """Values of a frame stream; the plain dict is the result and the last. A stream without one was cut."""
        parser = FrameParser()
        try:
            while True:
                for value in _values(self.call, parser, await self.read()):
                    yield value
                    if isinstance(value, dict):
                        return
        finally:
            self.close()


class OnSocket:
    """The end of an exchange on one of a link's sockets: kept for the next, handed on, or closed."""

    def __init__(self, link: Any, call: Call, sock: Any, parser: ResponseParser, head: Head, whole: bool) -> None:
        self.call = call
        self.head = head
        self._link = link
        self._sock = sock
        self._parser = parser
        self._whole = whole  # the request went out in full, so the connection may be used again

    def detach(self) -> tuple[Any, bytes]:
        """Take the socket over after a switch of protocols, with what already arrived on it."""
        sock, self._sock = self._sock, None
        if sock is None:
            raise lost(self.call, "closed")
        return sock, self._parser.surplus

    def close(self) -> None:
        """Let go; a foreground command whose answer is still under way is thereby cancelled."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def interrupt(self) -> None:
        """End the exchange from outside: whoever reads it now is told that the connection was lost, and closes it."""
        sock = self._sock
        if sock is not None:
            try:
                sock.shutdown(_SHUT_RDWR)
            except OSError:
                pass  # closed already

    def _release(self) -> None:
        sock, self._sock = self._sock, None
        if sock is None:
            return
        if self._whole and self._parser.keep_alive and not self._parser.surplus:
            self._link.keep(sock)
        else:
            sock.close()


def _values(call: Call, parser: FrameParser, piece: bytes) -> Iterator[Frame]:
    if not piece:
        raise lost(call, "the stream was cut")
    try:
        frames = parser.feed(piece)
    except ProtocolError as bad:
        raise lost(call, str(bad)) from None
    for kind, payload in frames:
        yield frame_value(call, kind, payload)
