"""A port inside a sandbox through a WebSocket."""

import asyncio
import json
from typing import Any

import pytest
import websockets.exceptions
from lab.daemon import PATIENCE, Box, DaemonProcess, until

SERVER = """
import socket
s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1], flush=True)
while True:
    c, _ = s.accept()
    while data := c.recv(65536): c.sendall(data.upper())
    c.sendall(b"<end>"); c.close()
"""


async def connect(daemon: DaemonProcess, path: str) -> Any:
    return await websockets.unix_connect(str(daemon.home / "daemon.sock"), f"ws://daemon{path}", max_size=None)


async def test_bytes_pass_both_ways_and_a_half_close_is_passed_on(box: Box, daemon: DaemonProcess) -> None:
    command = daemon.post(
        f"{box.path}/run", {"code": SERVER, "language": "python", "background": True, "timeout_ms": 0}
    )["command_id"]
    port = until(lambda: box.command(command)["stdout"].strip(), "the server listens")
    blob = b"abc" * 300_000
    async with asyncio.timeout(PATIENCE):
        ws = await connect(daemon, f"{box.path}/ports/{port}")
        got = b""

        async def send() -> None:
            for at in range(0, len(blob), 100_000):
                await ws.send(blob[at : at + 100_000])
            await ws.send(b"")

        sender = asyncio.create_task(send())
        async for message in ws:
            got += message
        await sender
    assert got == blob.upper() + b"<end>"
    daemon.post(f"{box.path}/commands/{command}/kill")


@pytest.mark.parametrize("port", ["1", "0", "65536", "x", "99999999999"])
async def test_a_port_nobody_listens_on_is_refused(box: Box, daemon: DaemonProcess, port: str) -> None:
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
            await connect(daemon, f"{box.path}/ports/{port}")
        code = json.loads(caught.value.response.body or b"")["error"]["code"]
        assert code == ("failed_precondition" if port == "1" else "invalid_argument")
        with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
            await connect(daemon, "/v1/sandboxes/unknown/ports/80")
        assert caught.value.response.status_code == 404
        with pytest.raises(websockets.exceptions.InvalidStatus):
            await connect(daemon, "/v1/elsewhere")
    assert daemon.get("/v1/health")["ok"]
