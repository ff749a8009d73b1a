"""What no SDK sends: missing, wrong, null and foreign values, cut bodies, wrong frames. Every answer is the contract's."""

import base64
import json
import socket
import struct
import zlib
from typing import Any

import pytest
from e2b import Sandbox
from lab.e2b import ENVD, Door, new_key
from lab.sandboxes import Lab
from lab.waiting import PATIENCE

MANY = "x" * 5000


@pytest.fixture(scope="module")
def runtime(lab: Lab) -> str:
    """What is looked at here is the door: one runtime is enough."""
    if why := lab.works("container"):
        pytest.skip(f"container: {why}")
    return "container"


def refused(door: Door, status: int, method: str, path: str, body: Any = None, **options: Any) -> str:
    found, told, headers = door.ask(method, path, body, **options)
    assert found == status, (found, told)
    assert headers["content-type"] == "application/json" and told["code"] == status and isinstance(told["message"], str)
    return told["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"\xff", {}, {"templateID": None}, {"templateID": 3}, {"templateID": ""},
        {"templateID": "base", "timeout": 0}, {"templateID": "base", "timeout": -1}, {"templateID": "base", "timeout": "9"},
        {"templateID": "base", "timeout": 1e300}, {"templateID": "base", "metadata": {"a": 1}}, {"templateID": "base", "metadata": []},
        {"templateID": "base", "metadata": {"e2b.template": "x"}}, {"templateID": "base", "metadata": {"a": MANY}},
        {"templateID": "base", "envVars": {"A=B": "x"}}, {"templateID": "base", "envVars": {"A": "\0"}},
        {"templateID": "base", "foreign": 1},
        {"templateID": "base", "iam": {"tokens": {}}}, {"templateID": "base", "mcp": {"a": {}}},
        {"templateID": "base", "volumeMounts": [{"name": "a"}]}, {"templateID": "base", "secure": True},
        {"templateID": "base", "autoPauseMemory": False}, {"templateID": "base", "autoResume": {}},
        {"templateID": "base", "network": {"rules": {"a": []}, "foreign": 1}}, {"templateID": "base", "network": {"rules": {"a": [{}]}}},
        {"templateID": "base", "network": {"egressProxy": {"address": "x:1"}}}, {"templateID": "base", "network": {"httpsPorts": [1]}},
        {"templateID": "base", "network": {"denyOut": ["1.0.0.0/8"]}}, {"templateID": "base", "network": {"allowOut": ["x.org"]}},
    ],
)  # fmt: skip
def test_creates_that_are_wrong(door: Door, body: Any) -> None:
    refused(door, 400, "POST", "/v2/sandboxes", body)


def test_other_routes_that_are_wrong(door: Door, box: Any) -> None:
    ref = box.sandbox_id
    key = new_key(door.lab)
    for method, path, body, status in (
        ("GET", "/nothing", None, 404), ("GET", "/", None, 404), ("PATCH", "/sandboxes", None, 404),
        ("GET", f"/sandboxes/{'a' * 20}", None, 404), ("GET", "/sandboxes/..%2f..", None, 404),
        ("GET", "/sandboxes/" + "%00" * 5, None, 404), ("POST", f"/sandboxes/{ref}/timeout", {}, 400),
        ("POST", f"/sandboxes/{ref}/timeout", {"timeout": None}, 400), ("POST", f"/sandboxes/{ref}/timeout", {"timeout": 10**12}, 400),
        ("POST", f"/sandboxes/{ref}/connect", {}, 400), ("POST", f"/v2/sandboxes/{ref}/connect", {"timeout": 0}, 400),
    ):  # fmt: skip
        refused(door, status, method, path, body)
    other = new_key(door.lab)
    for method, path, body in (
        ("GET", f"/sandboxes/{ref}", None), ("DELETE", f"/sandboxes/{ref}", None), ("GET", f"/sandboxes/{ref}/metrics", None),
        ("POST", f"/sandboxes/{ref}/timeout", {"timeout": 5}), ("POST", f"/sandboxes/{ref}/pause", {}),
        ("POST", f"/v2/sandboxes/{ref}/connect", {}), ("PUT", f"/sandboxes/{ref}/network", {}),
    ):  # fmt: skip
        assert refused(door, 404, method, path, body, key=key) == refused(
            door, 404, method, path.replace(ref, "b" * 20), body, key=other
        ).replace("b" * 20, ref), "another's sandbox looks like one that is not there"
    for query in (
        "&".join(f"a{n}=1" for n in range(200)),
        "order=up",
        "limit=0",
        "limit=101",
        "limit=x",
        "state=dead",
        "nextToken=!",
        "metadata=x",
        "startedAfter=soon",
    ):
        assert door.ask("GET", f"/v2/sandboxes?{query}")[0] == 400, query
    refused(door, 501, "POST", "/secrets", {"name": "x"}, key=key)
    assert box.is_running()


def rpc(door: Door, box: Any, name: str, body: Any, **headers: str) -> tuple[int, Any]:
    status, told, _ = door.envd(box, "POST", f"/{name}", body, **headers)
    return status, told


def framed(*messages: Any, flags: int = 0) -> bytes:
    payloads = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in messages]
    return b"".join(struct.pack(">BI", flags, len(payload)) + payload for payload in payloads)


def last(data: bytes) -> Any:
    """The end of a stream; all frames before it are skipped."""
    while data:
        flags, size = struct.unpack_from(">BI", data)
        payload, data = data[5 : 5 + size], data[5 + size :]
        if flags == 2:
            assert not data, "nothing follows the end"
            return json.loads(payload)
    raise AssertionError("the stream has no end")


STREAM = {"Content_Type": "application/connect+json"}
PROCESS, FILES = "process.Process", "filesystem.Filesystem"


def test_unary_calls_that_are_wrong(door: Door, box: Any) -> None:
    for name, body, code in (
        (f"{FILES}/Stat", b"{", "invalid_argument"), (f"{FILES}/Stat", b"[]", "invalid_argument"),
        (f"{FILES}/Stat", {"path": 3}, "invalid_argument"), (f"{FILES}/Stat", {"path": "a\0b"}, "invalid_argument"),
        (f"{FILES}/Stat", {"path": "/none"}, "not_found"), (f"{FILES}/ListDir", {"path": "/", "depth": "x"}, "invalid_argument"),
        (f"{FILES}/ListDir", {"path": "/", "depth": 10**9}, "invalid_argument"),
        (f"{FILES}/Stat", {"path": "x" * 5000}, "invalid_argument"), (f"{FILES}/Stat", {"path": "\ud800"}, "invalid_argument"),
        (f"{FILES}/GetWatcherEvents", {"watcherId": "none"}, "not_found"), (f"{FILES}/RemoveWatcher", {}, "not_found"),
        (f"{PROCESS}/SendInput", {}, "invalid_argument"), (f"{PROCESS}/SendInput", {"process": {"pid": 99999}}, "not_found"),
        (f"{PROCESS}/SendSignal", {"process": {"tag": "none"}, "signal": 9}, "not_found"),
        (f"{PROCESS}/SendSignal", {"process": {"pid": -1}}, "invalid_argument"), (f"{PROCESS}/Update", {"process": []}, "invalid_argument"),
        (f"{PROCESS}/Nothing", {}, "unimplemented"), ("Other/List", {}, "unimplemented"),
    ):  # fmt: skip
        status, told = rpc(door, box, name, body)
        assert told["code"] == code and status >= 400 and isinstance(told["message"], str), (name, body, told)
    assert rpc(door, box, f"{FILES}/Stat", {"path": "/"}, Connect_Timeout_Ms="x")[1]["code"] == "invalid_argument"
    for kind in ("application/proto", "application/grpc", "text/plain"):
        assert rpc(door, box, f"{FILES}/Stat", b"\0", Content_Type=kind)[0] == 415
    squeezed = zlib.compress(b'{"path": "/"}', wbits=31)
    assert rpc(door, box, f"{FILES}/Stat", squeezed, Content_Encoding="gzip")[0] == 415
    for user in ("no user:", "Root:", "../x:", "nobody-here:"):
        basic = "Basic " + base64.b64encode(user.encode()).decode()
        status, told = rpc(door, box, f"{FILES}/Stat", {"path": "x"}, Authorization=basic)
        assert (status, told["code"]) == (401, "unauthenticated"), (user, told)


def test_streams_that_are_wrong(door: Door, box: Any) -> None:
    start = {"process": {"cmd": "/bin/true"}}
    for body, code in (
        (b"", "invalid_argument"), (b"\0\0", "invalid_argument"), (b"\0\xff\xff\xff\xff{}", "resource_exhausted"),
        (b"\0\0\0\0\x20{}", "invalid_argument"), (framed(b"{"), "invalid_argument"), (framed(b"null"), "invalid_argument"),
        (framed(start, start), "invalid_argument"), (framed(start, flags=1), "unimplemented"), (framed(start, flags=8), "invalid_argument"),
        (framed({}), "invalid_argument"), (framed({"process": {"cmd": ""}}), "invalid_argument"),
        (framed({"process": {"cmd": "/bin/sh", "args": "x"}}), "invalid_argument"),
        (framed({"process": {"cmd": "/none"}}), "invalid_argument"),
        (framed({"process": {"cmd": "/bin/sh", "envs": {"a": 1}}}), "invalid_argument"),
        (framed({"process": {"cmd": "/bin/sh", "args": ["\ud800"]}}), "invalid_argument"),
        (framed({"process": {"cmd": "/bin/sh", "envs": {"a": "\ud800"}}}), "invalid_argument"),
        (framed({"process": {"cmd": "/bin/sh", "cwd": "\ud800"}}), "invalid_argument"),
        (framed({"process": {"cmd": "/bin/sh"}, "pty": {"size": {"rows": 0, "cols": 9}}}), "invalid_argument"),
    ):  # fmt: skip
        status, told = rpc(door, box, f"{PROCESS}/Start", body, **STREAM)
        assert status == 200 and last(told)["error"]["code"] == code, (body, told)
    assert rpc(door, box, f"{PROCESS}/Start", {"process": {}})[0] == 415
    assert rpc(door, box, f"{PROCESS}/Start", framed(start), **STREAM, Connect_Content_Encoding="gzip")[0] == 415
    status, told = rpc(door, box, f"{PROCESS}/Connect", framed({"process": {"pid": 99999}}), **STREAM)
    assert last(told)["error"]["code"] == "not_found"
    status, told = rpc(door, box, f"{PROCESS}/StreamInput", framed({"data": {"input": {"stdin": "eA=="}}}), **STREAM)
    assert last(told)["error"]["code"] == "invalid_argument"
    status, told = rpc(door, box, f"{PROCESS}/Start", framed(start), **STREAM)
    assert last(told) == {}, "and a right one works"


def test_uploads_that_are_wrong(door: Door, box: Any) -> None:
    form, octets = "multipart/form-data; boundary=b", "application/octet-stream"
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\nx\r\n'
    for path, kind, body, more in (
        ("/files", octets, b"x", {}), ("/files?path=u1", "text/plain", b"x", {}), ("/files?path=u1", "multipart/form-data", b"x", {}),
        ("/files", form, b"", {}), ("/files", form, b"no boundary", {}), ("/files", form, part % b"u1", {}),
        ("/files", form, part % b"" + b"--b--", {}), ("/files", form, (part % b"u1") * 2 + b"--b--", {}),
        ("/files?path=u1", form, part % b"a" + part % b"b" + b"--b--", {}), ("/files?path=u1", form, b"--b--\r\n", {}),
        ("/files?path=u1", octets, b"not gzip", {"Content_Encoding": "gzip"}), ("/files?path=u1", octets, b"x", {"Content_Encoding": "br"}),
        ("/files?path=u1", octets, zlib.compress(b"x" * 99, wbits=31)[:-4], {"Content_Encoding": "gzip"}),
        ("/files?path=/home", octets, b"x", {}), ("/files?path=u%00", octets, b"x", {}), ("/files?path=~other/x", octets, b"x", {}),
    ):  # fmt: skip
        status, told, _ = door.envd(box, "POST", path, body, Content_Type=kind, **more)
        assert status == 400 and told["code"] == 400, (path, kind, body, told)
    status, told, _ = door.envd(box, "POST", "/files?path=ok", part % b"x" + b"--b--\r\n", Content_Type=form)
    assert status == 200 and told[0]["path"] == "/home/user/ok"


def test_tokens_open_their_own_sandbox_only(door: Door, box: Any) -> None:
    other = Sandbox.create(timeout=60, **door.options)
    try:
        for token in ("", "x", other._envd_access_token, box.traffic_access_token, door.key):
            status, told, _ = door.envd(box, "GET", "/files?path=/etc/hostname", None, X_Access_Token=token)
            assert status == 401 and told["code"] == 401
            status, told, _ = door.envd(box, "POST", f"/{PROCESS}/List", {}, X_Access_Token=token)
            assert status == 401
    finally:
        other.kill()


def test_a_revoked_key_takes_its_tokens_along(door: Door) -> None:
    name = f"revoked-{door.runtime}"
    key = new_key(door.lab, name)
    box = Sandbox.create(timeout=60, **{**door.options, "api_key": key})
    running = box.commands.run("sleep 1000", background=True)
    assert door.lab.cli("key", "revoke", name).returncode == 0
    assert door.envd(box, "POST", f"/{PROCESS}/List", {})[0] == 401
    with pytest.raises(Exception):  # noqa: B017  # its stream ends
        running.wait()
    again = new_key(door.lab, name)
    assert Sandbox.kill(box.sandbox_id, **{**door.options, "api_key": again}) is True
    door.lab.cli("key", "revoke", name)


def test_a_client_that_vanishes_ends_its_stream_and_nothing_else(door: Door, box: Any) -> None:
    body = framed({"process": {"cmd": "/bin/sh", "args": ["-c", "sleep 0.5; echo done > /tmp/vanished"]}})
    head = (
        f"POST /{PROCESS}/Start HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {box.sandbox_id}\r\nE2b-Sandbox-Port: {ENVD}\r\n"
        f"X-Access-Token: {box._envd_access_token}\r\nContent-Type: application/connect+json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    for cut in (len(body), len(body) - 3, 2):
        with socket.create_connection(("127.0.0.1", door.port), PATIENCE) as raw:
            raw.sendall(head.encode() + body[:cut])
            if cut == len(body):
                assert b'"start"' in raw.recv(65536) + raw.recv(65536)
    assert box.commands.run("while [ ! -f /tmp/vanished ]; do sleep 0.05; done; cat /tmp/vanished").stdout == "done\n"


def test_watchers_are_bounded(door: Door, box: Any) -> None:
    made = []
    for _ in range(200):
        status, told = rpc(door, box, f"{FILES}/CreateWatcher", {"path": "/tmp"})
        if status != 200:
            assert (status, told["code"]) == (429, "resource_exhausted")
            break
        made.append(told["watcherId"])
    assert 0 < len(made) <= 100
    for name in made:
        assert rpc(door, box, f"{FILES}/RemoveWatcher", {"watcherId": name})[0] == 200
