"""MCP over HTTP: the SDK's client, K8E's lifecycle, and who is let in."""

import asyncio
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from lab.sandboxes import LONG, PATIENCE, Lab
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

JSON = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}


def post(door: Any, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=2 * PATIENCE)
    try:
        connection.connect()
    except ConnectionRefusedError:
        raise ConnectionRefusedError(
            f"the listener is gone; `atoll mcp` has ended with {door.process.poll()}"
        ) from None
    try:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", "/mcp", raw, {**JSON, **{k.replace("_", "-"): v for k, v in headers.items()}})
        response = connection.getresponse()
        data = response.read()
        return response.status, json.loads(data) if data[:1] in (b"{", b"[") else data, dict(response.getheaders())
    finally:
        connection.close()


def request(method: str, number: int = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def run(code: str, number: int = 1, **meta: Any) -> dict[str, Any]:
    extra = {"_meta": meta} if meta else {}
    return request("tools/call", number, name="sandbox_run", arguments={"code": code}, **extra)


@contextmanager
def stream(door: Any, **headers: str) -> Iterator[Any]:
    """An open GET: its lines."""
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=2 * PATIENCE)
    connection.request("GET", "/mcp", headers={"Accept": "text/event-stream", **headers})
    response = connection.getresponse()
    try:
        assert response.status == 200 and response.getheader("content-type") == "text/event-stream"
        yield response
    finally:
        response.close()
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()


def token(response: Any) -> str:
    assert response.readline() == b"event: session\n"
    line = response.readline().decode().strip()
    assert response.readline() == b"\n"
    return str(line.removeprefix("data: "))


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_k8e_P40_the_sdks_client_over_http(lab: Lab, door: Any, helpers: Any, mode: Any) -> None:
    """Serve the current protocol and the one with a handshake: tools, progress, errors."""
    seen: list[str] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        seen.append(message or "")

    async with Client(door.url, mode=mode) as client:
        assert len((await client.list_tools()).tools) == 22
        found = await client.call_tool(
            "sandbox_run", {"code": "echo one; sleep 0.5; echo two"}, progress_callback=progress
        )
        assert found.structured_content is not None and found.structured_content["stdout"] == "one\ntwo\n"
        assert "".join(seen) == "one\ntwo\n"
        session = found.structured_content["session_id"]
        failed = await client.call_tool("sandbox_run", {"code": "exit 7"})
        assert failed.structured_content is not None and failed.structured_content["exit_code"] == 7
        with pytest.raises(Exception, match="unknown field"):
            await client.call_tool("sandbox_run", {"code": "true", "extra": 1})
    if mode == "legacy":  # a session ends with its client
        await asyncio.to_thread(helpers.until, lambda: session[5:] not in helpers.living(lab), "its sandbox is gone")


async def test_k8e_P40_the_sdks_client_over_stdio(lab: Lab) -> None:
    program = StdioServerParameters(
        command=sys.executable, args=["-m", "atoll", "mcp"], env={**lab.env, "ATOLL_RUNTIME": "container"}
    )
    async with Client(stdio_client(program)) as client:
        assert len((await client.list_tools()).tools) == 12
        found = await client.call_tool("sandbox_run", {"code": "print(6 * 7)", "language": "python"})
        assert found.structured_content is not None and found.structured_content["stdout"] == "42\n"


def test_k8e_P41_lifecycle_of_get_and_post(lab: Lab, door: Any, helpers: Any) -> None:
    """Answer a POST in its body and on the stream of its session, progress there too; the session ends with the stream."""
    with stream(door) as events:
        session = token(events)
        assert len(session) == 24 and int(session, 16) >= 0
        status, answer, _ = post(door, run("echo hi", progressToken="p"), Mcp_Session_Id=session)
        assert status == 200 and answer["result"]["structuredContent"]["stdout"] == "hi\n"
        pushed = []
        while not pushed or "id" not in pushed[-1]:
            line = events.readline().decode()
            if line.startswith("data: "):
                pushed.append(json.loads(line[6:]))
        assert pushed[-1] == answer and pushed[0]["params"]["message"] == "hi\n"
        assert post(door, {"jsonrpc": "2.0", "method": "notifications/initialized"}, Mcp_Session_Id=session)[0] == 202
        sandbox = answer["result"]["structuredContent"]["session_id"][5:]
        assert sandbox in helpers.living(lab)
    helpers.until(lambda: post(door, request("ping"), Mcp_Session_Id=session)[0] == 404, "the session is over")
    helpers.until(lambda: sandbox not in helpers.living(lab), "its sandbox has ended")


@pytest.mark.skipif(not LONG, reason="it waits for a quarter of a minute")
def test_k8e_P41_a_quiet_stream_says_that_it_is_there(door: Any) -> None:
    with stream(door) as events:
        token(events)
        assert events.readline() == b": ping\n"


async def test_a_call_without_a_session_ends_with_its_connection(door: Any, helpers: Any) -> None:
    """Kill the command of a client of the current protocol that goes away."""

    async def running() -> bool:
        code = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
        found = (await asyncio.to_thread(post, door, run(code)))[1]
        return "76543" in found["result"]["structuredContent"]["stdout"]

    async def use() -> None:
        async with Client(door.url) as client:
            await client.call_tool("sandbox_run", {"code": "exec sleep 76543", "timeout": 600})

    assert not await running()  # so that the first sandbox of this daemon is not made on the client's own clock
    task = asyncio.create_task(use())
    async with asyncio.timeout(PATIENCE):
        while not await running():
            await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.wait([task])
    async with asyncio.timeout(PATIENCE):
        while await running():
            await asyncio.sleep(0.1)


def test_k8e_P42_the_bare_url_needs_no_initialize(door: Any) -> None:
    """Answer calls without a session in one that belongs to the credential."""
    first = post(door, run("echo x > f"))[1]["result"]["structuredContent"]
    second = post(door, run("cat f"))[1]["result"]["structuredContent"]
    assert (second["stdout"], second["session_id"]) == ("x\n", first["session_id"])
    assert len(post(door, request("tools/list"))[1]["result"]["tools"]) == 22
    assert post(door, b"{nonsense")[1]["error"]["code"] == -32700
    assert post(door, request("nope"))[1]["error"]["code"] == -32601


def test_k8e_D44_each_stream_has_its_own_session_and_equal_ids_do_not_meet(door: Any) -> None:
    with stream(door) as one, stream(door) as two:
        first, second = token(one), token(two)
        assert first != second
        found = [post(door, run("hostname; ls", 1), Mcp_Session_Id=session)[1]["result"] for session in (first, second)]
        assert len({result["structuredContent"]["session_id"] for result in found}) == 2


async def test_two_sessions_of_the_sdk_with_one_id_do_not_meet(door: Any) -> None:
    """The SDK's clients all count from one; each hears its own answer and no other's."""

    async def use(word: str) -> list[str]:
        async with Client(door.url, mode="legacy") as client:
            calls = [client.call_tool("sandbox_run", {"code": f"sleep 0.1; echo {word}{n}"}) for n in range(5)]
            found = await asyncio.gather(*calls)
            return [(one.structured_content or {}).get("stdout", "") for one in found]

    for word, heard in zip("ab", await asyncio.gather(use("a"), use("b")), strict=True):
        assert heard == [f"{word}{n}\n" for n in range(5)]


def test_a_caller_that_hangs_up_kills_its_command(door: Any, helpers: Any) -> None:
    post(door, run("rm -f on"))
    body = json.dumps(
        request("tools/call", name="sandbox_run", arguments={"code": "touch on; exec sleep 87654", "timeout": 600})
    )
    sock = socket.create_connection(("127.0.0.1", door.port))
    head = f"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall((head + body).encode())

    def running() -> bool:
        return (
            "87654"
            in post(door, run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))[1]["result"]["structuredContent"]["stdout"]
        )

    helpers.until(running, "it runs")
    sock.close()
    helpers.until(lambda: not running(), "it is killed")


def test_k8e_D44_pages_in_a_browser_are_refused(door: Any) -> None:
    """Check Host, Origin and content type on both lifecycles."""
    for headers in (
        {"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"},
    ):  # fmt: skip
        assert post(door, request("ping"), **headers)[0] == 403
        assert post(door, request("initialize", protocolVersion="2025-06-18", capabilities={}), **headers)[0] == 403
    assert post(door, request("ping"), Content_Type="text/plain")[0] == 400
    with pytest.raises(AssertionError), stream(door, Origin="http://evil.example"):
        pass
    assert post(door, request("ping"), Origin=f"http://127.0.0.1:{door.port}")[0] == 200


def test_k8e_D44_other_users_need_a_key(lab: Lab, door: Any) -> None:
    """Refuse another user of the machine without a key, and a wrong key from anybody."""
    body = json.dumps(request("ping")).encode()
    code = (
        "import http.client, sys; c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]), timeout=60)\n"
        "h = {'Content-Type': 'application/json'}\n"
        "if len(sys.argv) > 2: h['Authorization'] = 'Bearer ' + sys.argv[2]\n"
        f"c.request('POST', '/mcp', {body!r}, h); print(c.getresponse().status)"
    )

    def as_nobody(*words: str) -> str:
        return subprocess.run(
            ["/usr/bin/python3", "-c", code, str(door.port), *words], user=65534, group=65534, extra_groups=[], cwd="/",
            capture_output=True, text=True, timeout=PATIENCE, env={"PATH": "/usr/bin:/bin"},
        ).stdout.strip()  # fmt: skip

    key = lab.ask("POST", "/v1/keys", {"name": "mcp-guest"})[1]["key"]
    assert as_nobody() == "401" and as_nobody("0" * 64) == "401" and as_nobody(key) == "200"
    assert post(door, request("ping"), Authorization="Bearer wrong")[0] == 401
    lab.ask("POST", "/v1/keys/revoke", {"name": "mcp-guest"})
    assert as_nobody(key) == "401"


def test_a_session_belongs_to_who_opened_it(lab: Lab, door: Any) -> None:
    """Hide one caller's session, in either lifecycle, from another who knows its id."""
    key = lab.ask("POST", "/v1/keys", {"name": "mcp-other"})[1]["key"]
    hello = request(
        "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "t", "version": "1"}
    )
    status, _, headers = post(door, hello)
    session = {name.lower(): value for name, value in headers.items()}["mcp-session-id"]
    assert status == 200
    asked = {"Mcp_Session_Id": session, "Mcp_Protocol_Version": "2025-06-18"}
    assert post(door, request("tools/list", 2), **asked)[0] == 200
    assert post(door, request("tools/list", 3), Authorization=f"Bearer {key}", **asked)[0] == 404
    with stream(door) as events:
        own = token(events)
        assert post(door, request("ping"), Mcp_Session_Id=own, Authorization=f"Bearer {key}")[0] == 404
        assert post(door, request("ping"), Mcp_Session_Id=own)[0] == 200


def test_the_listener_takes_its_clients_along(lab: Lab, helpers: Any) -> None:
    """End sessions, and free the port, when the process that opened the door ends."""
    door = helpers.Door(lab)
    sandbox = post(door, run("true"))[1]["result"]["structuredContent"]["session_id"][5:]
    door.close()
    helpers.until(lambda: sandbox not in helpers.living(lab), "its sandbox has ended")

    def is_free() -> bool:  # to us; somebody else on this machine may have been given the number by now
        try:
            return post(door, request("ping"))[1] != {"jsonrpc": "2.0", "id": 1, "result": {}}
        except (OSError, http.client.HTTPException):
            return True

    helpers.until(is_free, "nothing of ours listens there")


def test_calls_without_a_session_follow_a_rotated_key(lab: Lab, door: Any) -> None:
    """A key that was revoked and made again under its name is the same owner, with another credential."""

    def make() -> dict[str, str]:
        status, made = lab.ask("POST", "/v1/keys", {"name": "turning", "scopes": ["use"]})
        assert status < 300, made
        return {"Authorization": f"Bearer {made['key']}"}

    first = make()
    status, answer, _ = post(door, run("echo one"), **first)
    assert status == 200 and "one" in json.dumps(answer), answer
    assert lab.ask("POST", "/v1/keys/revoke", {"name": "turning"})[0] < 300
    second = make()
    status, answer, _ = post(door, run("echo two"), **second)
    assert status == 200 and "two" in json.dumps(answer["result"]["structuredContent"]), answer
    assert post(door, run("echo three"), **first)[0] == 401
    lab.ask("POST", "/v1/keys/revoke", {"name": "turning"})


def test_a_message_of_very_many_values_is_refused_and_a_long_text_is_not(lab: Lab, door: Any) -> None:
    """F2-M4 at this door: counted before anything is made of it."""
    before = lab.peak_memory()
    head = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_run","arguments":{"code":'
    for values in (b"[" + b"[]," * 5_000_000 + b"1]", b"[" * 5_000_000 + b"]" * 5_000_000, b'[{"a":' * 1_000_000):
        status, answer, _ = post(door, head + values + b"}}}")
        assert status == 413 and "too many values" in answer["error"]["message"], answer
    assert lab.peak_memory() - before < 128 << 20
    status, answer, _ = post(door, request("tools/call", name="sandbox_none", arguments={"code": "a,[b," * 200_000}))
    assert status == 200 and "too many" not in json.dumps(answer)[:1000]
