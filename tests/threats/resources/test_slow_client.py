"""RES-09: requests that are slow, endless or deep. Normal calls go on; what is too much is refused by size before it is parsed."""

import asyncio
import contextlib
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from lab.sandboxes import PATIENCE, Lab

from atoll import Sandbox
from atoll.server import request_limits as heads
from atoll.server import slow_clients as pace
from atoll.server.server import Listener
from atoll.server.tcp import Door


def test_slow_requests_delay_nobody(lab: Lab, sandbox: Sandbox) -> None:
    """Hundreds of half-sent headers and bodies, and every other call is served."""
    with contextlib.ExitStack() as stack:
        for number in range(200):
            link = stack.enter_context(socket.socket(socket.AF_UNIX))
            link.settimeout(PATIENCE)
            link.connect(f"{lab.home}/daemon.sock")
            if number % 2:
                link.sendall(b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
            else:
                link.sendall(b"POST /v1/sandb")
        for _ in range(5):
            assert sandbox.exec("echo on").stdout == "on\n"


def test_giant_and_deep_bodies_are_refused(lab: Lab, sandbox: Sandbox) -> None:
    """Too large is 413, too deep is 400, and headers without end are cut."""
    path = f"/v1/sandboxes/{sandbox.id}/exec"
    deep = b'{"command": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert lab.ask("POST", path, deep)[0] == 400
    assert lab.ask("POST", path, b'{"command": "' + b"x" * (80 << 20) + b'"}')[0] == 413
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(PATIENCE)
        link.connect(f"{lab.home}/daemon.sock")
        with contextlib.suppress(OSError):
            link.sendall(b"GET / HTTP/1.1\r\n")
            for _ in range(300):
                link.sendall(b"X-Long: " + b"y" * 8000 + b"\r\n")
        answer = b""
        with contextlib.suppress(OSError):
            answer = link.recv(100)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431"), answer
    assert lab.ask("GET", "/v1/health")[1]["ok"]


async def test_a_head_that_does_not_come_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real listener with a short clock: silent and dripping connections are ended, a whole request is served."""
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.5)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1)  # longer than the clock: an answer may take its time
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"served"})

    with tempfile.TemporaryDirectory(prefix="atb-") as place:
        listener = Listener(app, Path(place) / "s")
        await listener.open()
        try:
            async with asyncio.timeout(PATIENCE):
                silent, _ = await asyncio.open_unix_connection(f"{place}/s")
                dripping, drip = await asyncio.open_unix_connection(f"{place}/s")
                drip.write(b"GET / HTTP/1.1\r\nX-Slow: ")
                whole, ask = await asyncio.open_unix_connection(f"{place}/s")
                ask.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert (await silent.read()).startswith(b"HTTP/1.1 408")
                assert (await dripping.read()).startswith(b"HTTP/1.1 408")
                assert b"served" in await whole.read()
        finally:
            await listener.close(1)


async def test_bodies_that_trickle_and_answers_nobody_takes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real TCP door with short clocks: a dripping upload and a reader without progress end, honest callers do not."""
    monkeypatch.setattr(pace, "BODY_SECONDS", 3.0)
    monkeypatch.setattr(pace, "STALL_SECONDS", 3.0)
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        size = 0
        while (message := await receive()).get("more_body"):
            size += len(message["body"])
        if message["type"] == "http.disconnect":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] != "/flood":
            await asyncio.sleep(4)  # longer than the clocks: an answer may take its time
            await send({"type": "http.response.body", "body": b"got %d" % (size + len(message["body"]))})
            return
        watching = asyncio.create_task(receive())
        while not watching.done():
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
            await asyncio.sleep(0)
        ended.set()

    async def connect(request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(request)
        return reader, writer

    door = Door(app)
    port = await door.open("127.0.0.1", 0)
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(PATIENCE):
            dripping, _ = await connect(head % b"/" + b"{")
            stalled, stays = await connect(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
            honest, sends = await connect(head % b"/")
            for _ in range(4):
                await asyncio.sleep(0.3)
                sends.write(bytes(2500))
            assert b"got 10000" in await honest.read()
            assert (await dripping.read()).startswith(b"HTTP/1.1 408")
            await ended.wait()
            stays.close()
            assert stalled is not None
    finally:
        await door.close()
