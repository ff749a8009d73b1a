"""Bad input: each a typed error with a code, nothing lost, the sandbox still usable, never a stack trace."""

import json
import socket
from typing import Any

import pytest
from lab.daemon import PATIENCE, Box, DaemonProcess, Failed

LONG = "x" * 5000


@pytest.fixture(autouse=True)
def still_usable(box: Box) -> Any:
    yield
    assert box.exec("echo fine")["stdout"] == "fine\n"


@pytest.mark.parametrize(
    "ref", ["nope", "..", "a%2Fb", "%2E%2E%2F", "a%00b", "%FF%FE", LONG, "'; DROP TABLE sandbox;--"]
)
def test_unknown_sandboxes(daemon: DaemonProcess, ref: str) -> None:
    for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/exec"), ("GET", "/files?path=x"), ("GET", "/log")):
        body = '{"argv":["true"]}' if rest == "/exec" else None
        with pytest.raises(Failed) as caught:
            daemon.ask(method, f"/v1/sandboxes/{ref.replace(' ', '%20')}{rest}", body)
        assert caught.value.status == 404 and caught.value.code == "not_found"


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a/b"},
        {"name": ".."},
        {"name": "a\0b"},
        {"name": ""},
        {"name": LONG},
        {"name": "-x"},
        {"alias": "../x"},
        {"nmae": "x"},
        {"env": {"A=B": "x"}},
        {"env": {"A": "x\0"}},
        {"env": {"": "x"}},
        {"limits": {"memory_mb": -1}},
        {"limits": {"cpus": 0}},
        {"limits": {"cpus": 1e300}},
        {"limits": {"disk_mb": 10**30}},
        {"lifetime_s": -5},
        {"idle_timeout_s": 0},
        {"lifetime_s": 1e308},
        {"workdir": "relative"},
        {"workdir": "/a\0b"},
        {"runtime": "../../bin/sh"},
        {"image": ""},
        {"mounts": [{"source": "relative", "target": "/x"}]},
        {"mounts": [{"source": "/tmp/../etc", "target": "/x"}]},
        {"labels": {"k": "v" * 5000}},
        [],
        "text",
        None,
    ],
)
def test_bad_creates(daemon: DaemonProcess, fields: Any) -> None:
    before = daemon.get("/v1/sandboxes")
    with pytest.raises(Failed) as caught:
        daemon.ask("POST", "/v1/sandboxes", json.dumps(fields))
    assert caught.value.code == "invalid_argument" and caught.value.status == 400
    assert daemon.get("/v1/sandboxes") == before


def test_what_cannot_be_had_is_said_so(daemon: DaemonProcess) -> None:
    before = len(daemon.get("/v1/sandboxes?state=all")["sandboxes"])
    for fields, code in (
        ({"workdir": "/no/such/dir"}, "file_not_found"),
        ({"workdir": "/etc/passwd"}, "not_a_directory"),
        ({"runtime": "kata"}, "unsupported"),
        ({"mounts": [{"source": "/no/such/source", "target": "/x"}]}, "invalid_argument"),
        ({"mounts": [{"source": str(daemon.home), "target": "/x"}]}, "permission_denied"),
        ({"mounts": [{"source": f"{daemon.home}/images", "target": "/x"}]}, "permission_denied"),
    ):
        with pytest.raises(Failed) as caught:
            daemon.post("/v1/sandboxes", fields)
        assert caught.value.code in (code, "invalid_argument"), caught.value
    assert len(daemon.get("/v1/sandboxes?state=all")["sandboxes"]) == before


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"argv": []},
        {"argv": [""]},
        {"argv": ["a\0b"]},
        {"argv": "true"},
        {"command": ""},
        {"command": "  \n"},
        {"command": "a\0b"},
        {"argv": ["a"], "command": "b"},
        {"argv": ["true"], "timeout_ms": -1},
        {"argv": ["true"], "timeout_ms": 10**15},
        {"argv": ["true"], "timeout_ms": 1.5},
        {"argv": ["true"], "timeout_ms": "5"},
        {"argv": ["true"], "cwd": ""},
        {"argv": ["true"], "cwd": "a\0b"},
        {"argv": ["true"], "cwd": LONG},
        {"argv": ["true"], "env": {"=": "x"}},
        {"argv": ["true"], "user": "ro ot"},
        {"argv": ["true"], "user": "../x"},
        {"argv": ["true"], "umask": 9999},
        {"argv": ["true"], "id": "a/b"},
        {"argv": ["true"], "id": "x" * 65},
        {"argv": ["true"], "stdin_b64": "!!!"},
        {"argv": ["true"], "stdin": "a", "stdin_stream": True},
        {"argv": ["true"], "pty": {"rows": 0}},
        {"argv": ["true"], "output_limit": -1},
        {"argv": ["true"], "nonsense": 1},
    ],
)
def test_bad_commands(box: Box, daemon: DaemonProcess, fields: dict[str, Any]) -> None:
    before = len(daemon.get(f"{box.path}/commands")["commands"])
    with pytest.raises(Failed) as caught:
        daemon.post(f"{box.path}/exec", fields)
    assert caught.value.code == "invalid_argument" and caught.value.status == 400
    assert len(daemon.get(f"{box.path}/commands")["commands"]) == before


@pytest.mark.parametrize(
    "fields", [{"code": ""}, {"code": " \n"}, {"code": "x", "language": "cobol"}, {"language": "bash"}]
)
def test_bad_code(box: Box, daemon: DaemonProcess, fields: dict[str, Any]) -> None:
    with pytest.raises(Failed) as caught:
        daemon.post(f"{box.path}/run", fields)
    assert caught.value.code == "invalid_argument"


def test_ten_megabytes_of_code_run(box: Box) -> None:
    result = box.run("x = '" + "y" * 10_000_000 + "'\nprint(len(x))", timeout_ms=60_000)
    assert result["stdout"] == "10000000\n"


def test_a_user_that_is_not_there(box: Box) -> None:
    with pytest.raises(Failed) as caught:
        box.exec(["true"], user="nobodyatall")
    assert caught.value.status < 500


@pytest.mark.parametrize(
    "path", ["", "a%00b", "x" * 5000, "y" * 300, "%2Fproc%2Fself%2Fmem", "%2Fdev%2Fzero", "%2Ftmp"]
)
def test_bad_paths(box: Box, path: str) -> None:
    with pytest.raises(Failed) as caught:
        box.read(path)
    assert 400 <= caught.value.status < 500


@pytest.mark.parametrize(
    "query",
    [
        "path=x&offset=-1",
        "path=x&offset=1e3",
        "path=x&limit=x",
        "path=x&limit=9999999999999999999999",
        "path=x&path=y",
        "pth=x",
    ],
)
def test_bad_queries(box: Box, daemon: DaemonProcess, query: str) -> None:
    with pytest.raises(Failed) as caught:
        daemon.get(f"{box.path}/files?{query}")
    assert caught.value.code == "invalid_argument"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"command": "\xff"}',
        b'{"command": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"null",
    ],
)
def test_bodies_that_are_no_request(box: Box, daemon: DaemonProcess, body: bytes) -> None:
    with pytest.raises(Failed) as caught:
        daemon.ask("POST", f"{box.path}/exec", body)
    assert caught.value.code == "invalid_argument"


@pytest.mark.parametrize(
    "raw", [b"\x00" * 100, b"GET\r\n\r\n", b"\x16\x03\x01" + b"x" * 500, b"POST /v1/sandboxes HTTP/1.1\r\n"]
)
def test_what_is_not_http_harms_nobody(daemon: DaemonProcess, raw: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(str(daemon.home / "daemon.sock"))
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(65536)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert daemon.get("/v1/health")["ok"]


def test_errors_never_show_a_traceback(box: Box, daemon: DaemonProcess) -> None:
    for method, path in (("GET", "/"), ("GET", "/v1"), ("PUT", "/v1/health"), ("GET", "/v1/sandboxes?state=odd"),
                         ("GET", f"{box.path}/commands/none"), ("GET", f"{box.path}/commands/%FF/stream"),
                         ("POST", f"{box.path}/commands/none/kill"), ("GET", f"{box.path}/events?limit=0")):  # fmt: skip
        response, data = daemon.raw(method, path)
        assert 400 <= response.status < 600 and set(json.loads(data)) == {"error"}
        assert b"Traceback" not in data and b".py" not in data and json.loads(data)["error"]["code"] != "internal"


def test_the_document_describes_every_route(daemon: DaemonProcess) -> None:
    document = daemon.get("/v1/openapi.json")
    assert document["openapi"].startswith("3.1") and len(document["paths"]) >= 30
    assert set(document["paths"]["/v1/sandboxes/{ref}"]) == {"get", "delete"}
    assert "CreateSandbox" in document["components"]["schemas"]
