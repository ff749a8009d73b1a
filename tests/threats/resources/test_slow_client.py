"""RES-09: requests that are slow, endless or deep. Normal calls go on; what is too much is refused by size before it is parsed."""

import contextlib
import json
import socket

from sandbox_lab import PATIENCE, Lab

from atoll import Sandbox


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
        assert not answer.startswith(b"HTTP/1.1 200")
    assert json.loads(json.dumps(lab.ask("GET", "/v1/health")[1]))["ok"]
