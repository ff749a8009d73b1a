"""MCP on stdio: K8E's and agentkernel's tools on real sandboxes."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.sandboxes import LONG, SOURCE, Lab

K8E = {
    "sandbox_run", "sandbox_status", "sandbox_create_session", "sandbox_destroy_session", "sandbox_exec",
    "sandbox_exec_stream", "sandbox_write_file", "sandbox_read_file", "sandbox_list_files", "sandbox_pip_install",
    "sandbox_run_subagent", "sandbox_confirm_action",
}  # fmt: skip
AGENTKERNEL = {
    "sandbox_run", "sandbox_create", "sandbox_exec", "sandbox_list", "sandbox_remove", "sandbox_file_write",
    "sandbox_file_read", "sandbox_start", "sandbox_stop",
}  # fmt: skip
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def test_k8e_P43_all_twelve_tools_are_listed(k8e: Any) -> None:
    """List K8E's tools, each with a schema that refuses what it does not know."""
    answer = k8e.ask("initialize", {"protocolVersion": "2024-11-05", "clientInfo": {"name": "t", "version": "1"}})
    assert answer["result"]["protocolVersion"] == "2024-11-05"
    assert answer["result"]["serverInfo"] == {"name": "k8e-sandbox", "version": "1.0.0"}
    k8e.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
    tools = k8e.ask("tools/list")["result"]["tools"]
    assert {tool["name"] for tool in tools} == K8E
    for tool in tools:
        assert tool["inputSchema"]["type"] == "object" and tool["inputSchema"]["additionalProperties"] is False
        assert tool["description"] and "readOnlyHint" in tool["annotations"]


def test_k8e_P43_sandbox_run_alone_suffices(k8e: Any) -> None:
    """Run code without any set-up, in a session that keeps its files."""
    first = k8e.call("sandbox_run", code="print('hello')\nopen('kept', 'w').write('x')", language="python")
    assert first["isError"] is False and first["structuredContent"]["stdout"] == "hello\n"
    assert json.loads(first["content"][0]["text"]) == first["structuredContent"]
    assert first["structuredContent"]["session_id"].startswith("sess-")
    second = k8e.call("sandbox_run", code="cat kept")["structuredContent"]
    assert (second["stdout"], second["session_id"]) == ("x", first["structuredContent"]["session_id"])
    assert k8e.call("sandbox_status")["structuredContent"]["session_id"] == second["session_id"]


def test_k8e_D01_the_exit_code_arrives(k8e: Any) -> None:
    found = k8e.call("sandbox_run", code="echo out; echo err >&2; exit 7")["structuredContent"]
    assert (found["exit_code"], found["stdout"], found["stderr"]) == (7, "out\n", "err\n")


def test_k8e_session_tools(k8e: Any, helpers: Any) -> None:
    """Make a session, work in it with each tool, and end it."""
    session = k8e.call("sandbox_create_session", allowed_hosts=["example.com"])["structuredContent"]["session_id"]
    try:
        assert (
            k8e.call("sandbox_write_file", session_id=session, path="/workspace/d/a.txt", content="一\n")["isError"]
            is False
        )
        k8e.call("sandbox_write_file", session_id=session, path="/workspace/d/a.txt", content="two\n", mode="a")
        assert helpers.text(k8e.call("sandbox_read_file", session_id=session, path="/workspace/d/a.txt")) == "一\ntwo\n"
        listed = k8e.call("sandbox_list_files", session_id=session)["structuredContent"]["files"]
        assert [one["path"].endswith("d/a.txt") for one in listed] == [True] and listed[0]["modified"] > 0
        done = k8e.call("sandbox_exec", session_id=session, command="pwd; exit 3", workdir="/tmp")["structuredContent"]
        assert (done["stdout"], done["exit_code"]) == ("/tmp\n", 3)
        assert "both" in helpers.text(k8e.call("sandbox_exec_stream", session_id=session, command="echo both"))
        late = k8e.call("sandbox_exec", session_id=session, command="sleep 600", timeout=1)["structuredContent"]
        assert late["timed_out"] is True and late["exit_code"] == 124
    finally:
        assert k8e.call("sandbox_destroy_session", session_id=session)["structuredContent"] == {"ok": True}
    gone = k8e.call("sandbox_exec", session_id=session, command="true")
    assert gone["isError"] is True and helpers.text(gone).startswith("Error: ")


def test_a_model_cannot_go_above_the_ceiling(k8e: Any, agentkernel: Any, helpers: Any) -> None:
    """Refuse every public host, the mode native and permissive unless the person who started it allowed them."""
    for result in (
        k8e.call("sandbox_create_session", allowed_hosts=["*"]),
        agentkernel.call("sandbox_run", command=["true"], profile="permissive"),
        agentkernel.call("sandbox_run", command=["true"], compatibility_mode="native"),
    ):
        assert result["isError"] is True and "--allow-host-access" in helpers.text(result)


def test_ak_K15_no_tool_grants_a_permission(connect: Callable[..., Any]) -> None:
    """Offer nothing by which a model could approve, lift a limit or open a host."""
    tools = connect("mcp", "--tools", "all").ask("tools/list")["result"]["tools"]
    assert {tool["name"] for tool in tools} == K8E | AGENTKERNEL | {
        "sandbox_interpreter",
        "sandbox_shell",
        "sandbox_terminal",
    }
    assert not [tool["name"] for tool in tools if "approve" in tool["name"] or "allow" in tool["name"]]


def test_images_and_binary_files_come_as_such(k8e: Any, agentkernel: Any) -> None:
    session = k8e.call("sandbox_run", code="true")["structuredContent"]["session_id"]
    code = f"""
import base64
open('a.png', 'wb').write(base64.b64decode('{base64.b64encode(PNG).decode()}'))
open('b', 'wb').write(bytes(range(256)))
"""
    k8e.call("sandbox_run", code=code, language="python")
    image = k8e.call("sandbox_read_file", session_id=session, path="a.png")["content"][0]
    assert (image["type"], image["mimeType"], base64.b64decode(image["data"])) == ("image", "image/png", PNG)
    blob = k8e.call("sandbox_read_file", session_id=session, path="/workspace/b")["content"][0]["resource"]
    assert base64.b64decode(blob["blob"]) == bytes(range(256)) and blob["uri"] == "file:///workspace/b"


def test_ak_K20_a_cut_never_splits_a_character(k8e: Any, agentkernel: Any, helpers: Any) -> None:
    """Whatever the bytes around it: characters of four, three and two bytes, at every offset, and bytes that are no text."""
    for shift, character in ((0, "\U0001f600"), (1, "\U0001f600"), (2, "\U0001f600"), (3, "漢"), (1, "é")):
        code = f"import sys; sys.stdout.write('x' * {shift} + {character!r} * 9000)"
        for found in (
            helpers.text(agentkernel.call("sandbox_run", command=["python3", "-c", code])),
            k8e.call("sandbox_run", code=code, language="python")["structuredContent"]["stdout"],
        ):
            head, marker, tail = found.partition("\n... [")
            omitted, _, tail = tail.partition(" bytes omitted] ...\n")
            assert marker and head.strip("x") + tail == character * (len(head.strip("x")) + len(tail)), found[:100]
            assert len((head + tail).encode()) + int(omitted) == shift + 9000 * len(character.encode())
    odd = k8e.call("sandbox_run", code="import os; os.write(1, b'\\xf0\\x9f' * 20000)", language="python")
    assert odd["isError"] is False and "bytes omitted" in odd["structuredContent"]["stdout"]


def test_long_output_is_cut_in_the_middle(k8e: Any) -> None:
    """Say how much was left out, and never cut a character in two."""
    found = k8e.call("sandbox_run", code="print('AA' + 'é' * 50_000 + 'ZZ')", language="python")["structuredContent"]
    out = found["stdout"]
    assert out.startswith("AAé") and out.endswith("éZZ\n") and "\ufffd" not in out
    assert "bytes omitted" in out and len(out.encode()) < 17_000
    assert found["truncated"] is True and found["stdout_bytes"] == 100_005


def test_a_file_too_large_for_one_answer_is_read_in_parts(k8e: Any, helpers: Any) -> None:
    session = k8e.call(
        "sandbox_run", code="python3 - <<'E'\nf=open('big','w')\nf.write('first'+'x'*9_000_000+'last')\nE"
    )["structuredContent"]["session_id"]
    whole = helpers.text(k8e.call("sandbox_read_file", session_id=session, path="big"))
    assert whole.startswith("first") and whole.endswith("last") and "bytes omitted" in whole
    assert helpers.text(k8e.call("sandbox_read_file", session_id=session, path="big", offset=9_000_005)) == "last"
    endless = k8e.call("sandbox_read_file", session_id=session, path="/dev/zero")
    assert endless["isError"] is True or len(json.dumps(endless)) < 8_000_000


def test_output_is_shown_while_the_command_runs(connect: Callable[..., Any]) -> None:
    """Report output as progress before the command ends."""
    wire = connect()
    wire.call("sandbox_run", code="true")
    request = wire.start(
        "tools/call",
        {"name": "sandbox_run", "arguments": {"code": "echo early; until [ -e go ]; do sleep 0.05; done; echo late"},
         "_meta": {"progressToken": 5}},
    )  # fmt: skip
    note = wire.receive()
    assert note["method"] == "notifications/progress" and note["params"]["progressToken"] == 5
    assert note["params"]["message"] == "early\n"
    wire.call("sandbox_run", code="touch go")
    assert wire.wait(request)["result"]["structuredContent"]["stdout"] == "early\nlate\n"
    values = [n["params"]["progress"] for n in [note, *wire.notes]]
    assert values == sorted(set(values)) and wire.notes[-1]["params"]["message"] == "late\n"


def test_a_cancelled_call_kills_its_command(connect: Callable[..., Any], helpers: Any) -> None:
    wire = connect()
    wire.call("sandbox_run", code="true")
    request = wire.start(
        "tools/call", {"name": "sandbox_run", "arguments": {"code": "touch on; exec sleep 98765", "timeout": 600}}
    )
    helpers.until(lambda: wire.call("sandbox_run", code="test -e on")["structuredContent"]["exit_code"] == 0, "it runs")
    wire.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": request}})
    assert "cancelled" in wire.wait(request)["error"]["message"]
    everything = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"

    def gone() -> bool:
        return "98765" not in wire.call("sandbox_run", code=everything)["structuredContent"]["stdout"]

    helpers.until(gone, "the command is gone")


def test_every_client_has_a_session_of_its_own_and_takes_it_along(
    lab: Lab, connect: Callable[..., Any], helpers: Any
) -> None:
    """Destroy a client's session when it leaves, also when it is killed in the middle of a call."""
    one, two = connect(), connect()
    sessions = [
        wire.call("sandbox_run", code="touch mine; ls")["structuredContent"]["session_id"][5:] for wire in (one, two)
    ]
    assert sessions[0] != sessions[1] and set(sessions) <= set(helpers.living(lab))
    assert one.close() == 0
    helpers.until(lambda: sessions[0] not in helpers.living(lab), "the first session has ended")
    two.start("tools/call", {"name": "sandbox_run", "arguments": {"code": "sleep 500", "timeout": 600}})
    two.kill()
    helpers.until(lambda: sessions[1] not in helpers.living(lab), "the second session has ended")


def test_a_tenants_session_is_found_again_and_stays(lab: Lab, connect: Callable[..., Any], helpers: Any) -> None:
    first = connect("mcp", "--tenant-id", "team-a")
    session = first.call("sandbox_run", code="echo kept > f")["structuredContent"]["session_id"]
    first.close()
    second = connect("sandbox-mcp", "--tenant-id", "team-a")
    found = second.call("sandbox_run", code="cat f")["structuredContent"]
    assert (found["stdout"], found["session_id"]) == ("kept\n", session)
    assert second.call("sandbox_destroy_session", session_id=session)["isError"] is False
    again = second.call("sandbox_run", code="ls")["structuredContent"]
    assert again["session_id"] != session and again["stdout"] == ""
    second.call("sandbox_destroy_session", session_id=again["session_id"])


def test_a_lost_session_is_replaced(k8e: Any) -> None:
    session = k8e.call("sandbox_run", code="true")["structuredContent"]["session_id"]
    k8e.call("sandbox_destroy_session", session_id=session)
    found = k8e.call("sandbox_run", code="echo back")["structuredContent"]
    assert found["stdout"] == "back\n" and found["session_id"] != session


def test_k8e_P24_a_subagent_shares_the_workspace(k8e: Any) -> None:
    parent = k8e.call("sandbox_run", code="echo shared > /workspace/from-parent")["structuredContent"]["session_id"]
    child = k8e.call("sandbox_run_subagent", parent_session_id=parent, agent_type="worker")
    session = child["structuredContent"]["session_id"]
    try:
        done = k8e.call("sandbox_exec", session_id=session, command="cat /workspace/from-parent")
        assert done["structuredContent"]["stdout"] == "shared\n"
        assert k8e.call("sandbox_run_subagent", parent_session_id=session)["isError"] is True
    finally:
        k8e.call("sandbox_destroy_session", session_id=session)


def test_k8e_confirm_asks_and_does_not_help_to_answer(lab: Lab, connect: Callable[..., Any]) -> None:
    """Ask, wait for a decision made elsewhere, and never show what would be needed to make it."""
    wire = connect()
    session = wire.call("sandbox_run", code="true")["structuredContent"]["session_id"]
    asked = wire.call("sandbox_confirm_action", session_id=session, action="delete everything")["structuredContent"]
    assert asked["approved"] is False and set(asked) == {"approval_id", "approved", "status"}
    waiting = wire.start(
        "tools/call",
        {"name": "sandbox_confirm_action", "arguments": {"session_id": session, "approval_id": asked["approval_id"]}},
    )
    assert wire.call("sandbox_status")["isError"] is False  # it blocks nobody else
    wire.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": waiting}})
    assert "error" in wire.wait(waiting)
    assert wire.call("sandbox_confirm_action", session_id=session)["isError"] is True


def test_ak_P20_nine_tools(agentkernel: Any, connect: Callable[..., Any]) -> None:
    """Offer agentkernel's tools under its name by `mcp server`, `mcp-server` and the program's name."""
    assert {tool["name"] for tool in agentkernel.ask("tools/list")["result"]["tools"]} == AGENTKERNEL
    for wire in (agentkernel, connect("mcp-server"), connect("mcp", "server", name="agentkernel")):
        assert wire.ask("initialize", {})["result"]["serverInfo"]["name"] == "agentkernel"
    assert agentkernel.ask("ping")["result"] == {} and agentkernel.ask("shutdown")["result"] == {}


def test_ak_P23_the_documented_entry_is_enough(lab: Lab, tmp_path: Path, helpers: Any) -> None:
    """Start what `.mcp.json` says, found on PATH and by nothing else; ids made of these names suit permission lists."""
    entry = json.loads('{"mcpServers": {"agentkernel": {"command": "agentkernel", "args": ["mcp", "server"]}}}')
    ((server, start),) = entry["mcpServers"].items()
    program = tmp_path / "bin" / "agentkernel"
    program.parent.mkdir()
    source = Path(__file__).parents[2].joinpath("scripts/atoll").read_text()
    program.write_text(f"#!{sys.executable}\n" + source.partition("\n")[2])  # as an installer writes it
    program.chmod(0o755)
    wire = helpers.Wire(
        lab, argv=[start["command"], *start["args"]], PATH=f"{program.parent}:{os.environ['PATH']}", cwd=str(tmp_path)
    )
    try:
        about = wire.ask("initialize", {"protocolVersion": "2024-11-05", "clientInfo": {"name": "x", "version": "1"}})
        assert about["result"]["serverInfo"]["name"] == server
        names = {f"mcp__{server}__{tool['name']}" for tool in wire.ask("tools/list")["result"]["tools"]}
        assert names == {f"mcp__agentkernel__{name}" for name in AGENTKERNEL}
        assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in names)
        assert helpers.text(wire.call("sandbox_run", command=["echo", "hi"])) == "hi\n"
    finally:
        wire.kill()


def test_ak_P24_reading_changes_nothing_and_no_tool_alters_the_host(
    lab: Lab, connect: Callable[..., Any], tmp_path: Path, helpers: Any
) -> None:
    project = tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    (project / "keep.txt").write_text("mine")
    mark = f"atoll-p24-{os.urandom(6).hex()}"
    wire = connect("mcp", "server", cwd=str(project))
    wire.ask("initialize", {"clientInfo": {"name": "claude-code", "version": "1"}})  # the mode that shows the project
    places = [f"/workspace/{mark}", f"/tmp/{mark}", f"/etc/{mark}", f"/root/{mark}", f"{project}/{mark}"]
    spoil = (
        "; ".join(f"mkdir -p $(dirname {place}); echo x > {place}" for place in places) + "; rm -rf /workspace/*; true"
    )
    for more in ({}, {"compatibility_mode": "claude"}, {"compatibility_mode": "codex"}, {"profile": "restrictive"}):
        wire.call("sandbox_run", command=["sh", "-c", spoil], **more)
    wire.call("sandbox_create", name="p24")
    try:
        for place in places:
            wire.call("sandbox_file_write", name="p24", path=place, content="x")
        wire.call("sandbox_exec", name="p24", command=["sh", "-c", spoil])
        before = still(lab), wire.call("sandbox_exec", name="p24", command=["ls", "-lR", "/tmp"])
        readers = [t["name"] for t in wire.ask("tools/list")["result"]["tools"] if t["annotations"]["readOnlyHint"]]
        assert readers == ["sandbox_list", "sandbox_file_read"]
        for _ in range(3):
            wire.call("sandbox_list")
            assert helpers.text(wire.call("sandbox_file_read", name="p24", path=f"/tmp/{mark}")) == "x\n"
        after = still(lab), wire.call("sandbox_exec", name="p24", command=["ls", "-lR", "/tmp"])
        assert before[0] == after[0]
        assert before[1]["structuredContent"]["stdout"] == after[1]["structuredContent"]["stdout"]
    finally:
        wire.call("sandbox_remove", name="p24")
    assert sorted(path.name for path in project.rglob("*")) == [".git", "keep.txt"]
    assert (project / "keep.txt").read_text() == "mine"
    assert not [place for place in places if Path(place).exists()]


def still(lab: Lab) -> dict[str, Any]:
    """What is recorded of the sandbox, without what time alone changes."""
    found = lab.ask("GET", "/v1/sandboxes/p24")[1]
    return {key: value for key, value in found.items() if key not in ("last_active", "background_runs", "expires_at")}


def test_ak_P21_every_argument_of_sandbox_run_counts(agentkernel: Any, helpers: Any) -> None:
    """Honour cwd, env, timeout_ms, profile and network; a fresh sandbox each time."""
    done = agentkernel.call("sandbox_run", command=["sh", "-c", "pwd; echo $V; touch f"], cwd="/tmp", env={"V": "a b"})
    assert helpers.text(done) == "/tmp\na b\n" and done["structuredContent"]["exit_code"] == 0
    assert helpers.text(agentkernel.call("sandbox_run", command=["sh", "-c", "ls /tmp"])) == ""
    late = agentkernel.call("sandbox_run", command=["sleep", "600"], timeout_ms=500)
    assert (
        late["isError"] is True and late["structuredContent"]["timed_out"] is True and "timed out" in helpers.text(late)
    )
    strict = agentkernel.call("sandbox_run", command=["sh", "-c", "touch /usr/x || echo no"], profile="restrictive")
    assert "no" in strict["structuredContent"]["stdout"]
    offline = agentkernel.call("sandbox_run", command=["sh", "-c", "ls /sys/class/net"], network=False)
    assert offline["structuredContent"]["stdout"].split() in (["lo"], [])


def test_ak_K2_exit_code_and_stderr(agentkernel: Any, helpers: Any) -> None:
    done = agentkernel.call("sandbox_run", command=["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert done["isError"] is True and "code 7" in helpers.text(done) and "err" in helpers.text(done)
    assert (done["structuredContent"]["exit_code"], done["structuredContent"]["stderr"]) == (7, "err\n")
    odd = """a 'b' "c" $d\nnew"""
    assert helpers.text(agentkernel.call("sandbox_run", command=["printf", "%s", odd])) == odd


def test_ak_P22_named_sandboxes(agentkernel: Any, helpers: Any) -> None:
    """Create, use, stop, start and remove; binary content is base64 and files survive a stop."""
    made = agentkernel.call("sandbox_create", name="mcp-box")
    try:
        assert helpers.text(made).startswith("Sandbox 'mcp-box' created and started with image '")
        assert "mcp-box\trunning\t" in helpers.text(agentkernel.call("sandbox_list"))
        raw = bytes(range(256))
        wrote = agentkernel.call(
            "sandbox_file_write",
            name="mcp-box",
            path="/workspace/b",
            content=base64.b64encode(raw).decode(),
            encoding="base64",
        )
        assert helpers.text(wrote) == "Wrote 256 bytes to '/workspace/b' in sandbox 'mcp-box'"
        read = helpers.text(agentkernel.call("sandbox_file_read", name="mcp-box", path="/workspace/b"))
        head, _, data = read.partition("\n")
        assert head == "[binary file, 256 bytes, base64 encoded]" and base64.b64decode(data) == raw
        ran = agentkernel.call(
            "sandbox_exec", name="mcp-box", command=["sh", "-c", "echo $A; pwd"], env=["A=1"], workdir="/tmp"
        )
        assert helpers.text(ran) == "1\n/tmp\n"
        for _ in range(2):
            assert helpers.text(agentkernel.call("sandbox_stop", name="mcp-box")) == "Sandbox 'mcp-box' stopped"
        for _ in range(2):
            assert helpers.text(agentkernel.call("sandbox_start", name="mcp-box")) == "Sandbox 'mcp-box' started"
        assert "256" in helpers.text(
            agentkernel.call("sandbox_exec", name="mcp-box", command=["wc", "-c", "/workspace/b"])
        )
    finally:
        assert agentkernel.call("sandbox_remove", name="mcp-box")["isError"] is False
    assert agentkernel.call("sandbox_remove", name="mcp-box")["isError"] is False


def test_ak_K14_names_and_paths_are_checked(agentkernel: Any) -> None:
    for name in ("../x", "a/b", "-a", "a..b"):
        assert agentkernel.call("sandbox_create", name=name)["isError"] is True
    for path in ("relative", "/a/../etc/passwd", "/proc/1/mem", "/dev/zero", "/sys/x"):
        assert agentkernel.call("sandbox_file_read", name="none", path=path)["isError"] is True


def test_ak_P19_the_agent_that_calls_chooses_the_mode(
    connect: Callable[..., Any], tmp_path: Path, helpers: Any
) -> None:
    """Give Claude Code its mode, with the project in sight and not to be changed."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "seen.txt").write_text("project")
    wire = connect("mcp", "server", cwd=str(tmp_path))
    wire.ask("initialize", {"protocolVersion": "2025-06-18", "clientInfo": {"name": "claude-code", "version": "1"}})
    done = wire.call(
        "sandbox_run", command=["sh", "-c", "cat /workspace/seen.txt; echo $CLAUDE_CODE_SANDBOX; touch /workspace/x"]
    )
    assert done["structuredContent"]["stdout"] == "projectagentkernel\n" and done["structuredContent"]["exit_code"] != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", "seen.txt"]
    plain = wire.call("sandbox_run", command=["sh", "-c", "ls /workspace"], profile="restrictive")
    assert plain["structuredContent"]["stdout"] == ""


def test_all_takes_both_forms(connect: Callable[..., Any], helpers: Any) -> None:
    wire = connect("mcp", "--tools", "all")
    assert wire.call("sandbox_run", code="echo code")["structuredContent"]["stdout"] == "code\n"
    assert helpers.text(wire.call("sandbox_run", command=["echo", "command"])) == "command\n"
    assert wire.call("sandbox_run")["isError"] is True
    assert wire.call("sandbox_run", code="true", command=["true"])["isError"] is True


def test_bad_input_is_answered_and_harms_nothing(connect: Callable[..., Any], helpers: Any) -> None:
    """Answer what is malformed with the right code and go on."""
    wire = connect()
    for raw, code in (
        (b"{not json", -32700), (b"\xff\xfe", -32700), (b'{"jsonrpc":"2.0","id":1', -32700), (b"[" * 5000, -32700),
        (b"7", -32600), (b"[]", -32600), (b'{"id":1,"method":"ping"}', -32600), (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1}', -32600), (b'{"jsonrpc":"2.0","id":1,"method":"nope"}', -32601),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":[]}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":7}}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_run","arguments":{}, "x":1}}', None),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_run","arguments":{"code":7}}}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_exec","arguments":{"session_id":"x"}}}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_run","arguments":{"code":"x","timeout":-1}}}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_run","arguments":{"code":"x","extra":1}}}', -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"no_such_tool"}}', None),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_run","arguments":{"code":"x","language":"abc"}}}', None),
        (b'"' + b"x" * 6_000_000 + b'"', -32600),
    ):  # fmt: skip
        wire.send(raw)
        answer = wire.receive()
        if code is None:
            assert answer["result"]["isError"] is True, (raw[:200], answer)
        else:
            assert answer["error"]["code"] == code, (raw[:200], answer)
    wire.send({"jsonrpc": "2.0", "method": "initialized"})
    wire.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": [1]}})
    wire.send({"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "sandbox_status"}})
    wire.send([{"jsonrpc": "2.0", "id": "a", "method": "ping"}, {"jsonrpc": "2.0", "id": "b", "method": "ping"}])
    assert {one["id"] for one in wire.receive()} == {"a", "b"}
    assert wire.ask("ping")["result"] == {}


def test_many_calls_in_a_row(k8e: Any) -> None:
    """Answer each of many calls, whatever is under way at once, with its own id."""
    count = 10_000 if LONG else 300
    requests = [k8e.start("tools/call", {"name": "sandbox_status"}) for _ in range(count)]
    assert all("result" in k8e.wait(request) for request in requests)
    assert k8e.call("sandbox_run", code="echo still")["structuredContent"]["stdout"] == "still\n"


def test_two_clients_with_one_id_do_not_meet(connect: Callable[..., Any]) -> None:
    """Answer and cancel each by its own client; an id that is under way is refused within one, and free again afterwards."""
    one, two = connect(), connect()
    wait = "until [ -e go ]; do sleep 0.05; done; echo {}"
    for wire, word in ((one, "first"), (two, "second")):
        wire.call("sandbox_run", code="rm -f go")
        run = {"name": "sandbox_run", "arguments": {"code": wait.format(word), "timeout": 600}}
        wire.send({"jsonrpc": "2.0", "id": "same", "method": "tools/call", "params": run})
    one.send({"jsonrpc": "2.0", "id": "same", "method": "tools/call", "params": {"name": "sandbox_status"}})
    assert one.wait("same")["error"]["code"] == -32600
    two.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "same"}})
    assert two.wait("same")["error"]["message"] == "cancelled"
    one.call("sandbox_run", code="touch go")
    assert one.wait("same")["result"]["structuredContent"]["stdout"] == "first\n"
    one.send({"jsonrpc": "2.0", "id": "same", "method": "ping"})
    assert one.wait("same")["result"] == {}


def test_calls_run_side_by_side(connect: Callable[..., Any]) -> None:
    """A call that waits for another one's work does not block it."""
    wire = connect()
    wire.call("sandbox_run", code="true")
    waiting = wire.start(
        "tools/call", {"name": "sandbox_run", "arguments": {"code": "until [ -e flag ]; do sleep 0.05; done"}}
    )
    wire.call("sandbox_run", code="touch flag")
    assert wire.wait(waiting)["result"]["structuredContent"]["exit_code"] == 0


def test_input_that_ends_still_gets_its_answers(connect: Callable[..., Any]) -> None:
    """Let `printf ... | atoll mcp` see the answers it asked for."""
    wire = connect()
    request = wire.start("tools/call", {"name": "sandbox_run", "arguments": {"code": "echo piped"}})
    wire.process.stdin.close()
    assert wire.wait(request)["result"]["structuredContent"]["stdout"] == "piped\n"
    assert wire.process.wait(60) == 0


def test_the_daemon_may_go_away(own_lab: Lab, helpers: Any) -> None:
    """Answer what was open when the daemon is killed, and find the next one."""
    wire = helpers.Wire(own_lab, "mcp")
    try:
        wire.call("sandbox_run", code="true")
        request = wire.start("tools/call", {"name": "sandbox_run", "arguments": {"code": "sleep 300", "timeout": 600}})
        os.kill(own_lab.start(), signal.SIGKILL)
        assert wire.wait(request)["error"]["code"] == -32603
        assert wire.call("sandbox_run", code="echo again")["structuredContent"]["stdout"] == "again\n"
    finally:
        wire.kill()


def test_the_bridge_is_light() -> None:
    """Start without anything that takes long to import: an agent waits for this process."""
    heavy = ("asyncio", "msgspec", "mcp", "pydantic", "grpc", "dataclasses", "argparse", "ssl", "http.client")
    code = f"import atoll.cli.mcp, sys; print([name for name in {heavy!r} if name in sys.modules])"
    env = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
