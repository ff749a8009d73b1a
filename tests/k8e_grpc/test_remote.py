"""Every REST verb over TLS, through the link a remote `Sandbox` uses."""

import asyncio
import os
import secrets
import socket
import ssl

import pytest
import uvloop

from atoll import errors
from atoll.client import calls
from atoll.client._async.sandbox import AsyncSandbox
from atoll.client._sync.sandbox import Sandbox
from atoll.client._sync.secure import RemoteLink
from atoll.client._sync.tunnel import open_tunnel
from atoll.client.results import Output, Started

pytestmark = pytest.mark.filterwarnings('ignore:Overriding the "event_loop_policy" fixture')


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


@pytest.fixture(scope="module")
def key(gateway):
    return gateway.key(f"remote-{secrets.token_hex(4)}").secret


@pytest.fixture(scope="module")
def link(gateway, key):
    made = RemoteLink(gateway.endpoint, api_key=key, ca_cert=str(gateway.home / "tls" / "sandbox-ca.crt"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def ref(link):
    made = link.call(calls.create({"limits": {"memory_mb": 256}}))
    assert made["owner"].startswith("key:remote-")
    yield made["id"]
    link.call(calls.destroy(made["id"]))


def test_call_and_typed_errors(link, ref) -> None:
    done = link.call(calls.start(ref, ["sh", "-c", "echo out; echo err >&2; exit 3"]))
    assert (done["stdout"], done["stderr"], done["exit_code"]) == ("out\n", "err\n", 3)
    with pytest.raises(errors.NotFound):
        link.call(calls.info("no-such"))
    with pytest.raises(errors.FileNotFound):
        link.call(calls.file_operation(ref, "stat", {"path": "/none"}))
    with pytest.raises(errors.InvalidArgument):
        link.call(calls.create({"unknown": 1}))


def test_frame_stream_and_leaving_it(link, ref) -> None:
    values = list(link.open(calls.start(ref, "echo a; echo b >&2; exit 4", frames=True)).frames())
    assert isinstance(values[0], Started)
    assert {(v.stream, v.data) for v in values if isinstance(v, Output)} == {("stdout", b"a\n"), ("stderr", b"b\n")}
    assert values[-1]["exit_code"] == 4
    exchange = link.open(calls.start(ref, "echo go; exec sleep 6543", frames=True, timeout=600))
    frames = exchange.frames()
    assert isinstance(next(frames), Started)
    next(frames)
    frames.close()
    for _ in range(300):
        listed = link.call(calls.get(calls.sandbox_path(ref, "processes")))["processes"]
        if not any("6543" in str(p["cmdline"]) for p in listed):
            break
        threading_wait()
    else:
        raise AssertionError("the command lives on")


def threading_wait() -> None:
    import threading

    threading.Event().wait(0.1)


def test_bodies_of_any_length_both_ways(link, ref) -> None:
    """More than any buffer on the way."""
    piece = os.urandom(1 << 20)
    answer = link.open(calls.write_file(ref, "/workspace/big", None), (piece for _ in range(130))).json()
    assert answer["bytes"] == 130 << 20
    exchange = link.open(calls.read_file(ref, "/workspace/big"))
    assert exchange.head.status == 200
    size, first = 0, b""
    while data := exchange.read():
        first = first or data
        size += len(data)
    assert size == 130 << 20
    assert piece.startswith(first)
    link.call(calls.file_operation(ref, "remove", {"path": "/workspace/big"}))


def test_a_body_that_fails_is_the_callers_own_error(link, ref) -> None:
    def broken():
        yield b"x" * 1000
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="on fire"):
        link.open(calls.write_file(ref, "/workspace/half", None), broken())
    with pytest.raises(errors.FileNotFound):
        link.open(calls.read_file(ref, "/workspace/half")).raise_for_status()


def test_ports(link, ref) -> None:
    link.call(calls.start(ref, ["python3", "-c", "import socket\ns=socket.create_server(('127.0.0.1',7070))\nc=s.accept()[0]\n"
                                "while d:=c.recv(9999): c.sendall(d.upper())"], background=True, timeout=None))  # fmt: skip
    for _ in range(300):
        try:
            tunnel = open_tunnel(link, ref, 7070)
            break
        except errors.FailedPrecondition:
            threading_wait()
    with tunnel:
        tunnel.send(b"hello")
        assert tunnel.recv() == b"HELLO"
        tunnel.send_eof()
        assert tunnel.recv() == b""
    with pytest.raises(errors.AtollError):
        open_tunnel(link, ref, 7071)
    with pytest.raises(errors.NotFound):
        open_tunnel(link, "no-such", 80)


SERVER = "import socket; s=socket.create_server(('127.0.0.1',7072)); c=s.accept()[0]; c.sendall(c.recv(99).upper())"


@pytest.fixture
def trusting(gateway, monkeypatch):
    monkeypatch.setenv("K8E_SANDBOX_CERT", str(gateway.home / "tls" / "sandbox-ca.crt"))


def test_sandbox_of_a_gateway(gateway, key, trusting) -> None:
    with Sandbox(endpoint=gateway.endpoint, api_key=key) as sandbox:
        assert sandbox.run("print(6 * 7)", language="python").stdout == "42\n"
        sandbox.files.write("/workspace/a.bin", b"\0\xff")
        assert sandbox.files.read("/workspace/a.bin") == b"\0\xff"
        assert sandbox.id in {one.id for one in Sandbox.list(endpoint=gateway.endpoint, api_key=key)}
        again = Sandbox.connect(sandbox.id, endpoint=gateway.endpoint, api_key=key)
        assert again.run("echo 1", language="bash").stdout == "1\n"
        again.close()
        with pytest.raises(errors.FailedPrecondition):
            sandbox.forward(7072)
        sandbox.start(["python3", "-c", SERVER])
        with _tunnel(sandbox) as tunnel:
            tunnel.send(b"abc")
            assert tunnel.recv() == b"ABC"
    with pytest.raises(errors.Unauthenticated):
        Sandbox.list(endpoint=gateway.endpoint, api_key="0" * 64)
    with pytest.raises(errors.InvalidArgument):
        Sandbox(api_key=key)
    with pytest.raises(errors.InvalidArgument):
        Sandbox(home="/x", endpoint=gateway.endpoint)


def _tunnel(sandbox):
    for _ in range(300):
        try:
            return sandbox.forward(7072)
        except errors.FailedPrecondition:
            threading_wait()
    raise AssertionError("nobody listens")


async def test_async_sandbox_of_a_gateway(gateway, key, trusting) -> None:
    async with AsyncSandbox(endpoint=gateway.endpoint, api_key=key) as sandbox:
        assert (await sandbox.run("echo hi", language="bash")).stdout == "hi\n"
        await sandbox.files.write("/workspace/a.bin", b"\0\xff")
        assert await sandbox.files.read("/workspace/a.bin") == b"\0\xff"
        with pytest.raises(errors.FailedPrecondition):
            await sandbox.forward(7072)
        await sandbox.start(["python3", "-c", SERVER])
        for _ in range(300):
            try:
                tunnel = await sandbox.forward(7072)
                break
            except errors.FailedPrecondition:
                await asyncio.sleep(0.1)
        await tunnel.send(b"abc")
        assert await tunnel.recv() == b"ABC"
        assert await tunnel.recv() == b""
        await tunnel.close()


def test_others_see_nothing(gateway, ref) -> None:
    other = gateway.key(f"other-{secrets.token_hex(4)}").secret
    link = RemoteLink(gateway.endpoint, api_key=other, ca_cert=str(gateway.home / "tls" / "sandbox-ca.crt"))
    assert link.call(calls.list_sandboxes("all"))["sandboxes"] == []
    for call in (calls.info(ref), calls.destroy(ref), calls.start(ref, "true"), calls.read_file(ref, "/etc/passwd")):
        with pytest.raises(errors.NotFound):
            link.call(call)
    with pytest.raises(errors.NotFound):
        open_tunnel(link, ref, 80)
    for path in ("/v1/daemon/stop", "/v1/%64aemon/stop", "/v1/images/pull"):
        with pytest.raises(errors.PermissionDenied):
            link.call(calls.post(path, {"force": True}))
    for path in ("/v1//daemon/stop", "/v1/./daemon/stop"):
        with pytest.raises(errors.NotFound):
            link.call(calls.post(path, {"force": True}))
    with pytest.raises(errors.PermissionDenied):
        link.call(calls.get("/v1/config"))
    with pytest.raises(errors.NotFound):
        link.call(calls.post("/v1/sandboxes/../daemon/stop", {"force": True}))
    with pytest.raises(errors.NotFound):
        link.call(calls.post("/v1/sandboxes/..%2fdaemon/stop", {}))
    with pytest.raises(errors.PermissionDenied):
        link.call(calls.create({"mounts": [{"source": "/etc", "target": "/mnt"}]}))
    link.close()


def speak(gateway, data: bytes, *, protocols=("http/1.1",)) -> bytes:
    """Send bytes over TLS as they are, and read until the server closes or the first answer is whole."""
    context = ssl.create_default_context(cadata=gateway.ca.decode())
    context.set_alpn_protocols(list(protocols))
    host, port = gateway.endpoint.split(":")
    answer = b""
    with (
        socket.create_connection((host, int(port)), timeout=60) as bare,
        context.wrap_socket(bare, server_hostname="localhost") as tls,
    ):
        tls.sendall(data)
        while piece := tls.recv(65536):
            answer += piece
    return answer


def request(target: str, method: str = "GET", *lines: str) -> bytes:
    head = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", *lines]
    return "\r\n".join([*head, "", ""]).encode()


@pytest.mark.parametrize(
    ("data", "status"),
    [(b"\r\n\r\n" * 3 + b"x\r\n\r\n", 400), (request("/v1/health", "BREW"), 400), (request("v1/health"), 400),
     (request("/v1/\r\nhost: x"), 403), (request("/other"), 404), (request("/v1/é"), 400),
     (request("/v1/" + "x" * 70_000), 400),
     (request("/v1/../v1/health"), 404), (request("//v1/health"), 404), (request("/v1/sandboxes/%00"), 404),
     (request("/v1/%2e%2e/health"), 404), (request("/v1/sandboxes?a=%zz"), 400),
     (request("/v1/health", "GET", "Authorization: Bearer x"), 401),
     (request("/v1/health", "GET", "Authorization: Basic x"), 401),
     (request("/v1/health", "GET", "Authorization: Bearer x", "Authorization: Bearer y"), 401),
     (request("/v1/sandboxes", "POST", "Transfer-Encoding: chunked") + b"zz\r\n", 400)],
    ids=lambda one: str(one)[:60],
)  # fmt: skip
def test_hostile_requests(gateway, data, status) -> None:
    answer = speak(gateway, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b'"error"' in answer


def test_half_a_body_is_never_taken_for_the_whole(gateway, link, key, ref) -> None:
    """A caller that vanishes, or ends its body too early, leaves the old file as it was."""
    link.open(calls.write_file(ref, "/workspace/whole", b"old")).json()
    target = calls.write_file(ref, "/workspace/whole", None).target
    context = ssl.create_default_context(cadata=gateway.ca.decode())
    host, port = gateway.endpoint.split(":")
    for line, body in (("Content-Length: 1000", b"new"), ("Transfer-Encoding: chunked", b"3\r\nnew\r\n")):
        for politely in (True, False):
            bare = socket.create_connection((host, int(port)), timeout=60)
            tls = context.wrap_socket(bare, server_hostname="localhost")
            tls.sendall(request(target, "PUT", f"Authorization: Bearer {key}", line) + body)
            if politely:
                tls.unwrap()
            tls.close()
            assert link.open(calls.read_file(ref, "/workspace/whole")).body() == b"old"


def test_rates_count_by_method(gateway) -> None:
    made = gateway.key(f"slow-{secrets.token_hex(4)}", quotas={"write_burst": 1, "write_rate": 0.001})
    link = RemoteLink(gateway.endpoint, api_key=made.secret, ca_cert=str(gateway.home / "tls" / "sandbox-ca.crt"))
    with pytest.raises(errors.InvalidArgument):
        link.call(calls.create({"nope": 1}))
    with pytest.raises(errors.RateLimited):
        link.call(calls.create({"nope": 1}))
    assert link.call(calls.list_sandboxes())["sandboxes"] == []
    link.close()
