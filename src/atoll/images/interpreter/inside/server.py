"""The interpreter's server: HTTP/1.1 on port 49999 of the sandbox, one request a connection.

    python3 server.py --ready    starts it, if it does not run, and returns when its first kernel answers
    python3 server.py            serves

Routes: POST /execute (lines of JSON as they come), GET and POST /contexts, DELETE /contexts/ID, POST /contexts/ID/restart,
GET /health, and POST /environment, by which the daemon hands over the variables of a sandbox.
"""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

PORT = 49999
MOST_HEAD = 64 * 1024
MOST_BODY = 64 * 1024 * 1024
SILENCE = 5.0  # seconds after which a keepalive line is sent
PATIENCE = 120.0


def ready() -> int:
    """Start the server, if nobody has, and wait until it answers."""
    child: subprocess.Popen[bytes] | None = None
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=PATIENCE)
            connection.request("GET", "/health")
            answer = connection.getresponse()
            text = answer.read(2000).decode(errors="replace")
            if answer.status == 200:
                return 0
            print(text, file=sys.stderr)
            return 1
        except OSError:
            if child is None:
                log = open("/tmp/interpreter.log", "ab")  # noqa: SIM115  # the server's for its whole life
                child = subprocess.Popen(
                    [sys.executable, os.path.abspath(__file__)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, cwd=os.path.expanduser("~"),
                )  # fmt: skip
            elif child.poll() is not None:
                print(f"the interpreter ended with {child.returncode}; see /tmp/interpreter.log", file=sys.stderr)
                return 1
            time.sleep(0.02)
    print("the interpreter did not answer in time", file=sys.stderr)
    return 1


class Server:
    """Answers requests with what the contexts say."""

    def __init__(self) -> None:
        from contexts import Contexts

        self.contexts = Contexts(os.path.expanduser("~"), dict(os.environ))
        self.first = asyncio.ensure_future(self.contexts.default())
        self.first.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from contexts import Refused

        try:
            try:
                method, path, body = await self._read(reader)
                await self._answer(method, path, body, reader, writer)
            except Refused as refused:
                await _send(writer, refused.status, str(refused).encode(), "text/plain; charset=utf-8")
            except (ValueError, asyncio.LimitOverrunError, asyncio.IncompleteReadError) as error:
                await _send(writer, 400, f"the request is not understood: {error}".encode()[:500], "text/plain")
        except (ConnectionError, asyncio.CancelledError):
            pass
        except Exception as error:
            with suppress(Exception):
                await _send(writer, 500, f"{type(error).__name__}: {error}".encode()[:500], "text/plain")
            raise
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return method, path, await _chunks(reader)
        length = int(headers.get("content-length", "0"))
        if not 0 <= length <= MOST_BODY:
            raise ValueError(f"a body of {length} bytes is too large")
        return method, path, await reader.readexactly(length)

    async def _answer(
        self, method: str, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        from contexts import Refused

        parts = path.partition("?")[0].strip("/").split("/")
        match method, parts:
            case "GET", ["health"]:
                await asyncio.shield(self.first)
                await _json(writer, {"status": "ok"})
            case "POST", ["execute"]:
                await self._execute(_fields(body), reader, writer)
            case "GET", ["contexts"]:
                await self.contexts.default()
                await _json(writer, self.contexts.list())
            case "POST", ["contexts"]:
                asked = _fields(body)
                made = await self.contexts.create(asked.get("language"), asked.get("cwd"))
                await _json(writer, made.shown())
            case "DELETE", ["contexts", context]:
                await self.contexts.remove(context)
                await _send(writer, 204, b"", "text/plain")
            case "POST", ["contexts", context, "restart"]:
                await self.contexts.restart(context)
                await _send(writer, 204, b"", "text/plain")
            case "POST", ["environment"]:
                await self.contexts.set_env(_env(_fields(body).get("env")))
                await _send(writer, 204, b"", "text/plain")
            case _:
                raise Refused(404, "no such route")

    async def _execute(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from bundle import encode
        from contexts import Refused

        code, chosen, language = asked.get("code"), asked.get("context_id"), asked.get("language")
        if not isinstance(code, str):
            raise Refused(400, "code must be a string")
        if chosen is not None and language is not None:
            raise Refused(400, "context_id and language cannot be used together")
        env = _env(asked.get("env_vars"))
        context = self.contexts.find(chosen) if chosen is not None else await self.contexts.default(language)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n"
            b"cache-control: no-store\r\nconnection: close\r\n\r\n"
        )
        lines = context.run(code, env)
        gone = asyncio.ensure_future(reader.read())  # its end is the client's
        following: asyncio.Future[Any] = asyncio.ensure_future(anext(lines, None))
        try:
            while True:
                await asyncio.wait([following, gone], timeout=SILENCE, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                line = following.result() if following.done() else {"type": "keepalive"}
                data = encode(line if line is not None else {"type": "end_of_execution"})
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                sending = asyncio.ensure_future(writer.drain())
                await asyncio.wait([sending, gone], return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    sending.cancel()
                    return
                sending.result()
                if following.done():
                    if line is None:
                        writer.write(b"0\r\n\r\n")
                        await writer.drain()
                        return
                    following = asyncio.ensure_future(anext(lines, None))
        finally:
            gone.cancel()
            following.cancel()
            with suppress(BaseException):
                await following
            await lines.aclose()


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while True:
        size = int((await reader.readline()).partition(b";")[0].strip() or b"x", 16)
        if size < 0 or len(body) + size > MOST_BODY:
            raise ValueError("the body is too large")
        body += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise ValueError("a chunk is cut")
        if size == 0:
            return bytes(body)


def _fields(body: bytes) -> dict[str, Any]:
    from contexts import Refused

    try:
        found = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None
    if not isinstance(found, dict):
        raise Refused(400, "the body must be an object")
    return found


def _env(given: Any) -> dict[str, str]:
    from contexts import Refused

    if given is None:
        return {}
    if not isinstance(given, dict) or len(given) > 1000 or not all(isinstance(value, str) for value in given.values()):
        raise Refused(400, "env_vars must be an object of strings")
    if not all(name.isidentifier() and name.isascii() for name in given) or any(
        "\0" in value for value in given.values()
    ):
        raise Refused(400, "env_vars: a name has letters, digits and `_`, and no value has a NUL")
    return dict(given)


async def _json(writer: asyncio.StreamWriter, value: Any) -> None:
    await _send(writer, 200, json.dumps(value).encode(), "application/json")


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str) -> None:
    reason = http.client.responses.get(status, "")
    head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def main() -> None:
    listening = socket.create_server(("127.0.0.1", PORT), backlog=128)  # who comes second ends here
    server = Server()
    running = await asyncio.start_server(server.serve, sock=listening, limit=MOST_HEAD)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with running:
        await stopped.wait()
    await server.contexts.each(lambda one: one.end())


if __name__ == "__main__":
    if sys.argv[1:] == ["--ready"]:
        sys.exit(ready())
    asyncio.run(main())
