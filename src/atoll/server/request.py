"""One HTTP request and its answer, straight on ASGI: query, body, JSON, errors, and noticing that the caller has gone."""

import asyncio
import errno
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from atoll import accounts, errors, model
from atoll.core.access.principals import Principal

log = logging.getLogger("atoll.http")

MAX_JSON = 64 * 1024 * 1024
LOOK_OUT = 0.02
LOOK_AGAIN = 0.5
PART = 250  # entries of a list that are encoded in one go
LARGE_JSON = 64 * 1024  # bytes of a request from which on its shape is looked at before anything is made of it
MAX_VALUES = 200_000  # in such a request
MAX_MARKS = 4_000_000  # commas and brackets in it, with those in its texts
JOINED = 64 * 1024  # an answer no longer than this goes out with its head, in one piece
T = TypeVar("T")

# As ASGI has them: what is in them is the web server's.
Scope = dict[str, Any]
Event = dict[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

_JSON_HEADERS = (b"content-type", b"application/json")


class Gone(Exception):
    """The caller has closed the connection; there is nobody to answer."""


class Exchange:
    """A request with typed access to its parts. `answer` or a stream ends it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, who: Principal, parts: list[str]) -> None:
        self.scope = scope
        self.who = who
        self.parts = parts
        self.started = False
        self.last_words: Callable[[errors.AtollError], bytes] | None = None  # of an answer that can end with an error
        self._receive = receive
        self._send = send
        self._query: dict[str, str] | None = None

    # Asked

    @property
    def ref(self) -> str:
        return self.parts[2]

    @property
    def command(self) -> str:
        return self.parts[4]

    def header(self, name: bytes) -> str:
        for key, value in self.scope["headers"]:
            if key == name:
                return str(value.decode("latin-1"))
        return ""

    def query(self, *allowed: str) -> dict[str, str]:
        """Query parameters as text (bytes that are not UTF-8 as surrogates); others than these are refused."""
        if self._query is None:
            self._query = {}
            for pair in self.scope["query_string"].split(b"&") if self.scope["query_string"] else ():
                key, _, value = pair.partition(b"=")
                name = unquote(key)
                if name not in allowed:
                    raise errors.InvalidArgument(
                        f"unknown query parameter {name!r:.80}", hint="known are " + ", ".join(allowed)
                    )
                if name in self._query:
                    raise errors.InvalidArgument(f"query parameter {name!r} is given twice")
                self._query[name] = unquote(value)
        return self._query

    @contextmanager
    def charged(self, books: accounts.Accounts, owner: str) -> Iterator[None]:
        """Charge what is held of the body to this owner, until the request is over."""
        with books.lease(accounts.MEMORY, 0, accounts.owner(owner)) as held:
            self.scope["state"]["charge"] = held.grow
            yield

    def charge(self, size: int) -> None:
        """Charge bytes of the body that are held; raises Exhausted at the sender's cap."""
        charge = self.scope["state"].get("charge")
        if charge is not None:
            charge(size)

    async def body(self, limit: int = MAX_JSON) -> bytes:
        """The whole body, charged to its sender where the listener keeps accounts."""
        pieces, size = [], 0
        async for piece in self.chunks():
            size += len(piece)
            if size > limit:
                raise errors.TooLarge(f"the request is larger than {limit} bytes")
            self.charge(len(piece))
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, however long."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            body = message.get("body", b"")
            if body:
                yield body
            if not message.get("more_body", False):
                return

    async def json(self, kind: type[T]) -> T:
        data = await self.body()
        check_shape(data, kind)
        return model.decode(kind, data)

    async def while_connected(self, work: Awaitable[T]) -> T:
        """Do it for as long as the caller is there; when it goes away the work is cancelled.

        Looking out for that begins after a moment: most work is done by then.
        """
        task = asyncio.current_task()
        assert task is not None
        watch = _Watch(self, task)
        timer = asyncio.get_running_loop().call_later(LOOK_OUT, watch.start)
        try:
            return await _unless_gone(work, watch, task)
        finally:
            timer.cancel()

    async def while_reachable(self, work: Awaitable[T]) -> T:
        """As `while_connected`, for work that reads the body itself: the connection is looked at, nothing is taken from it.

        The listener says how. Over gRPC a caller that goes away cancels the whole call.
        """
        gone: Callable[[], bool] | None = self.scope["state"].get("gone")
        if gone is None:
            return await work
        task = asyncio.current_task()
        assert task is not None
        return await _unless_gone(work, _Look(gone, task), task)

    async def disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # Answered

    async def answer(self, value: Any, status: int = 200, more: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Send JSON. `more` are headers besides its own."""
        body = model.encode(value)
        if (joint := self.scope["state"].get("joint")) is not None and len(body) <= JOINED:
            joint.hold()
        await self.start(status, [_JSON_HEADERS, (b"content-length", str(len(body)).encode()), *more])
        await self._send({"type": "http.response.body", "body": body})

    async def answer_list(self, value: Mapping[str, object], key: str) -> None:
        """An answer whose list under `key` may be long: then it is encoded in parts, and others have their turn between."""
        found = value.get(key)
        if not isinstance(found, list) or len(found) <= PART:
            return await self.answer(value)
        first = model.encode({name: one for name, one in value.items() if name != key})[:-1]
        pieces = [first + (b"," if len(first) > 1 else b"") + model.encode(key) + b":["]
        for at in range(0, len(found), PART):
            pieces.append((b"," if at else b"") + model.encode(found[at : at + PART])[1:-1])
            await asyncio.sleep(0)
        pieces.append(b"]}")
        await self.start(200, [_JSON_HEADERS, (b"content-length", str(sum(map(len, pieces))).encode())])
        for piece in pieces:
            await self.write(piece)
        await self.end()

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """End the answer with these bytes."""
        await self._send({"type": "http.response.body", "body": data})

    def hold_head(self) -> None:
        """Let the head of the answer leave with the first bytes after it, where the listener can do that."""
        if (joint := self.scope["state"].get("joint")) is not None:
            joint.hold()

    async def fail(self, error: errors.AtollError) -> None:
        await self.answer({"error": wire(error)}, error.http_status)


def check_shape(data: bytes, kind: Any = None) -> None:
    """Refuse a request that would become very many values before any is made. Long texts are no trouble, long lists are.

    What is counted can also stand inside a text; that of the fields of `kind` which are texts does not count.
    """
    check_texts(data, lambda: _fields(msgspec.json.decode(data, type=_unread(kind))))


def check_texts(data: bytes, parts: Callable[[], Iterable[msgspec.Raw]]) -> None:
    """The same for a request of another form: `parts` gives what is not looked into, of which texts do not count."""
    if len(data) <= LARGE_JSON:
        return
    marks = _marks(data)
    if MAX_VALUES < marks <= MAX_MARKS:
        try:
            marks -= sum(_marks(text) for part in parts() if (text := bytes(part))[:1] == b'"')
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
            pass  # it is not such a request, and is refused by its size
    if marks > MAX_VALUES:
        raise errors.TooLarge("the request has too many values", hint="send less, or upload files")


def _fields(made: Any) -> Iterable[msgspec.Raw]:
    return (getattr(made, name) for name in made.__struct_fields__)


def _marks(data: bytes) -> int:
    """Commas and opening brackets: there are at most as many values, and one."""
    return len(data) - len(data.translate(None, b",[{"))


@functools.cache
def _unread(kind: Any) -> Any:
    """A type with the fields of `kind`, of which none is looked into; any other field ends the decoding at once."""
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    fields = [(f"f{number}", msgspec.Raw, msgspec.Raw()) for number in range(len(names))]
    renamed = {f"f{number}": name for number, name in enumerate(names)}
    return msgspec.defstruct("Unread", fields, rename=renamed, forbid_unknown_fields=True)


async def _unless_gone(work: Awaitable[T], watch: "_Watch | _Look", task: "asyncio.Task[Any]") -> T:
    """Return what comes of the work; Gone when the watch has cancelled it."""
    try:
        return await work
    except asyncio.CancelledError:
        if not watch.gone:
            raise
        task.uncancel()
        raise Gone from None
    finally:
        watch.stop()


class _Watch:
    """Cancels a task when its caller has gone."""

    def __init__(self, exchange: Exchange, work: "asyncio.Task[Any]") -> None:
        self.gone = False
        self._exchange = exchange
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        await self._exchange.disconnected()
        self.gone = True
        self._work.cancel()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _Look:
    """Cancels a task when a look at its caller's connection, every half second, finds it closed."""

    def __init__(self, is_gone: Callable[[], bool], work: "asyncio.Task[Any]") -> None:
        self.gone = False
        self._is_gone = is_gone
        self._work = work
        self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN, self._look)

    def _look(self) -> None:
        if self._is_gone():
            self.gone = True
            self._work.cancel()
        else:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN, self._look)

    def stop(self) -> None:
        self._timer.cancel()


def wire(error: errors.AtollError) -> "errors.ErrorFields":
    """An error as JSON can carry it, whatever text the guest or the caller put into it."""
    plain = error.to_wire()
    plain["message"] = _text(plain["message"])
    if "details" in plain:
        plain["details"] = {key: _text(v) if isinstance(v, str) else v for key, v in plain["details"].items()}
    return plain


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode()


def unquote(raw: bytes) -> str:
    return unquote_to_bytes(raw).decode("utf-8", "surrogateescape")


def internal(error: Exception) -> errors.AtollError:
    """Return the error a caller sees for a bug: no text of ours, and where to look. A full disk is no bug."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        log.error("the disk is full: %s", error)
        return errors.DiskFull("the host's disk is full", hint="free space below ATOLL_HOME")
    log.error("unexpected failure", exc_info=error)
    return errors.Internal("something went wrong inside atoll", hint="see daemon.log")


def whole(query: dict[str, str], key: str, default: Any = None, least: int = 0, most: int = 2**53) -> Any:
    text = query.get(key)
    if text is None or text == "":
        return default
    try:
        if not text.isascii() or len(text) > 20 or "_" in text:
            raise ValueError
        value = int(text)
    except ValueError:
        raise errors.InvalidArgument(f"{key} must be a whole number, not {text!r:.40}") from None
    if not least <= value <= most:
        raise errors.InvalidArgument(f"{key} must be from {least} to {most}")
    return value


def flag(query: dict[str, str], key: str, default: bool = False) -> bool:
    text = query.get(key)
    if text is None:
        return default
    if text in ("1", "true", "yes", ""):
        return True
    if text in ("0", "false", "no"):
        return False
    raise errors.InvalidArgument(f"{key} must be 1 or 0")


def mode(query: dict[str, str]) -> int | None:
    """File mode: a decimal number, or octal when it starts with 0."""
    text = query.get("mode")
    if text is None or text == "":
        return None
    try:
        value = int(text.removeprefix("0o"), 8) if text.startswith("0") else int(text)
    except ValueError:
        raise errors.InvalidArgument(f"mode {text!r:.20} is not a number") from None
    if not 0 <= value <= 0o7777:
        raise errors.InvalidArgument("mode must be from 0 to 07777")
    return value
