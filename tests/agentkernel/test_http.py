"""agentkernel's HTTP interface: envelopes, results, live events, keys, and web pages kept out."""

import base64
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from .conftest import WAIT, Cli, until
from .http_lab import Server, served

LINKS = "import socket; print(*sorted(n for _, n in socket.if_nameindex()))"


@pytest.fixture(scope="module")
def server(home: str) -> Iterator[Server]:
    with served(Cli(home, "/")) as made:
        yield made


@pytest.fixture
def box(server: Server) -> Iterator[str]:
    name = f"h{os.urandom(5).hex()}"
    made = server.data("POST", "/sandboxes", {"name": name}, 201)
    assert (made["name"], made["status"], made["vcpus"], made["memory_mb"]) == (name, "running", 1, 512)
    assert made["backend"] and made["image"]
    yield name
    server.data("DELETE", f"/sandboxes/{name}")


def test_health_needs_nothing(server: Server) -> None:
    assert server.request("GET", "/health") == (200, {"success": True, "data": "ok", "status": "ok"})


def test_ak_K2_run_tells_everything(server: Server) -> None:
    body = {"command": ["sh", "-c", "echo out; sleep 0.2; echo err >&2; exit 7"], "fast": True, "image": None}
    found = server.data("POST", "/run", body)
    assert (found["output"], found["stdout"], found["stderr"]) == ("out\nerr\n", "out\n", "err\n")
    assert found["exit_code"] == 7 and found["timed_out"] is False and found["duration_ms"] >= 0
    found = server.data("POST", "/run", {"command": ["python3", "-c", "print('a b', '$HOME')"]})
    assert found["output"] == "a b $HOME\n"


def test_ak_K6_options_are_applied(server: Server) -> None:
    body = {"command": ["sh", "-c", "pwd; echo $A"], "cwd": "/tmp", "env": {"A": "1"}, "network": False}
    assert server.data("POST", "/run", body)["stdout"] == "/tmp\n1\n"
    found = server.data("POST", "/run", {"command": ["sh", "-c", "echo x; sleep 600"], "timeout_ms": 1000})
    assert found["timed_out"] is True and found["stdout"] == "x\n" and found["exit_code"] == 124
    strict = server.data("POST", "/run", {"command": ["touch", "/x"], "profile": "restrictive"})
    assert strict["exit_code"] == 1 and "Read-only" in strict["stderr"]
    net = server.data(
        "POST",
        "/run",
        {
            "command": ["python3", "-c", LINKS],
            "network": False,
        },
    )
    assert net["stdout"] == "lo\n"


@pytest.mark.parametrize(
    "body",
    [
        {"command": []},
        {"command": "ls"},
        {},
        {"command": ["ls"], "profile": "bogus"},
        {"command": ["ls"], "compatibility_mode": "bogus"},
        {"command": ["ls"], "nosuch": 1},
        {"command": ["ls"], "timeout_ms": -1},
        {"command": ["ls"], "image": "a b"},
        {"command": ["ls"], "env": ["nothing"]},
        {"command": ["a\0b"]},
        {"command": ["ls"], "cwd": ""},
    ],
)
def test_bad_input_is_400(server: Server, body: object) -> None:
    assert server.refused("POST", "/run", body)[0] == 400


def test_ak_K15_a_caller_cannot_lift_the_ceiling(server: Server) -> None:
    for more in ({"profile": "permissive"}, {"compatibility_mode": "native"}):
        status, text = server.refused("POST", "/run", {"command": ["true"], **more})
        assert status == 403 and "--allow-host-access" in text
        assert server.refused("POST", "/sandboxes", {"name": "ceiling", **more})[0] == 403
        assert server.refused("POST", "/run/stream", {"command": ["true"], **more})[0] == 403
    for more in ({"volumes": ["a:/b"]}, {"source_url": "https://x.invalid/y.git"}, {"secrets": ["A"]}):
        assert server.refused("POST", "/sandboxes", {"name": "ceiling", **more})[0] == 400


def test_ak_K19_events_arrive_while_the_command_runs(server: Server, box: str) -> None:
    """The command waits for us, so that its first output can only be seen while it runs."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    code = "echo first; n=0; while [ $n -lt 20 ]; do sleep 0.1; n=$((n+1)); done; echo err >&2; exit 3"
    body = json.dumps({"command": ["sh", "-c", code]})
    connection.request("POST", "/run/stream", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["content-type"] == "text/event-stream"
    events = []
    while line := answer.readline():
        if line.startswith(b"event: "):
            events.append((line[7:].strip().decode(), json.loads(answer.readline()[6:])))
            if events[-1][0] == "output" and len([e for e in events if e[0] == "output"]) == 1:
                running = [s["name"] for s in server.data("GET", "/sandboxes") if s["name"].startswith("ephemeral-")]
                started = next(data for event, data in events if event == "started")
                assert started["sandbox"] in running  # it has not ended
    connection.close()
    kinds = [event for event, _ in events]
    assert kinds[0] == "started" and kinds.count("started") == 1 and kinds[-1] == "done"  # line 26
    outputs = [data for event, data in events if event == "output"]
    assert [(o["data"], o["content"], o["stream"]) for o in outputs] == [
        ("first\n", "first\n", "stdout"),
        ("err\n", "err\n", "stderr"),
    ]
    assert events[-1][1]["exit_code"] == 3 and events[-1][1]["success"] is False
    assert {data["stage"] for event, data in events if event == "progress"} == {"creating", "starting", "executing"}


def test_closing_a_stream_kills_the_command_and_its_sandbox(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    body = json.dumps({"command": ["sh", "-c", "echo up; sleep 600"]})
    connection.request("POST", "/run/stream", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    while b'"up\\n"' not in (line := answer.readline()):
        assert line
    connection.close()
    answer.close()
    until(lambda: not [s for s in server.data("GET", "/sandboxes") if s["name"].startswith("ephemeral-")])


def test_batch_runs_in_order_and_at_once(server: Server) -> None:
    commands = [{"command": ["sh", "-c", f"echo {n}; exit {n}"]} for n in range(3)]
    results = server.data("POST", "/batch/run", {"commands": commands})["results"]
    assert [(r["output"], r["exit_code"], r["error"]) for r in results] == [(f"{n}\n", n, None) for n in range(3)]


def test_sandbox_life(server: Server, box: str) -> None:
    assert server.refused("POST", "/sandboxes", {"name": box})[0] == 409
    info = server.data("GET", f"/sandboxes/{box}")
    assert info["created_at"].endswith("Z") and server.data("GET", f"/sandboxes/by-uuid/{info['uuid']}")["name"] == box
    assert box in [entry["name"] for entry in server.data("GET", "/sandboxes")]
    server.data("POST", f"/sandboxes/{box}/exec", {"command": ["sh", "-c", "echo kept > /workspace/f"]})
    server.data("POST", f"/sandboxes/{box}/stop")
    assert server.data("GET", f"/sandboxes/{box}")["status"] == "stopped"
    assert server.refused("POST", f"/sandboxes/{box}/exec", {"command": ["true"]})[0] == 409
    server.data("POST", f"/sandboxes/{box}/start")
    found = server.data(
        "POST", f"/sandboxes/{box}/exec", {"command": ["cat", "f"], "workdir": "/workspace", "env": ["A=1"]}
    )
    assert found["output"] == "kept\n"
    assert server.data("POST", f"/sandboxes/{box}/extend", {"by": "1h"})["expires_at"].endswith("Z")
    assert server.data("GET", f"/sandboxes/{box}/logs")[0]["type"] == "created"


def test_unknown_and_removed_sandboxes(server: Server) -> None:
    for method, path in (("GET", ""), ("POST", "/start"), ("POST", "/stop"), ("GET", "/logs"), ("GET", "/files/tmp/x")):
        assert server.refused(method, f"/sandboxes/nosuch{path}") == (404, "Sandbox not found")
    assert server.refused("POST", "/sandboxes/nosuch/exec", {"command": ["true"]})[0] == 404
    assert server.data("DELETE", "/sandboxes/nosuch") == "Sandbox removed"
    assert server.refused("GET", "/sandboxes/by-uuid/nonsense")[0] == 404
    assert server.refused("GET", "/nosuch")[0] == 404


@pytest.mark.parametrize("bad", ["..%2Fx", "a%2Fb", "a..b", "-a", "a--b", "a%00b", "%C3%A9"])
def test_ak_K14_bad_names_are_refused(server: Server, bad: str) -> None:
    assert server.refused("GET", f"/sandboxes/{bad}")[0] in (400, 404)
    assert server.refused("POST", "/sandboxes", {"name": bad.replace("%2F", "/")})[0] == 400


def test_files(server: Server, box: str) -> None:
    path = f"/sandboxes/{box}/files"
    assert server.data("PUT", f"{path}/tmp/a%20b", {"content": "héllo"}) == "Wrote 6 bytes to /tmp/a b"
    assert server.data("GET", f"{path}//tmp/a%20b") == {"content": "héllo", "encoding": "utf8", "size": 6}
    raw = bytes(range(256))
    server.data("PUT", f"{path}/tmp/bin", {"content": base64.b64encode(raw).decode(), "encoding": "base64"})
    found = server.data("GET", f"{path}/tmp/bin")
    assert found["encoding"] == "base64" and base64.b64decode(found["content"]) == raw
    assert server.data("POST", path, {"files": {"/workspace/x/y": "1", "/workspace/z": "2"}}) == {"written": 2}
    assert server.data("DELETE", f"{path}/workspace/z") == "Deleted /workspace/z"
    assert server.refused("GET", f"{path}/workspace/z")[0] == 404
    for bad in ("proc/1/environ", "tmp/../etc/passwd", "%2e%2e/etc/passwd", "sys/x", "dev/null"):
        assert server.refused("GET", f"{path}/{bad}")[0] == 400
    assert server.refused("PUT", f"{path}/tmp/x", {"content": "!", "encoding": "base64"})[0] == 400
    assert server.refused("PUT", f"{path}/tmp/x", {"content": "!", "encoding": "rot13"})[0] == 400


def test_detached_commands(server: Server, box: str) -> None:
    path = f"/sandboxes/{box}/exec"
    made = server.data("POST", f"{path}/detach", {"command": ["sh", "-c", "echo o; echo e >&2; sleep 600"]})
    assert made["status"] == "running" and made["sandbox"] == box and made["pid"] > 0
    one = f"{path}/detached/{made['id']}"
    until(lambda: server.data("GET", f"{one}/logs") == {"stdout": "o\n", "stderr": "e\n"})
    assert server.data("GET", f"{one}/logs?stream=stderr") == {"stderr": "e\n"}
    assert [entry["id"] for entry in server.data("GET", f"{path}/detached")] == [made["id"]]
    server.data("DELETE", one)
    assert server.data("GET", one)["status"] == "failed"


def test_backends(server: Server) -> None:
    found = server.data("GET", "/backends")
    assert found["default_backend"] in [entry["backend"] for entry in found["backends"] if entry["usable"]]
    assert all(entry["readiness_reason"] for entry in found["backends"])


def test_ak_K13_a_web_page_cannot_call(server: Server) -> None:
    body = {"command": ["true"]}
    evil = "http://evil.example"
    for headers in (
        {"Origin": evil},
        {"Origin": "null"},
        {"Origin": f"http://localhost.evil.example:{server.port}"},
        {"Host": "evil.example"},
        {"Host": f"evil.example:{server.port}"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert server.refused("POST", "/run", body, headers=headers)[0] == 403
        assert server.refused("GET", "/sandboxes", headers=headers)[0] == 403
        assert server.refused("GET", "/health", headers=headers)[0] == 403
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert server.refused("POST", "/run", body, headers={"Content-Type": kind})[0] == 400
    assert server.data("POST", "/run", body)["exit_code"] == 0


def test_malformed_requests_do_no_harm(server: Server) -> None:
    for raw in (b"{", b"[]", b'{"command":["a"]' * 10, b"\xff\xfe", b"[" * 100_000):
        assert server.refused("POST", "/run", raw=raw)[0] == 400
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"\x16\x03\x01nonsense\r\n\r\n")
        assert b"400" in connection.recv(4096)
    assert server.data("GET", "/health") == "ok"


def test_another_user_needs_a_key(server: Server) -> None:
    code = (
        f"import http.client as h; c = h.HTTPConnection('127.0.0.1', {server.port}, timeout=60);"
        "c.request('GET', '/sandboxes'); r = c.getresponse(); print(r.status, r.read())"
    )
    python = os.path.realpath(sys.executable)
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-I", "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=WAIT, cwd="/")
    assert done.stdout.startswith(b"401"), done


def test_keys(cli: Cli) -> None:
    with served(cli, key="k-123") as server:
        assert server.data("GET", "/sandboxes") is not None
        assert server.request("GET", "/sandboxes", headers={"Authorization": "", "X-API-Key": "k-123"})[0] == 200
        texts = {
            server.refused("GET", "/sandboxes", headers={"Authorization": given})
            for given in ("", "Basic k-123", "Bearer wrong", "Bearer k-1234")
        }
        assert {status for status, _ in texts} == {401} and len(texts) == 3
        assert server.request("GET", "/health", headers={"Authorization": ""})[0] == 200


def test_a_public_address_needs_a_key(cli: Cli) -> None:
    done = cli("serve", "--agentkernel", "--host", "0.0.0.0", "--port", "0")
    assert done.code == 125 and b"AGENTKERNEL_API_KEY" in done.stderr


def test_old_clients_and_open_ceilings(cli: Cli) -> None:
    with served(cli.called("agentkernel"), "--legacy-exit-errors", "--allow-host-access") as server:
        status, text = server.refused("POST", "/run", {"command": ["sh", "-c", "echo x; exit 3"]})
        assert status == 500 and text == "Command exited with code 3: x\n"
        commands = {"commands": [{"command": ["sh", "-c", "echo x; exit 3"]}, {"command": ["true"]}]}
        failed, fine = server.data("POST", "/batch/run", commands)["results"]
        assert failed["error"] == "Command exited with code 3: x\n" and fine["error"] is None
        assert server.data("POST", "/run", {"command": ["true"], "profile": "permissive"})["exit_code"] == 0
        assert server.data("POST", "/run", {"command": ["true"], "compatibility_mode": "native"})["exit_code"] == 0


def test_the_port_is_free_again_when_the_server_ends(cli: Cli) -> None:
    with served(cli) as server:
        port = server.port

    def free() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    until(free)


def test_snapshots(server: Server, box: str) -> None:
    server.data("POST", f"/sandboxes/{box}/exec", {"command": ["sh", "-c", "echo s > /workspace/f; echo r > /root/g"]})
    made = server.data("POST", "/snapshots", {"sandbox": box, "name": f"{box}-s"}, 201)
    assert (made["name"], made["sandbox"], made["memory_mb"]) == (f"{box}-s", box, 512)
    try:
        assert server.data("GET", f"/snapshots/{box}-s")["base_image"]
        assert f"{box}-s" in [entry["name"] for entry in server.data("GET", "/snapshots")]
        restored = server.data("POST", f"/snapshots/{box}-s/restore", {"as_name": f"{box}-r"}, 201)
        assert restored["name"] == f"{box}-r" and restored["status"] == "running"
        try:
            found = server.data("POST", f"/sandboxes/{box}-r/exec", {"command": ["cat", "/workspace/f", "/root/g"]})
            assert found["output"] == "s\nr\n"
        finally:
            server.data("DELETE", f"/sandboxes/{box}-r")
    finally:
        server.data("DELETE", f"/snapshots/{box}-s")
    assert server.refused("GET", f"/snapshots/{box}-s") == (404, "Snapshot not found")
    assert server.refused("POST", "/snapshots", {"sandbox": "nosuch"})[0] == 404
