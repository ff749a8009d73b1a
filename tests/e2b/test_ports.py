"""Ports of sandboxes, by host name and by header; who may reach them."""

import http.client
import json
import socket
from typing import Any

import pytest
from e2b import Sandbox
from lab.e2b import ENVD, Door
from lab.waiting import PATIENCE, until

SERVER = """
import http.server
class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        if self.headers.get('upgrade'):
            self.wfile.write(b'HTTP/1.1 101 Switching Protocols\\r\\nconnection: upgrade\\r\\nupgrade: echo\\r\\n\\r\\n')
            self.wfile.write(self.rfile.readline().upper())
            self.close_connection = True
            return
        body = (self.path + ' ' + self.headers['host'] + ' ' + str('E2b-Sandbox-Id' in self.headers)).encode()
        self.send_response(200); self.send_header('content-length', str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_POST(self):
        body = self.rfile.read(int(self.headers['content-length']))
        self.send_response(200); self.send_header('content-length', str(len(body))); self.end_headers(); self.wfile.write(body)
http.server.ThreadingHTTPServer(('127.0.0.1', 8000), Echo).serve_forever()
"""


def get(
    door: Door, host: str = "", headers: dict[str, str] | None = None, path: str = "/x?y=1", body: bytes = b""
) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=PATIENCE)
    try:
        sent = {**({"Host": host} if host else {}), **(headers or {})}
        connection.request("POST" if body else "GET", path, body or None, sent)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def server(door: Door, box: Any) -> Any:
    box.files.write("server.py", SERVER)
    box.commands.run("python3 server.py", background=True, timeout=0)
    until(lambda: get(door, box.get_host(8000))[0] == 200, "it listens")
    return box


def test_by_host_and_by_header(door: Door, server: Any) -> None:
    host = server.get_host(8000)
    assert host == f"8000-{server.sandbox_id}.localhost:{door.port}"
    assert get(door, host) == (200, f"/x?y=1 {host} False".encode())
    named = {"E2b-Sandbox-Id": server.sandbox_id, "E2b-Sandbox-Port": "8000"}
    assert get(door, headers=named)[1].endswith(b" False"), "how it got there is not told inside"
    assert get(door, host, body=b"z" * 300_000) == (200, b"z" * 300_000)
    assert get(door, host, {"E2b-Sandbox-Id": server.sandbox_id, "E2b-Sandbox-Port": "8001"})[0] == 400
    assert get(door, headers={"E2b-Sandbox-Id": server.sandbox_id})[0] == 400
    assert get(door, headers={**named, "E2b-Sandbox-Port": "eight"})[0] == 400
    assert get(door, headers={**named, "E2b-Sandbox-Port": "70000"})[0] == 400


def test_nothing_listens_and_nobody_there(door: Door, server: Any) -> None:
    status, told = get(door, server.get_host(8001))
    assert status == 502 and json.loads(told) | {"message": ""} == {
        "code": 502, "sandboxId": server.sandbox_id, "port": 8001, "message": "",
    }  # fmt: skip
    assert b"port is not open" in told
    for port in (8000, ENVD):
        status, told = get(door, f"{port}-{'a' * 20}.localhost:{door.port}", path="/health")
        assert status == 502 and b"The sandbox was not found" in told


def test_one_connection_serves_several_requests_and_upgrades(door: Door, server: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=PATIENCE)
    host = {"Host": server.get_host(8000)}
    for number in range(3):
        connection.request("GET", f"/{number}", headers=host)
        answer = connection.getresponse()
        assert answer.read().startswith(f"/{number} ".encode())
    connection.close()
    with socket.create_connection(("127.0.0.1", door.port), PATIENCE) as raw:
        head = f"GET / HTTP/1.1\r\nHost: {server.get_host(8000)}\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n"
        raw.sendall(head.encode())
        heard = b""
        while b"\r\n\r\n" not in heard:
            heard += raw.recv(4096)
        assert heard.startswith(b"HTTP/1.1 101 ")
        raw.sendall(b"hello\n")
        while not heard.endswith(b"HELLO\n"):
            piece = raw.recv(4096)
            assert piece, heard
            heard += piece


def test_envd_by_host_needs_its_token(door: Door, server: Any) -> None:
    host = f"{ENVD}-{server.sandbox_id}.localhost:{door.port}"
    assert get(door, host, path="/health")[0] == 204
    assert get(door, host, path="/files?path=server.py")[0] == 401
    token = {"X-Access-Token": server._envd_access_token}
    assert get(door, host, token, path="/files?path=server.py") == (200, SERVER.encode())
    for path in ("/init", "/freeze", "/nothing"):
        assert get(door, host, token, path=path)[0] == 404


def test_closed_ports_need_the_traffic_token(door: Door) -> None:
    box = Sandbox.create(timeout=300, network={"allow_public_traffic": False}, **door.options)
    try:
        box.files.write("server.py", SERVER)
        box.commands.run("python3 server.py", background=True, timeout=0)
        token = {"E2B-Traffic-Access-Token": box.traffic_access_token}
        until(lambda: get(door, box.get_host(8000), token)[0] == 200, "it listens")
        assert get(door, box.get_host(8000))[0] == 403
        assert get(door, box.get_host(8000), {"E2B-Traffic-Access-Token": box._envd_access_token})[0] == 403
        other = Sandbox.create(timeout=60, **door.options)
        assert get(door, box.get_host(8000), {"E2B-Traffic-Access-Token": other.traffic_access_token})[0] == 403
        other.kill()
    finally:
        box.kill()
    assert get(door, box.get_host(8000))[0] == 502
