"""A worker of an iii engine: registers the sixteen functions there and passes each call on to the daemon.

A process of its own, on the `iii-sdk` package. What the bus has and HTTP has not, streaming channels, is done here: an
upload is read from its channel straight into the daemon, a download is sent frame by frame as the reader takes it.
"""

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from atoll import errors
from atoll.client._async.driver import AsyncExchange, AsyncLink
from atoll.client.calls import Call
from atoll.client.http import FRAMES, with_query
from atoll.surfaces.iii.failure import Failure
from atoll.surfaces.iii.requests import octal, sandbox_id
from atoll.surfaces.iii.settings import Settings, insecure_registries
from atoll.surfaces.iii.table import FUNCTIONS, schemas

log = logging.getLogger("atoll.iii")

NAME = "iii-sandbox"
DEFAULT_URL = "ws://127.0.0.1:49134"
DESCRIPTION = "Sandboxes for running code: create, exec, files, one-shot runs (atoll)"
FRAME = 64 * 1024
UNUSED_S = 300.0
SMALL = 1024 * 1024
REOPEN_S, PATIENCE = 0.5, 60
CONFLICT = 3


class Refused(Exception):
    """An error whose message, as the SDK sends it, is the envelope and nothing else."""


class Door:
    """The daemon as the worker sees it: a door of its own, opened again when the daemon restarts."""

    def __init__(self, name: str, settings: Settings, home: str | None = None) -> None:
        self.settings = settings
        self.name = name
        self._instance = secrets.token_hex(8)
        self._link = AsyncLink(home)
        self._open = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self.fault: errors.AtollError | None = None

    async def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep())
        while not self._open.is_set() and self.fault is None:
            await asyncio.sleep(0.02)
        if self.fault is not None:
            raise self.fault

    async def _keep(self) -> None:
        body = {
            "name": self.name,
            "instance": self._instance,
            "settings": msgspec.to_builtins(self.settings),
            "insecure_registries": insecure_registries(),
        }
        call = Call("POST", "/v1/functions/open", json.dumps(body).encode(), (("Accept", FRAMES),), timeout=None)
        patience = PATIENCE
        while True:
            try:
                exchange = await self._link.open(call)
                await exchange.raise_for_status()
                async for _ in exchange.frames():
                    self._open.set()
                patience = PATIENCE
            except errors.AlreadyExists as error:  # a worker that was just killed is noticed in a moment
                patience -= 1
                if patience <= 0:
                    self.fault = error
                    return
            except errors.AtollError as error:
                log.warning("the daemon is away: %s", error)
            self._open.clear()
            await asyncio.sleep(REOPEN_S)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        self._link.close()

    def _call(self, method: str, target: str, body: bytes | None = None) -> Call:
        return Call(method, target, body, (("X-Atoll-Functions", self.name),), timeout=None)

    async def ask(self, function: str, payload: Any) -> Any:
        """One call with a JSON answer."""
        await self._open.wait()
        body = json.dumps(payload).encode()
        return await _answer(await self._link.open(self._call("POST", f"/functions/{function}", body)))

    async def upload(self, fields: Mapping[str, object], source: AsyncIterator[bytes]) -> Any:
        await self._open.wait()
        target = with_query("/functions/sandbox::fs::write", fields)
        return await _answer(await self._link.open(self._call("PUT", target), source))

    async def download(self, fields: Mapping[str, object]) -> tuple[dict[str, Any], AsyncExchange]:
        await self._open.wait()
        exchange = await self._link.open(self._call("GET", with_query("/functions/sandbox::fs::read/content", fields)))
        if exchange.head.status >= 400:
            await _answer(exchange)
        return json.loads(exchange.head.headers["x-atoll-file"]), exchange


async def _answer(exchange: AsyncExchange) -> Any:
    answer = json.loads(await exchange.body())
    if exchange.head.status < 400:
        return answer
    error = answer.get("error", {})
    if error.get("code") == "invocation_failed":
        raise Refused(error["message"])
    raise Refused(str(Failure("S300", f"atoll: {error.get('message')}")))


class Worker:
    """The handlers. They run on the SDK's event loop."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.client: Any = None
        self._sending: set[asyncio.Task[None]] = set()

    def handler(self, function: str) -> Callable[[Any], Awaitable[Any]]:
        work = {"sandbox::fs::write": self._write, "sandbox::fs::read": self._read}.get(function)

        async def handle(data: Any) -> Any:
            try:
                return await (work(data) if work is not None else self.door.ask(function, _plain(data)))
            except Refused as refused:
                raise Refused(str(refused)) from None
            except Failure as failure:
                raise Refused(self._envelope(failure)) from None
            except errors.AtollError as error:
                code = "S216" if "::fs::" in function else "S300"
                raise Refused(self._envelope(Failure(code, error.message))) from None

        return handle

    def _envelope(self, failure: Failure) -> str:
        return f"handler error: {failure}" if self.door.settings.legacy_error_prefix else str(failure)

    async def _write(self, data: Any) -> Any:
        content = data.get("content") if isinstance(data, dict) else None
        if content is None or isinstance(content, str | int | float | list | dict):
            return await self.door.ask("sandbox::fs::write", _plain(data))
        if not hasattr(content, "__aiter__"):
            raise Failure("S001", "content is a channel to write to", note="pass the reader's end and fill the writer")
        if data.get("content_b64") is not None:
            raise Failure("S001", "exactly one of content and content_b64 is needed")
        fields = {key: data[key] for key in ("sandbox_id", "path", "mode") if key in data}
        for key in ("sandbox_id", "path"):
            if not isinstance(fields.get(key), str):
                raise Failure("S001", f"missing: {key}")
        octal(str(fields.get("mode", "0644")))
        sandbox_id(fields["sandbox_id"])
        source = _Upload(content, float(self.door.settings.upload_idle_secs))
        try:
            return await self.door.upload(
                {**fields, "parents": "1" if data.get("parents") is True else "0"}, source.pieces()
            )
        except errors.AtollError:
            if source.failure is not None:
                raise source.failure from None
            raise
        finally:
            with suppress(Exception):
                await content.close_async()

    async def _read(self, data: Any) -> Any:
        if not isinstance(data, dict) or any(not isinstance(data.get(key), str) for key in ("sandbox_id", "path")):
            return await self.door.ask("sandbox::fs::read", _plain(data))
        told, exchange = await self.door.download({key: data[key] for key in ("sandbox_id", "path")})
        try:
            first = b""
            if told["size"] < SMALL:
                first = await exchange.body()
                if len(first) < SMALL:
                    told["size"] = len(first)
                    with suppress(UnicodeDecodeError):
                        told["body"] = first.decode()
            channel = await _channel(self.client)
        except BaseException:
            exchange.close()
            raise
        task = asyncio.create_task(_send(channel.writer, first, exchange))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        ref = channel.reader_ref
        told["content"] = {"channel_id": ref.channel_id, "access_key": ref.access_key, "direction": "read"}
        return told


class _Upload:
    """A channel's bytes as they come. A pause that is too long, or an end that was none, fails the upload."""

    def __init__(self, reader: Any, idle: float) -> None:
        self._reader = reader
        self._idle = idle
        self.failure: Failure | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            stream = await asyncio.wait_for(self._reader._ensure_connected(), UNUSED_S)
            while True:
                piece = await asyncio.wait_for(stream.recv(), self._idle)
                if isinstance(piece, bytes) and piece:
                    yield piece
        except TimeoutError:
            self._stalled(f"no data for {self._idle:g} s")
        except OSError as error:
            self._stalled(str(error))
        except Exception as error:
            if type(error).__name__ != "ConnectionClosedOK":
                self._stalled(str(error))

    def _stalled(self, why: str) -> None:
        self.failure = Failure("S218", f"the upload stopped before its end: {why}")
        raise self.failure


async def _channel(client: Any) -> Any:
    from iii.helpers import create_channel_async

    return await create_channel_async(client)


async def _send(writer: Any, first: bytes, exchange: AsyncExchange) -> None:
    """Send a file into its channel. What fails late is one text frame; a channel nobody reads is given up in the end."""
    try:
        async with asyncio.timeout(UNUSED_S) as unused:
            for start in range(0, len(first), FRAME):
                await writer.write(first[start : start + FRAME])
                unused.reschedule(asyncio.get_running_loop().time() + UNUSED_S)
            try:
                while piece := await exchange.read():
                    for start in range(0, len(piece), FRAME):
                        await writer.write(piece[start : start + FRAME])
                        unused.reschedule(asyncio.get_running_loop().time() + UNUSED_S)
            except errors.AtollError as error:
                await writer.send_message_async(json.dumps({"error": {"code": "S216", "message": error.message}}))
            await writer._ensure_connected()
    except Exception as error:
        log.warning("a download ended early: %s", error)
    finally:
        exchange.close()
        with suppress(Exception):
            await writer.close_async()


def _plain(data: Any) -> Any:
    """The payload as JSON; a channel where none belongs becomes something no field accepts."""
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return data if data is None or isinstance(data, str | int | float | bool) else {"channel": True}


def serve(url: str, settings: Settings, *, namespace: str | None, lifeline: int | None = None) -> int:
    """Be a worker until told to stop; the exit code."""
    try:
        from iii import InitOptions, RegistrationRejectedError, register_worker
    except ImportError:
        raise errors.Unsupported("the package iii-sdk is not installed", hint="pip install 'atoll[iii]'") from None
    name = os.environ.get("III_WORKER_NAME") or NAME
    options = InitOptions(
        worker_name=name, worker_description=DESCRIPTION, namespace=namespace, otel={"enabled": False},
        enable_metrics_reporting=False,
    )  # fmt: skip
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.set())
    if lifeline is not None:
        threading.Thread(target=_watch_lifeline, args=(lifeline, stopped), daemon=True).start()
    try:
        client = register_worker(url, options)
    except RegistrationRejectedError as error:
        return _rejected(error)
    logging.getLogger("iii").addFilter(_expected)
    for known in list(logging.root.manager.loggerDict):
        if known.startswith("iii."):
            logging.getLogger(known).addFilter(_expected)
    worker = Worker(
        _made(client, f"{namespace or os.environ.get('III_NAMESPACE') or 'default'}/{name}@{url}", settings)
    )
    worker.client = client
    try:
        asyncio.run_coroutine_threadsafe(worker.door.start(), client._loop).result(120)
        for function, entry in FUNCTIONS.items():
            request, answer = schemas(function)
            client.register_function(
                function,
                worker.handler(function),
                description=entry.does,
                request_format=request,
                response_format=answer,
            )
        print(f"serving {len(FUNCTIONS)} functions to {url}", file=sys.stderr, flush=True)
        while not stopped.wait(0.2):
            if client._fatal_error is not None:
                return _rejected(client._fatal_error)
        return 0
    finally:
        client._loop.call_soon_threadsafe(worker.door.close)
        client.shutdown()


def _expected(record: logging.LogRecord) -> bool:
    """The SDK prints a traceback for every error a handler raises; ours are answers."""
    return not (record.exc_info and isinstance(record.exc_info[1], Refused))


def _made(client: Any, name: str, settings: Settings) -> Door:
    async def make() -> Door:
        return Door(name, settings)

    found: Door = asyncio.run_coroutine_threadsafe(make(), client._loop).result(30)
    return found


def _rejected(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    print("  remove the stock iii-sandbox entry of the engine, or use another --namespace", file=sys.stderr)
    return CONFLICT


def _watch_lifeline(descriptor: int, stopped: threading.Event) -> None:
    with suppress(OSError):
        while os.read(descriptor, 4096):
            pass
    stopped.set()
