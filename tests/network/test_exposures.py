"""Exposed ports: HTTP and WebSockets from outside to a program inside, for whoever has the URL and for nobody else."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lab.network import PATIENCE, Box, Failed, Lab, until

SERVER = """
import http.server, socketserver, sys, hashlib, base64
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def reply(self, body, **headers):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/ws":
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
            self.end_headers()
            self.wfile.flush()
            while data := self.connection.recv(65536):
                self.connection.sendall(b"echo:" + data)
            self.close_connection = True
        elif self.path == "/garbage":
            self.wfile.write(b"\\0\\1 this is no HTTP at all\\r\\n\\r\\n")
            self.close_connection = True
        elif self.path == "/smuggle":
            self.wfile.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nokHTTP/1.1 200 OK\\r\\nContent-Length: 4\\r\\n\\r\\nevil")
            self.close_connection = True
        elif self.path == "/chunks":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (b"one", b"two"):
                self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(piece), piece))
            self.wfile.write(b"0\\r\\n\\r\\n")
        elif self.path == "/login":
            self.reply(b"in", Set_Cookie="session=mine; Path=/deep; HttpOnly; Domain=127.0.0.1")
        elif self.path == "/hang":
            self.connection.recv(1)
        else:
            import json
            self.reply(json.dumps({"path": self.path, "headers": dict(self.headers)}).encode())
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(str(len(body)).encode() + b" " + hashlib.sha256(body).hexdigest().encode())
    def log_message(self, *words): pass
class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
server = Server(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


class Answer:
    """One HTTP answer, read by hand so that nothing is hidden."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


class Web:
    """A program inside that serves, and its URL."""

    def __init__(self, lab: Lab, box: Box) -> None:
        self.lab, self.box = lab, box
        run = {"code": SERVER, "language": "python", "background": True}
        self.command = lab.post(f"{box.path}/run", run)["command_id"]
        self.inner = int(until(lambda: box.command(self.command)["stdout"].strip(), "the server inside listens"))
        self.found = expose(lab, box, self.inner)
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/x/([0-9a-f]{40})/)", self.found["url"])
        assert match is not None
        self.port, self.path, self.token = int(match[1]), match[2], match[3]

    def ask(self, path: str = "", method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
        """`path` is below the URL's, or from the root when it starts with a slash."""
        with self.lab.dial(self.port) as sock:
            sock.sendall(request(path if path.startswith("/") else self.path + path, method, body, **headers))
            return read(sock.makefile("rb"))


def request(path: str, method: str = "GET", body: bytes = b"", **headers: str) -> bytes:
    fields = {"Host": "127.0.0.1", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if body:
        fields["Content-Length"] = str(len(body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


def read(stream: Any) -> Answer:
    status = int(stream.readline().split()[1])
    headers = {}
    while line := stream.readline().strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(stream.readline(), 16):
            body += stream.read(size)
            stream.readline()
        stream.readline()
    else:
        body = stream.read(int(headers["content-length"])) if "content-length" in headers else b""
    return Answer(status, headers, body)


def expose(lab: Lab, box: Box, port: int, **more: Any) -> Any:
    return lab.post(f"{box.path}/exposures", {"port": port, **more})


def exposed(lab: Lab, box: Box) -> Any:
    return lab.get(f"{box.path}/exposures")["exposures"]


@pytest.fixture(scope="module")
def web(lab: Lab) -> Iterator[Web]:
    box = lab.create(hosts=[])
    yield Web(lab, box)
    box.destroy()


def test_a_request_reaches_the_program(web: Web) -> None:
    """Serve below the URL with the prefix taken off, Host kept, and our headers none of the caller's making."""
    found = web.ask("some/page?q=1", X_K8E_Expose_Session="forged", X_Forwarded_Prefix="/evil")
    seen = json.loads(found.body)
    assert found.status == 200 and seen["path"] == "/some/page?q=1"
    headers = {name.lower(): value for name, value in seen["headers"].items()}
    assert headers["host"] == "127.0.0.1" and headers["x-k8e-expose-session"] == f"sess-{web.box.id}"
    assert headers["x-forwarded-prefix"] == web.path.rstrip("/")
    assert found.headers["referrer-policy"] == "same-origin"


def test_a_site_of_its_own(web: Web) -> None:
    """Serve the whole path under the name that holds the secret, so that browsers keep sandboxes apart."""
    assert web.found["site_url"] == f"http://{web.token}.localhost:{web.port}/"
    seen = json.loads(web.ask("/a/b", Host=f"{web.token}.localhost:{web.port}").body)
    assert seen["path"] == "/a/b"


@pytest.mark.parametrize(
    "browser", [{"User_Agent": "Mozilla/5.0 (X11)"}, {"Sec_Fetch_Site": "none"}], ids=["name", "fetch"]
)
def test_a_browsers_cookies_of_others_stay_out(web: Web, browser: dict[str, str]) -> None:
    """Those of another server on loopback, and of another sandbox, go with every request of a browser; its own come back."""
    given = web.ask("login", **browser).headers["set-cookie"]
    pair, *attributes = given.split("; ")
    assert set(attributes) == {"HttpOnly", f"Path={web.path.rstrip('/')}/deep"} and pair.endswith(".session=mine")
    jar = f"jupyter=secret; {pair}; 0123456789abcdef.session=of-another-sandbox; session=forged"
    assert json.loads(web.ask("page", Cookie=jar, **browser).body)["headers"]["cookie"] == "session=mine"
    assert "cookie" not in json.loads(web.ask("page", Cookie="jupyter=secret", **browser).body)["headers"]
    plain = json.loads(web.ask("page", Cookie="a=1; b=2").body)["headers"]["cookie"]
    assert plain == "a=1; b=2"  # a program that is no browser says what it means


def test_bodies_of_every_kind_pass(web: Web) -> None:
    """Carry a large upload and a chunked answer."""
    import hashlib

    data = b"0123456789abcdef" * 200_000
    assert web.ask("up", "POST", data).body.split() == [
        str(len(data)).encode(), hashlib.sha256(data).hexdigest().encode(),
    ]  # fmt: skip
    assert web.ask("chunks").body == b"onetwo"


def test_a_connection_serves_many_requests(web: Web) -> None:
    """Keep the caller's connection, with each request going where it says."""
    with web.lab.dial(web.port) as sock:
        stream = sock.makefile("rb")
        for number in range(3):
            sock.sendall(request(f"{web.path}{number}"))
            assert json.loads(read(stream).body)["path"] == f"/{number}"
        sock.sendall(request("/x/" + "0" * 40 + "/"))
        assert read(stream).status == 404


def test_a_websocket_stays_open(web: Web) -> None:
    """Switch protocols and pass bytes both ways until one side closes."""
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    with web.lab.dial(web.port) as sock:
        sock.sendall(request(web.path + "ws", **upgrade))
        stream = sock.makefile("rb")
        answer = read(stream)
        assert answer.status == 101 and answer.headers["upgrade"] == "websocket"
        for word in (b"first", b"second"):
            sock.sendall(word)
            assert stream.read(len(word) + 5) == b"echo:" + word
        sock.shutdown(socket.SHUT_WR)
        assert stream.read() == b""


def test_k8e_D22_without_the_secret_there_is_nothing(web: Web) -> None:
    """Answer 404 to a wrong, cut, empty or foreign secret, whatever form it has."""
    wrong = [
        "/", "/x/", "/x//", f"/x/{web.token[:-1]}/", f"/x/{web.token}0/", f"/x/{'0' * 40}/", f"/x/{web.token.upper()}/",
        f"/k8e/expose/sess-{web.box.id}/{web.inner}/", "/x/../x/", f"/y/{web.token}/",
    ]  # fmt: skip
    assert {web.ask(path).status for path in wrong} == {404}
    assert web.ask("/", Host=f"{'0' * 40}.localhost").status == 404
    assert web.ask(web.path.rstrip("/")).status == 308


def test_nonsense_is_refused(web: Web) -> None:
    """Answer 400 to what is not HTTP, and end a head that is too long."""
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        with web.lab.dial(web.port) as sock:
            sock.sendall(data)
            assert sock.makefile("rb").readline().split()[1:2] == [b"400"]
    with web.lab.dial(web.port) as sock:
        try:
            sock.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 1_000_000)
            answer = sock.makefile("rb").readline()
        except ConnectionError:
            answer = b""
        assert answer == b"" or int(answer.split()[1]) in (400, 431)
    assert web.ask("fine").status == 200


def test_a_hostile_answer_hurts_nobody(web: Web) -> None:
    """Answer 502 for a program that does not speak HTTP, and pass on no second answer it smuggles in."""
    assert web.ask("garbage").status == 502
    with web.lab.dial(web.port) as sock:
        stream = sock.makefile("rb")
        sock.sendall(request(web.path + "smuggle"))
        assert read(stream).body == b"ok"
        sock.sendall(request(web.path + "next"))
        line = stream.readline()
        assert line == b"" or b"evil" not in line + stream.read(200)


def test_nothing_listens(web: Web) -> None:
    """Expose a port before its program listens; until then the answer says so."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    found = expose(web.lab, web.box, port)
    path = found["url"].split(str(web.port))[1]
    assert web.ask(path).status in (502, 503)
    assert web.lab.delete(f"{web.box.path}/exposures/{port}") == {"ok": True, "port": port}


def test_exposing_again_is_harmless(web: Web) -> None:
    """Give the same URL for the same port, and list it once."""
    assert expose(web.lab, web.box, web.inner)["url"] == web.found["url"]
    assert [one["url"] for one in exposed(web.lab, web.box)] == [web.found["url"]]


@pytest.mark.parametrize(
    "fields", [{"port": 0}, {"port": 65536}, {"port": "x"}, {}, {"port": 80, "host": "example.com"}]
)
def test_bad_ports_are_refused(web: Web, fields: dict[str, Any]) -> None:
    """Answer invalid_argument to what is no port or no address."""
    with pytest.raises(Failed) as failed:
        web.lab.post(f"{web.box.path}/exposures", fields)
    assert failed.value.code == "invalid_argument"


def test_unexpose_cuts_what_is_open(lab: Lab) -> None:
    """Close the URL and the connections through it; a second time there is nothing to close."""
    box = lab.create(hosts=[])
    web = Web(lab, box)
    with lab.dial(web.port) as sock:
        sock.sendall(request(web.path + "hang"))
        target = f"{box.path}/exposures/{web.inner}"
        until(lambda: lab.get(box.path)["state"] == "running", "it runs")
        assert lab.delete(target)["ok"] is True
        sock.settimeout(PATIENCE)
        try:
            assert sock.recv(100) == b""
        except ConnectionResetError:
            pass
    assert lab.delete(target)["ok"] is False
    assert web.ask().status == 404 and exposed(lab, box) == []
    box.destroy()


def test_urls_survive_a_restart_and_end_with_their_sandbox(own_lab: Lab) -> None:
    """Serve the same URL after the daemon was killed; answer 404 once the sandbox has ended."""
    box = own_lab.create(hosts=[])
    web = Web(own_lab, box)
    own_lab.kill()
    own_lab.start()
    assert exposed(own_lab, box)[0]["url"] == web.found["url"]
    assert json.loads(web.ask("again").body)["path"] == "/again"
    box.destroy()
    assert web.ask("again").status == 404


def test_k8e_D15_only_the_owner_lists_and_closes(make: Callable[..., Box], lab: Lab) -> None:
    """Know nothing of a sandbox that is not there."""
    for method, path in (("GET", ""), ("DELETE", "/80")):
        with pytest.raises(Failed) as failed:
            lab.ask(method, f"/v1/sandboxes/nobodys/exposures{path}")
        assert failed.value.code == "not_found"
