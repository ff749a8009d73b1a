"""What is wrong, cut, hostile or dies: the interpreter answers in the contract's form and serves the next one."""

import http.client
import json
import socket
from typing import Any

import pytest
from lab.e2b import Door
from lab.sandboxes import ONE_RUNTIME
from lab.waiting import PATIENCE, until

pytestmark = pytest.mark.parametrize("runtime", ONE_RUNTIME, indirect=True, scope="module")
LONG = 4 * PATIENCE
PORT = "49999"


def headers(box: Any, **more: str) -> dict[str, str]:
    return {
        "E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": PORT, "Content-Type": "application/json",
        "E2B-Traffic-Access-Token": box.traffic_access_token, **more,
    }  # fmt: skip


def ask(door: Door, box: Any, method: str, path: str, body: bytes = b"", **more: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=LONG)
    try:
        connection.request(method, path, body, headers(box, **more))
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    finally:
        connection.close()


def run(box: Any, code: str, **options: Any) -> Any:
    return box.run_code(code, timeout=LONG, **options)


def test_nobody_comes_in_without_a_token(code_door: Door, code_box: Any) -> None:
    for path in ("/execute", "/contexts", "/health"):
        method = "POST" if path == "/execute" else "GET"
        without = {"E2b-Sandbox-Id": code_box.sandbox_id, "E2b-Sandbox-Port": PORT}
        assert code_door.ask(method, path, {}, headers=without, key="")[0] == 403
        wrong = {**without, "E2B-Traffic-Access-Token": "0" * 64}
        assert code_door.ask(method, path, {}, headers=wrong, key="")[0] == 403
    by_host = {"Host": code_box.get_host(int(PORT))}
    assert code_door.ask("GET", "/contexts", headers=by_host, key="")[0] == 403
    allowed = {**without, "X-Access-Token": code_box._envd_access_token}
    assert code_door.ask("GET", "/contexts", headers=allowed, key="")[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'{"code": 1}', b'{"code": null}', b'{"code": "1", "language": 5}',
        b'{"code": "1", "env_vars": []}', b'{"code": "1", "env_vars": {"A": 1}}', b'{"code": "1", "env_vars": {"A=B": "1"}}',
        b'{"code": "1", "context_id": "x", "language": "python"}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_wrong_bodies(code_door: Door, code_box: Any, body: bytes) -> None:
    status, text = ask(code_door, code_box, "POST", "/execute", body)
    assert status == 400 and text, (status, text)


def test_wrong_routes_and_contexts(code_door: Door, code_box: Any) -> None:
    assert ask(code_door, code_box, "GET", "/nowhere")[0] == 404
    assert ask(code_door, code_box, "POST", "/execute", b'{"code": "1", "context_id": "none"}')[0] == 404
    assert ask(code_door, code_box, "DELETE", "/contexts/none")[0] == 404
    assert ask(code_door, code_box, "POST", "/contexts/none/restart")[0] == 404
    for wrong in (b'{"language": "r"}', b'{"cwd": 5}', b'{"cwd": "/nowhere"}', b'{"language": []}'):
        assert ask(code_door, code_box, "POST", "/contexts", wrong)[0] == 400


def test_a_body_that_is_cut(code_door: Door, code_box: Any) -> None:
    with socket.create_connection(("127.0.0.1", code_door.port), PATIENCE) as raw:
        lines = [f"{name}: {value}\r\n" for name, value in headers(code_box, **{"Content-Length": "100"}).items()]
        raw.sendall(f"POST /execute HTTP/1.1\r\nHost: x\r\n{''.join(lines)}\r\n".encode() + b'{"code": "1')
    assert run(code_box, "'on'").text == "on"


@pytest.mark.parametrize("death", ["import os; os._exit(3)", "import os, signal; os.kill(os.getpid(), 9)"])
def test_a_kernel_that_dies(code_box: Any, death: str) -> None:
    run(code_box, "kept = 1")
    done = run(code_box, death)
    assert done.error.name == "KernelDied"
    after = run(code_box, "'kept' in dir()")
    assert after.error is None and after.text == "False"


def test_a_kernel_that_forks_or_loses_its_files(code_box: Any) -> None:
    forked = run(code_box, "import os\npid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)[1]")
    assert forked.text == "0", forked
    files = "/tmp/kernel-*/connection.json"
    code = f"import glob, os\nfor name in glob.glob({files!r}): os.remove(name)\nlen(glob.glob({files!r}))"
    assert run(code_box, code).text == "0"
    assert run(code_box, "'on'").text == "on"
    made = code_box.create_code_context(request_timeout=LONG)
    assert run(code_box, "'new'", context=made).text == "new"
    code_box.remove_code_context(made)


def test_a_flood_is_bounded(code_box: Any) -> None:
    seen = 0

    def count(one: Any) -> None:
        nonlocal seen
        seen += len(one.line)

    done = run(code_box, "for _ in range(300): print('x' * 100_000)\n'end'", on_stdout=count)
    assert done.error is None and done.text == "end" and seen <= 300 * 100_001
    assert run(code_box, "'on'").text == "on"


def test_a_server_that_is_killed_is_started_again(code_door: Door, code_box: Any) -> None:
    code_box.commands.run("pkill -9 -f 'atoll-interpreter/[s]erver.py'")
    until(lambda: ask(code_door, code_box, "GET", "/health")[0] == 200, "it serves again")
    code = "import os; os.environ['FOO']"
    assert run(code_box, code).text == "bar"
    listed = json.loads(ask(code_door, code_box, "GET", "/contexts")[1])
    assert [one["language"] for one in listed] == ["python"]
