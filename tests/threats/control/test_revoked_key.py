"""F2-M6: when a key is taken away, or its time is over, everything it has open ends: streams, bodies, ports, URLs, requests."""

import http.client
import json
import queue
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from lab.gateway import Gateway
from lab.keys import holder, keyed_daemon
from lab.sandboxes import NO_SPARES, PATIENCE, RUNTIMES, until

from atoll.client import calls
from atoll.client._sync.driver import Link
from atoll.client._sync.secure import RemoteLink
from atoll.client._sync.tunnel import open_tunnel, upgrade
from atoll.errors import AtollError, NotFound, Unauthenticated

SERVER = (
    "import socket; s = socket.create_server(('127.0.0.1', 8000)); print('up', flush=True)\n"
    "while True:\n"
    "    c, _ = s.accept(); c.recv(65536)\n"
    "    c.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 1000000\\r\\n\\r\\nfirst')\n"
    "    held = globals().setdefault('held', []); held.append(c)\n"
)
Ended = "queue.Queue[Exception | None]"


@pytest.fixture(scope="module", params=RUNTIMES)
def daemon(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    with keyed_daemon(f'{NO_SPARES}[sandboxes]\nruntime = "{request.param}"\n') as made:
        yield made


@pytest.fixture
def key(daemon: Gateway) -> Iterator[RemoteLink]:
    """A caller whose key a test takes away; the one made afterwards for the same name cleans up."""
    with holder(daemon, "agent") as made:
        yield made
    revoke(daemon, "agent", missing_ok=True)
    with holder(daemon, "agent") as successor:
        for one in successor.call(calls.list_sandboxes())["sandboxes"]:
            successor.call(calls.destroy(one["id"]))
    revoke(daemon, "agent")


@pytest.fixture
def sandbox(key: RemoteLink) -> str:
    return str(key.call(calls.create({"network": False, "disk_mb": 256}))["id"])


def local(daemon: Gateway) -> Link:
    """The operator, on the daemon's own socket."""
    return Link(path=str(daemon.home / "daemon.sock"))


def revoke(daemon: Gateway, name: str, missing_ok: bool = False) -> None:
    try:
        local(daemon).call(calls.post("/v1/keys/revoke", {"name": name}))
    except NotFound:
        if not missing_ok:
            raise


def end_of(work: Callable[[], object]) -> Ended:
    """Run it in a thread; what ended it comes out of the queue, None when it came to a good end."""
    ended: Ended = queue.Queue()

    def run() -> None:
        try:
            work()
        except Exception as error:
            ended.put(error)
        else:
            ended.put(None)

    threading.Thread(target=run, daemon=True).start()
    return ended


def read_all(frames: Iterator[Any]) -> None:
    for _ in frames:
        pass


def begun(exchange: Any) -> Iterator[Any]:
    """A stream that has said its first word."""
    frames: Iterator[Any] = exchange.frames()
    next(frames)
    return frames


def started(link: RemoteLink, sandbox: str, command: str, **options: Any) -> Iterator[Any]:
    """A command that has said its first word."""
    call = calls.start(sandbox, f"echo first; {command}", timeout=None, frames=True, **options)
    frames: Iterator[Any] = link.open(call).frames()
    while b"first" not in getattr(next(frames), "data", b""):
        pass
    return frames


# What a key can have open. Each opens it, sees it work, and answers a queue with its end.


def exec_stream(daemon: Gateway, link: RemoteLink, sandbox: str) -> Ended:
    frames = started(link, sandbox, "exec sleep 98765")
    return end_of(lambda: read_all(frames))


def terminal(daemon: Gateway, link: RemoteLink, sandbox: str) -> Ended:
    frames = started(link, sandbox, "exec sleep 98765", pty=(24, 80))
    return end_of(lambda: read_all(frames))


def attached(daemon: Gateway, link: RemoteLink, sandbox: str) -> Ended:
    call = calls.start(sandbox, "echo first; exec sleep 300", timeout=None, background=True)
    link.call(call)
    frames = begun(link.open(calls.attach(sandbox, str(call.command_id))))
    return end_of(lambda: read_all(frames))


def events(daemon: Gateway, link: RemoteLink, sandbox: str) -> Ended:
    path = calls.sandbox_path(sandbox, "events")
    frames = begun(link.open(calls.get(path, {"follow": True}, timeout=None)))
    return end_of(lambda: read_all(frames))


def upload(daemon: Gateway, link: RemoteLink, sandbox: str) -> Ended:
    taken = threading.Event()

    def body() -> Iterator[bytes]:
        yield b"half of it"
        taken.set()
        for _ in range(int(PATIENCE * 10)):
            time.sleep(0.1)
            yield b"more"

    ended = end_of(lambda: link.open(calls.write_file(sandbox, "/workspace/half", None), body()).json())
    assert taken.wait(PATIENCE)
    return ended


def download(daemon: Gateway, link: RemoteLink, sandbox: str) -> Ended:
    link.call(calls.start(sandbox, "truncate -s 200M /workspace/large", timeout=60))
    exchange = link.open(calls.read_file(sandbox, "/workspace/large"))
    assert exchange.read()

    def read_slowly() -> None:
        while exchange.read():
            time.sleep(0.1)

    return end_of(read_slowly)


def watched(daemon: Gateway, link: RemoteLink, sandbox: str) -> Ended:
    frames = begun(link.open(calls.watch(sandbox, "/workspace")))
    return end_of(lambda: read_all(frames))


def forwarded(daemon: Gateway, link: RemoteLink, sandbox: str) -> Ended:
    link.call(calls.start(sandbox, ["python3", "-c", SERVER], timeout=None, background=True))
    tunnel = until(lambda: answering(link, sandbox), "the server inside answers")

    def read() -> None:
        while tunnel.recv():
            pass

    return end_of(read)


def answering(link: RemoteLink, sandbox: str) -> Any:
    """A tunnel on which the server has answered; None while it does not listen yet."""
    try:
        tunnel = open_tunnel(link, sandbox, 8000)
        tunnel.send(b"GET / HTTP/1.1\r\n\r\n")
        if tunnel.recv():
            return tunnel
        tunnel.close()
    except AtollError:
        pass
    return None


def asked(daemon: Gateway, link: RemoteLink, sandbox: str) -> Ended:
    approval = link.call(calls.ask_approval(sandbox, "wipe everything"))["id"]
    return end_of(lambda: link.call(calls.wait_approval(approval, 250)))


def conversing(daemon: Gateway, link: RemoteLink, sandbox: str) -> Ended:
    """MCP as `atoll mcp` on another machine speaks it."""
    tunnel = upgrade(link, "/v1/mcp")
    tunnel.send(b'{"toolset": "k8e"}')
    tunnel.send(b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}')
    assert b"sandbox_run" in tunnel.recv()

    def read() -> None:
        while tunnel.recv():
            pass
        raise Unauthenticated("closed")

    return end_of(read)


OPEN = (exec_stream, terminal, attached, events, upload, download, watched, forwarded, asked, conversing)


@pytest.mark.parametrize("opened", OPEN, ids=lambda one: one.__name__)
def test_what_a_revoked_key_has_open_ends(
    daemon: Gateway, key: RemoteLink, sandbox: str, opened: Callable[[Gateway, RemoteLink, str], Ended]
) -> None:
    ended = opened(daemon, key, sandbox)
    revoke(daemon, "agent")
    assert isinstance(ended.get(timeout=PATIENCE), AtollError)
    with holder(daemon, "agent") as successor:
        running = lambda: [  # noqa: E731
            one for one in successor.call(calls.get(calls.sandbox_path(sandbox, "processes")))["processes"]
            if "98765" in str(one)
        ]  # fmt: skip
        until(lambda: not running(), "what ran in the foreground is killed")


def test_a_key_whose_time_is_over_is_like_a_revoked_one(daemon: Gateway, key: RemoteLink, sandbox: str) -> None:
    ended = exec_stream(daemon, key, sandbox)
    with sqlite3.connect(daemon.home / "atoll.db", timeout=60) as db:
        db.execute("UPDATE api_key SET expires_at = ? WHERE name = 'agent'", (int(time.time()),))
    db.close()
    assert isinstance(ended.get(timeout=PATIENCE), Unauthenticated)


# URLs of exposed ports


def page(url: str) -> tuple[int, socket.socket]:
    """The status of a request, and the connection with its answer under way."""
    host, _, path = url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    sock = socket.create_connection((name, int(port)), timeout=PATIENCE)
    sock.sendall(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    head = sock.recv(65536)
    return int(head.split()[1]), sock


def test_urls_of_a_revoked_key_lead_nowhere_also_after_a_restart(
    daemon: Gateway, key: RemoteLink, sandbox: str
) -> None:
    key.call(calls.start(sandbox, ["python3", "-c", SERVER], timeout=None, background=True))
    url = key.call(calls.expose(sandbox, 8000))["url"]
    status, sock = until(lambda: served(url), "the server inside listens")
    assert status == 200
    revoke(daemon, "agent")
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    assert page(url)[0] == 404
    with holder(daemon, "agent") as successor:
        assert page(url)[0] == 404, "who held the old key knows the URL"
        assert successor.call(calls.get(calls.sandbox_path(sandbox, "exposures")))["exposures"] == []
        assert successor.call(calls.expose(sandbox, 8000))["url"] != url
    daemon.terminate()
    daemon.revoke("agent")
    (daemon.home / "grpc.endpoint").unlink(missing_ok=True)
    daemon.start()
    with holder(daemon, "agent") as successor:
        assert successor.call(calls.get(calls.sandbox_path(sandbox, "exposures")))["exposures"] == []


def served(url: str) -> tuple[int, socket.socket] | None:
    found = page(url)
    return found if found[0] == 200 else None


# Requests that wait for somebody


def test_requests_of_a_revoked_key_are_withdrawn(daemon: Gateway, key: RemoteLink) -> None:
    rules = {"network": False, "disk_mb": 256, "require_approval": ["command:*wipe*", "path:/workspace/guarded*"]}
    sandbox = key.call(calls.create(rules))["id"]
    key.call(calls.ask_approval(sandbox, "only asked"))
    ended = [
        end_of(lambda: key.call(calls.start(sandbox, "wipe", timeout=60))),
        end_of(lambda: key.call(calls.write_file(sandbox, "/workspace/guarded", b"x"))),
    ]
    pending = lambda: local(daemon).call(calls.get("/v1/approvals"))["approvals"]  # noqa: E731
    found = until(lambda: [one["id"] for one in pending()] if len(pending()) == 3 else None, "three requests wait")
    revoke(daemon, "agent")
    for one in ended:
        assert isinstance(one.get(timeout=PATIENCE), AtollError)
    until(lambda: not pending(), "nothing is shown to somebody who decides")
    with holder(daemon, "boss", "approve") as boss:
        for approval in found:
            assert boss.call(calls.get(f"/v1/approvals/{approval}"))["status"] == "withdrawn"
    revoke(daemon, "boss")


def test_a_caller_that_leaves_takes_back_its_file_change(daemon: Gateway) -> None:
    """A body that is already here, one that is larger than what is read ahead, and an operation without one."""
    link = local(daemon)
    rules = {"network": False, "disk_mb": 256, "require_approval": ["path:/workspace/guarded*"]}
    sandbox = link.call(calls.create(rules))["id"]
    pending = lambda: link.call(calls.get("/v1/approvals"))["approvals"]  # noqa: E731
    target = calls.sandbox_path(sandbox, "files")
    remove = json.dumps({"path": "/workspace/guarded"}).encode()
    try:
        for method, path, body in (
            ("PUT", f"{target}?path=/workspace/guarded", b"small"),
            ("PUT", f"{target}?path=/workspace/guarded", bytes(4 << 20)),
            ("POST", f"{target}/remove", remove),
        ):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(daemon.home / "daemon.sock"))
            sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            sock.settimeout(1)
            try:
                sock.sendall(body)
            except TimeoutError:
                pass  # nobody reads the rest while somebody decides
            until(pending, "the change waits")
            sock.close()
            until(lambda: not pending(), "the request is withdrawn")
        status = link.call(calls.start(sandbox, "test ! -e /workspace/guarded", timeout=60))["exit_code"]
        assert status == 0
    finally:
        link.call(calls.destroy(sandbox))


# MCP


@contextmanager
def mcp(daemon: Gateway) -> Iterator[int]:
    """The port of `atoll mcp --http` on this daemon."""
    argv = [sys.executable, "-m", "atoll", "mcp", "--http", "--http-addr", "127.0.0.1:0", "--tools", "all"]
    env = {"ATOLL_HOME": str(daemon.home), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env)
    try:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        yield int(line.rpartition("/mcp")[0].rpartition(":")[2])
    finally:
        process.terminate()
        process.wait(PATIENCE)


def said(port: int, secret: str, method: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    accept = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    raw = None if body is None else json.dumps(body)
    connection.request(method, "/mcp", raw, {**accept, "Authorization": f"Bearer {secret}", **more})
    return connection.getresponse()


def rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


SLEEP = rpc("tools/call", name="sandbox_run", arguments={"code": "sleep 98765", "language": "bash", "timeout": 600})


def test_mcp_sessions_and_calls_of_a_revoked_key_end(daemon: Gateway) -> None:
    """K8E's stream and a call without a session, and a session and call of the current protocol."""
    secret = daemon.key("agent").secret
    with mcp(daemon) as port:
        stream = said(port, secret, "GET")
        assert stream.readline() == b"event: session\n"
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        opened = said(port, secret, "POST", rpc("initialize", **hello))
        session = str(opened.getheader("mcp-session-id"))
        opened.read()
        told = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        said(port, secret, "POST", told, mcp_session_id=session).read()
        ended = [
            end_of(stream.read),
            end_of(lambda: said(port, secret, "POST", SLEEP).read()),
            end_of(lambda: said(port, secret, "POST", SLEEP, mcp_session_id=session).read()),
        ]
        home = local(daemon)
        until(lambda: home.call(calls.get("/v1/health"))["sandboxes"] == 2, "both calls have their sandbox")
        time.sleep(1)  # the code runs by then or is about to: both must end
        revoke(daemon, "agent")
        for one in ended:
            one.get(timeout=PATIENCE)
        until(lambda: home.call(calls.get("/v1/health"))["sandboxes"] == 0, "the sessions' sandboxes are gone")
        successor = daemon.key("agent").secret
        assert said(port, successor, "POST", rpc("ping"), mcp_session_id=session).status == 404
        again = said(port, successor, "POST", rpc("tools/call", name="sandbox_status", arguments={}))
        assert "revoked" not in again.read().decode()
    revoke(daemon, "agent")
