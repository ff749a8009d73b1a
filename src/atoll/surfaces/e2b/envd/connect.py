"""The Connect protocol with JSON: unary calls, framed streams, errors. Parsing is incremental and bounded.

A frame is one byte of flags, four bytes of length, and the payload. Flag 2 ends a stream; flag 1 (compressed) is refused.
"""

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from atoll import errors
from atoll.server.request import Exchange, check_shape
from atoll.surfaces.e2b.replies import plain

MAX_UNARY = 16 * 1024 * 1024
MAX_MESSAGE = 8 * 1024 * 1024
MESSAGE, COMPRESSED, END = 0, 1, 2
SILENCE, LEAST_SILENCE, MOST_SILENCE = 90.0, 5.0, 300.0
LONGEST_MS = 86_400_000
UNARY, STREAM = "application/json", "application/connect+json"
Json = dict[str, Any]

STATUS = {
    "canceled": 499, "unknown": 500, "invalid_argument": 400, "deadline_exceeded": 504, "not_found": 404,
    "already_exists": 409, "permission_denied": 403, "resource_exhausted": 429, "failed_precondition": 400,
    "aborted": 409, "out_of_range": 400, "unimplemented": 501, "internal": 500, "unavailable": 503,
    "data_loss": 500, "unauthenticated": 401,
}  # fmt: skip
# The first class that an error is one of decides.
_CODES: tuple[tuple[type[errors.AtollError], str], ...] = (
    (errors.UserNotFound, "unauthenticated"),
    (errors.SandboxGone, "unavailable"),
    (errors.InvalidArgument, "invalid_argument"),
    (errors.Unauthenticated, "unauthenticated"),
    (errors.FilePermission, "permission_denied"),
    (errors.PermissionDenied, "permission_denied"),
    (errors.NotFound, "not_found"),
    (errors.AlreadyExists, "already_exists"),
    (errors.FailedPrecondition, "failed_precondition"),
    (errors.NotADirectory, "invalid_argument"),
    (errors.IsADirectory, "invalid_argument"),
    (errors.FileError, "internal"),
    (errors.Exhausted, "resource_exhausted"),
    (errors.Unsupported, "unimplemented"),
    (errors.Timeout, "deadline_exceeded"),
    (errors.Unavailable, "unavailable"),
    (errors.Cancelled, "canceled"),
)


class RpcError(errors.AtollError):
    """An error with a code of the Connect protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.connect = code


def code_of(error: errors.AtollError) -> str:
    if isinstance(error, RpcError):
        return error.connect
    return next((code for kind, code in _CODES if isinstance(error, kind)), "internal")


def told(error: errors.AtollError) -> Json:
    return {"code": code_of(error), "message": plain(error.message)}


async def fail_unary(exchange: Exchange, error: errors.AtollError) -> None:
    body = told(error)
    await exchange.answer(body, STATUS[body["code"]])


# Requests


class Fields:
    """A message's fields. Names may be written in camel or snake case; null is missing; a wrong kind is an error."""

    def __init__(self, values: Any, where: str = "the message") -> None:
        if not isinstance(values, dict):
            raise RpcError("invalid_argument", f"{where} must be an object")
        self._values = values

    def _get(self, name: str) -> Any:
        found = self._values.get(name)
        if found is None and "_" in name:
            head, *rest = name.split("_")
            found = self._values.get(head + "".join(word.title() for word in rest))
        return found

    def text(self, name: str) -> str:
        found = self._get(name)
        if found is None:
            return ""
        if not isinstance(found, str):
            raise RpcError("invalid_argument", f"{name} must be text")
        return found

    def flag(self, name: str, unsaid: bool = False) -> bool:
        found = self._get(name)
        if found is None:
            return unsaid
        if not isinstance(found, bool):
            raise RpcError("invalid_argument", f"{name} must be true or false")
        return found

    def whole(self, name: str) -> int | None:
        """Return a number that may also come as text."""
        found = self._get(name)
        if isinstance(found, str) and found.isascii() and found.isdigit() and len(found) <= 20:
            found = int(found)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 1 << 64:
            raise RpcError("invalid_argument", f"{name} must be a whole number")
        return found

    def data(self, name: str) -> bytes | None:
        """Return bytes from base64 of either alphabet, padded or not."""
        found = self._get(name)
        if found is None:
            return None
        if not isinstance(found, str):
            raise RpcError("invalid_argument", f"{name} must be base64")
        try:
            plain = found.rstrip("=").replace("-", "+").replace("_", "/")
            return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        except ValueError:
            raise RpcError("invalid_argument", f"{name} is not base64") from None

    def texts(self, name: str) -> list[str]:
        found = self._get(name)
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise RpcError("invalid_argument", f"{name} must be a list of texts")
        return found

    def pairs(self, name: str) -> dict[str, str]:
        found = self._get(name)
        if found is None:
            return {}
        if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
            raise RpcError("invalid_argument", f"{name} must map texts to texts")
        return found

    def child(self, name: str) -> "Fields | None":
        found = self._get(name)
        return None if found is None else Fields(found, name)


def decode(data: bytes) -> Fields:
    try:
        check_shape(data)
        return Fields(msgspec.json.decode(data))  # which takes no half of a surrogate pair
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RpcError("invalid_argument", "the message is no JSON object") from None


def check_kind(exchange: Exchange, wanted: str) -> bool:
    """Return whether the body is what a call of this kind must send; compression and other encodings are no."""
    kind = exchange.header(b"content-type").partition(";")[0].strip().lower()
    encoding = exchange.header(b"content-encoding") if wanted == UNARY else exchange.header(b"connect-content-encoding")
    return kind == wanted and encoding.lower() in ("", "identity")


async def read_unary(exchange: Exchange) -> Fields:
    return decode(await exchange.body(MAX_UNARY) or b"{}")


class Frames:
    """Takes bytes as they come, gives the frames that are whole."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        self._rest += data
        while len(self._rest) >= 5:
            flags, size = struct.unpack_from(">BI", self._rest)
            if flags & COMPRESSED:
                raise RpcError("unimplemented", "compressed messages are not understood here")
            if flags & ~END:
                raise RpcError("invalid_argument", f"a frame has unknown flags: {flags}")
            if size > MAX_MESSAGE:
                raise RpcError("resource_exhausted", f"a message is longer than {MAX_MESSAGE} bytes")
            if len(self._rest) < 5 + size:
                return
            payload = bytes(self._rest[5 : 5 + size])
            del self._rest[: 5 + size]
            yield flags, payload

    @property
    def held(self) -> int:
        """Bytes of the frame that is not whole yet."""
        return len(self._rest)

    def finish(self) -> None:
        """Raise when the last frame was cut."""
        if self._rest:
            raise RpcError("invalid_argument", "the last frame is not whole")


async def read_frames(exchange: Exchange) -> AsyncIterator[Fields]:
    """The messages of a client's stream as they come. The longest that was not whole at a time is charged."""
    frames, charged = Frames(), 0
    async for data in exchange.chunks():
        for flags, payload in frames.feed(data):
            if flags & END:
                return
            yield decode(payload)
        if frames.held > charged:
            exchange.charge(frames.held - charged)
            charged = frames.held
    frames.finish()


async def read_one(exchange: Exchange) -> Fields:
    """The single message that begins a server's stream."""
    found: Fields | None = None
    async for message in read_frames(exchange):
        if found is not None:
            raise RpcError("invalid_argument", "this call takes one message")
        found = message
    if found is None:
        raise RpcError("invalid_argument", "the message is missing")
    return found


def timeout_of(exchange: Exchange) -> int | None:
    """Return the call's deadline in milliseconds; None is none."""
    text = exchange.header(b"connect-timeout-ms")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise RpcError("invalid_argument", "Connect-Timeout-Ms must be a number of at most 10 digits")
    return min(int(text), LONGEST_MS) or None


def silence_of(exchange: Exchange) -> float:
    text = exchange.header(b"keepalive-ping-interval")
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        return SILENCE
    return min(MOST_SILENCE, max(LEAST_SILENCE, float(text)))


# Answers


def frame(flags: int, value: Json) -> bytes:
    payload = json.dumps(value, separators=(",", ":")).encode()
    return struct.pack(">BI", flags, len(payload)) + payload


def last_frame(error: errors.AtollError) -> bytes:
    return frame(END, {"error": told(error)})


async def begin_stream(exchange: Exchange) -> None:
    """Say that a stream follows. From now on an error ends it properly."""
    headers = [(b"content-type", STREAM.encode()), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
    exchange.hold_head()
    await exchange.start(200, headers)
    exchange.last_words = last_frame


async def send_answer(exchange: Exchange, value: Json) -> None:
    """End a stream that has one message."""
    await exchange.end(frame(MESSAGE, value) + frame(END, {}))


async def send_stream(
    exchange: Exchange, events: AsyncIterator[Json], keepalive: Json, deadline_ms: int | None
) -> None:
    """Pass events on as they come, `keepalive` when there is none for long, and end the stream.

    The last event of a process leaves together with the end: each write is a wake-up of the client.
    """
    silence, last = silence_of(exchange), b""
    try:
        async with asyncio.timeout(None if deadline_ms is None else deadline_ms / 1000):
            async for event in _with_silence(events, silence):
                sent = frame(MESSAGE, keepalive if event is None else event)
                if event is not None and "end" in event.get("event", ()):
                    last = sent
                else:
                    await exchange.write(sent)
    except TimeoutError:
        raise RpcError("deadline_exceeded", "the call's time is over") from None
    await exchange.end(last + frame(END, {}))


async def _with_silence(events: AsyncIterator[Json], silence: float) -> AsyncIterator[Json | None]:
    """The events, and None whenever none came for so long."""
    waiting: asyncio.Future[Json] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait([waiting], timeout=silence)
            if not done:
                yield None
                continue
            try:
                event = waiting.result()
            except StopAsyncIteration:
                return
            finally:
                waiting = None
            yield event
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.wait([waiting])
        await events.aclose()  # type: ignore[attr-defined]  # only generators come here
