"""agentkernel's document and manual: what they type, as it is typed. Promises in detail are in tests/agentkernel and tests/mcp."""

import json
from pathlib import Path

import pytest

ON = "agentkernel sandbox create {0} --image host > /dev/null\nagentkernel sandbox start {0} > /dev/null\n"
LIFE = """agentkernel sandbox create my-sandbox
agentkernel sandbox start my-sandbox
agentkernel exec my-sandbox python -c 'print(open("/workspace/k", "w").write("kept"))'
agentkernel sandbox stop my-sandbox
agentkernel sandbox start my-sandbox
agentkernel exec my-sandbox cat /workspace/k
agentkernel sandbox remove my-sandbox"""
FLAT = """agentkernel create flat -B container
agentkernel start flat
agentkernel exec -e GREETING=hi flat sh -c 'echo $GREETING'
agentkernel list
agentkernel stop flat
agentkernel remove flat
agentkernel remove flat"""
DETACHED = """ID=$(agentkernel exec -d detached sh -c 'echo working; sleep 60')
agentkernel sandbox exec-list detached
until agentkernel sandbox exec-logs detached $ID | grep working; do sleep 0.1; done
agentkernel sandbox exec-kill detached $ID
agentkernel sandbox remove detached"""
COPIES = """echo text > local.txt
agentkernel cp local.txt copies:/workspace/there.txt
agentkernel sandbox cp copies:/workspace/there.txt back.txt && cat back.txt
agentkernel sandbox export copies -o copies.tar --path /workspace && tar tf copies.tar
agentkernel sandbox export-config copies > copies.toml
agentkernel sandbox import-config copies.toml --as copies-two
agentkernel sandbox info copies-two
agentkernel sandbox extend-ttl copies --by 1h
agentkernel remove copies copies-two"""
SNAPSHOT = """agentkernel exec snap sh -c 'echo shot > /workspace/s'
agentkernel snapshot take snap --name first
agentkernel snapshot list
agentkernel snapshot restore first --as snap-two
agentkernel start snap-two
agentkernel exec snap-two cat /workspace/s
agentkernel snapshot delete first
agentkernel remove snap snap-two"""
SESSION = """agentkernel session start --name work --agent claude
agentkernel session list
agentkernel session save work
agentkernel session stop work
agentkernel session resume work
agentkernel session delete work"""
PIPELINE = """cat > steps.toml <<'EOF'
[[step]]
name = "make"
image = "host"
command = "sh -c 'echo made > /out/file'"
output = "/out"
[[step]]
name = "use"
image = "host"
command = "cat /in/file"
input = "/in"
EOF
agentkernel pipeline steps.toml"""
POOL = """agentkernel daemon start
agentkernel daemon status
agentkernel daemon prewarm --mode claude --count 1
agentkernel run python3 -c 'print("warm or cold")'"""
MCP = """printf '%s\\n' '{"jsonrpc":"2.0","id":1,"method":"tools/list"}' | agentkernel mcp server | jq -r '.result.tools[].name'"""
CALL = """cat > call.json <<'EOF'
{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_run","arguments":{"command":["echo","tool"]}}}
EOF
agentkernel mcp-server < call.json | jq -r '.result.content[0].text'"""
TOOLS = ("run", "create", "exec", "list", "remove", "file_write", "file_read", "start", "stop")
CLOSED = "import socket; socket.create_connection(('203.0.113.1', 80), 3)"

ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "P1 run": ("""agentkernel run python3 -c 'print("in a sandbox")'""", ("in a sandbox\n",)),
    "P2 shell": ("agentkernel run sh -c 'echo a && echo b'", ("a\nb\n",)),
    "P2 status": ("agentkernel run sh -c 'exit 7'", ("[exit 7]",)),
    "P3 node": ("agentkernel run node -e 'console.log(6 * 7)'", ("42\n",)),
    "P5 keep": (
        "agentkernel run --keep echo kept 2> said; cat said\nNAME=$(grep -o 'run-[0-9a-f]*' said | head -1)\n"
        "agentkernel exec $NAME echo entered\nagentkernel sandbox remove $NAME",
        ("kept\n", "agentkernel attach run-", "entered\n", "removed"),
    ),
    "P5 nothing": ("agentkernel run false; agentkernel list", ("No sandboxes",)),
    "P7 life": (LIFE, ("created", "started", "4\n", "stopped", "started", "kept", "removed")),
    "3.2 flat": (
        FLAT,
        ("created", "started", "hi\n", "NAME", "flat", "running", "stopped", "removed", "nothing to remove"),
    ),
    "P9 restrictive": (
        "agentkernel run --profile restrictive sh -c 'touch /x 2> /dev/null || echo closed'",
        ("closed\n",),
    ),
    "P10 permissive": ("echo mine > file.txt\nagentkernel run --profile permissive cat file.txt", ("mine\n",)),
    "P11 no network": (
        f'agentkernel run --no-network python3 -c "{CLOSED}" 2>&1 | tail -1',
        ("unreachable", "[exit 1]"),
    ),
    "P14 claude": (
        "echo mine > file.txt\nagentkernel run --compatibility-mode claude sh -c 'echo $CLAUDE_CODE_SANDBOX; cat file.txt'",
        ("agentkernel\n", "mine\n"),
    ),
    "P14 codex": (
        "agentkernel run --compatibility-mode codex sh -c 'touch /x 2> /dev/null || echo closed'",
        ("closed\n",),
    ),
    "P14 gemini": ("agentkernel run --compatibility-mode gemini pwd", ("/workspace\n",)),
    "P14 native": ("agentkernel run --compatibility-mode native echo ok", ("ok\n",)),
    "P14 unknown": ("agentkernel run --compatibility-mode other true", ("claude", "[exit 2]")),
    "P20 tools": (
        MCP,
        tuple(f"sandbox_{name}\n" for name in TOOLS),
    ),
    "P21 call": (CALL, ("tool\n",)),
    "P25 pool": (POOL, ("running", "Daemon: running", "Socket:", "more than the 0 allowed", "warm or cold\n")),
    "3.2 detached": (f"{ON.format('detached')}{DETACHED}", ("COMMAND", "running", "working\n", "removed")),
    "3.2 copies": (
        f"{ON.format('copies')}{COPIES}",
        ("Copied 5 bytes", "text\n", "there.txt", "created", "copies-two", "removed", "removed"),
    ),
    "3.2 gc": ("agentkernel sandbox gc\nagentkernel sandbox clean", ("[exit 0]",)),
    "3.3 timeout": ("agentkernel run --timeout 1s sleep 60", ("[exit 124]",)),
    "3.3 env": ("agentkernel run -e A=1 sh -c 'echo $A'", ("1\n",)),
    "3.3 missing": ("agentkernel run no-such-program", ("not found", "--image", "[exit 127]")),
    "3.3 profile": ("agentkernel run --profile other true", ("permissive, moderate, restrictive", "[exit 2]")),
    "12 snapshot": (f"{ON.format('snap')}{SNAPSHOT}", ("first", "NAME", "first", "snap-two", "shot\n")),
    "12 sessions": (SESSION, ("session-work", "running", "saved", "stopped", "running", "deleted")),
    "12 pipeline": (PIPELINE, ("[1/2] make done", "made\n", "[2/2] use done", "2 steps done")),
    "12 parallel": ("agentkernel parallel -j a:host:true -j b:host:false", ("failed with 1", "[exit 1]")),
    "12 templates": ("agentkernel template list", ("NAME", "claude-sandbox", "python-ml", "rust-ci")),
    "12 audit": (
        "agentkernel audit --last 3\nagentkernel audit list --json | tail -1\nagentkernel audit -s $(agentkernel sandbox create told |"
        " grep -o told | head -1) -l 5\nagentkernel audit path\nagentkernel remove told",
        ("uid:", '"action":', "create", "audit.jsonl"),
    ),
    "13 init": (
        "mkdir -p fresh; cd fresh; agentkernel init -n mine -a codex; cat agentkernel.toml; agentkernel init",
        ('name = "mine"', 'preferred = "codex"', "[exit 125]"),
    ),
    "13 agents": ("agentkernel agents", ("AGENT", "STATUS", "API KEY", "claude", "codex", "gemini")),
    "13 doctor": (
        "agentkernel doctor --json | jq -c '.checks | length > 5'\nagentkernel status > /dev/null",
        ("true\n",),
    ),
    "13 setup": ("agentkernel setup --check", ("kernel", "cgroups")),
    "13 images": ("agentkernel images", ("host",)),
    "13 completions": ("agentkernel completions bash | bash -n\nagentkernel completions zsh | head -1", ("[exit 0]",)),
}


@pytest.mark.parametrize("row", ROWS)
def test_ak_the_commands_of_the_documents(typed, row: str) -> None:
    typed(*ROWS[row])


PLUGINS = {
    "claude": [".claude/skills/agentkernel/SKILL.md", ".claude/commands/sandbox.md", ".mcp.json"],
    "codex": [".mcp.json"],
    "gemini": [".gemini/settings.json"],
    "opencode": [".opencode/package.json", ".opencode/plugins/agentkernel.ts"],
    "mcp": [".mcp.json"],
}


@pytest.mark.parametrize("target", PLUGINS)
def test_ak_13_plugins_as_typed(typed, tmp_path: Path, target: str) -> None:
    """Each target gets its files, and the entry that starts the server; what was there stays."""
    (tmp_path / ".mcp.json").write_text('{"mcpServers": {"other": {"command": "x"}}}')
    typed(f"cd {tmp_path} && agentkernel plugin install {target} && agentkernel plugin list", (str(tmp_path),))
    assert all((tmp_path / name).is_file() for name in PLUGINS[target]), sorted(tmp_path.rglob("*"))
    servers = json.loads((tmp_path / ".mcp.json").read_text())["mcpServers"]
    assert servers["other"] == {"command": "x"}
    if ".mcp.json" in PLUGINS[target]:
        assert servers["agentkernel"] == {"command": "agentkernel", "args": ["mcp", "server"], "env": {}}


def test_ak_P15_the_file_of_the_project_as_written(typed, tmp_path: Path) -> None:
    (tmp_path / "agentkernel.toml").write_text(
        '[sandbox]\nname = "mine"\n[agent]\ncompatibility_mode = "claude"\n[security]\nprofile = "restrictive"\n'
    )
    typed(
        f"cd {tmp_path} && agentkernel run sh -c 'touch /x 2> /dev/null || echo closed; ls -A /workspace'",
        ("closed\n[exit 0]",),
    )
