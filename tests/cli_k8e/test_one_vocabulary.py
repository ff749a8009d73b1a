"""One sandbox seen through every door: command line, gRPC and its SDK, and MCP use the same words for it."""

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import WAIT, Machine

SDK = """
import json, sys
from atoll import SandboxClient
with SandboxClient(tenant_id=sys.argv[1]) as client:
    ran = client.run(sys.argv[2])
    sessions = {one.session_id: [one.phase, one.tenant_id] for one in client.list_sessions("all")}
    print(json.dumps({"session_id": ran.session_id, "stdout": ran.stdout, "sessions": sessions}))
"""


@pytest.fixture(scope="module")
def here() -> Iterator[Machine]:
    made = Machine()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def tenant(here: Machine) -> Iterator[str]:
    name = f"t-{secrets.token_hex(4)}"
    yield name
    here("sandbox", "destroy", "--tenant", name)


def by_sdk(here: Machine, tenant: str, code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", SDK, tenant, code], capture_output=True, timeout=WAIT, env=here.env, cwd=here.root
    )
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def by_mcp(here: Machine, tenant: str, code: str) -> Any:
    """What `sandbox_run` answers over stdio."""
    process = subprocess.Popen(
        here.command("sandbox-mcp", "--tenant-id", tenant),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=here.env, cwd=here.root,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    ask = {"name": "sandbox_run", "arguments": {"code": code, "language": "bash"}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": ask}
    begin = {
        "jsonrpc": "2.0", "id": 0, "method": "initialize",
        "params": {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
    }  # fmt: skip
    with process:
        for message in (begin, {"jsonrpc": "2.0", "method": "notifications/initialized"}, call):
            process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()
        for line in process.stdout:
            answer = json.loads(line)
            if answer.get("id") == 1:
                process.stdin.close()
                return json.loads(answer["result"]["content"][0]["text"])
    raise AssertionError("no answer")


def test_b1_a_tenant_is_one_tenant_through_every_door(here: Machine, tenant: str) -> None:
    first = here.ok("sandbox", "run", "echo cli > /workspace/f", "--tenant", tenant)
    second = by_sdk(here, tenant, "cat /workspace/f")
    third = by_mcp(here, tenant, "cat /workspace/f")
    assert second["session_id"] == third["session_id"] == first["session_id"]
    assert (second["stdout"], third["stdout"]) == ("cli\n", "cli\n")
    assert second["sessions"][first["session_id"]] == ["Active", tenant]
    assert here.ok("sandbox", "get", first["session_id"])["tenant_id"] == tenant
    here.ok("sandbox", "snapshot", "save", first["session_id"], f"s-{tenant}")
    kept = {one["name"]: one["tenant_id"] for one in here.ok("sandbox", "snapshot", "list")["snapshots"]}
    assert kept[f"s-{tenant}"] == tenant
    assert here.ok("sandbox", "destroy", "--tenant", tenant) == {"ok": True}


def test_b1_a_session_of_the_sdk_is_found_by_the_command_line(here: Machine, tenant: str) -> None:
    first = by_sdk(here, tenant, "echo sdk > /workspace/f")
    again = here.ok("sandbox", "run", "cat /workspace/f", "--tenant", tenant)
    assert (again["session_id"], again["stdout"]) == (first["session_id"], "sdk\n")
    assert here.ok("sandbox", "status", "--tenant", tenant)["session_id"] == first["session_id"]


def test_b1_a_label_under_the_old_name_is_read(here: Machine, tenant: str) -> None:
    made = here.ok("sandbox", "create", "--label", f"tenant={tenant}")["session_id"]
    assert here.ok("sandbox", "get", made)["tenant_id"] == tenant
    assert here.ok("sandbox", "run", "true", "--tenant", tenant)["session_id"] == made
    assert by_sdk(here, tenant, "true")["session_id"] == made


def test_b2_phases_are_the_contracts_through_every_door(here: Machine, tenant: str) -> None:
    session = here.ok("sandbox", "create", "--persistent", "--tenant", tenant)["session_id"]
    seen = []
    for change in ("", "stop", "start"):
        if change:
            here.ok("sandbox", change, session)
        phase = here.ok("sandbox", "get", session)["phase"]
        told = by_sdk(here, "", "true")["sessions"][session][0]
        assert phase == told
        seen.append(phase)
    assert seen == ["Active", "Paused", "Active"]
    here.ok("sandbox", "destroy", session)
    ended = {one["session_id"]: one["phase"] for one in here.ok("sandbox", "sessions", "--phase", "all")["sessions"]}
    assert ended[session] == "Terminating"
    assert session in {o["session_id"] for o in here.ok("sandbox", "sessions", "--phase", "Terminating")["sessions"]}


def test_b1_an_id_of_the_callers_choice_is_shown_by_every_door(here: Machine) -> None:
    mine = f"mine-{secrets.token_hex(4)}"
    assert here.ok("sandbox", "create", "--session-id", mine)["session_id"] == mine
    try:
        assert here.ok("sandbox", "get", mine)["session_id"] == mine
        assert mine in {one["session_id"] for one in here.ok("sandbox", "list")["sandboxes"]}
        assert mine in by_sdk(here, "", "true")["sessions"]
        assert here.ok("sandbox", "run", "echo 1", "--session-id", mine)["stdout"] == "1\n"
    finally:
        here.ok("sandbox", "destroy", mine)
