"""K8E's documents: what they type, as it is typed, under the name k8e. Promises in detail are in tests/cli, cli_k8e and k8e_grpc."""

import json
import tomllib
from pathlib import Path

import pytest
from lab.sandboxes import LONG, reachable

from atoll.egress import default_hosts

SID = "SID=$(k8e sandbox create | jq -r .session_id)\n"
GONE = "\nk8e sandbox destroy $SID"
BATCH = """k8e sandbox run --lang python <<'EOF'
for i in range(10):
    print(i)
EOF"""
DATA = """printf 'import csv, json\\nrows = list(csv.DictReader(open("/workspace/data.csv")))\\n' > script.py
printf 'json.dump({"rows": len(rows)}, open("/workspace/result.json", "w"))\\n' >> script.py
printf 'a,b\\n1,2\\n3,4\\n' > data.csv
k8e sandbox write $SID /workspace/script.py < script.py
k8e sandbox write $SID /workspace/data.csv < data.csv
k8e sandbox run "python3 /workspace/script.py" --session-id $SID > /dev/null
k8e sandbox read $SID /workspace/result.json --raw | jq .rows"""
AGENTS = """echo shared | k8e sandbox write $SID /workspace/input.txt > /dev/null
ONE=$(k8e sandbox subagent $SID | jq -r .session_id)
TWO=$(k8e sandbox subagent $SID | jq -r .session_id)
k8e sandbox run --raw "cat /workspace/input.txt > /workspace/one" --session-id $ONE &
k8e sandbox run --raw "cat /workspace/input.txt > /workspace/two" --session-id $TWO &
wait
k8e sandbox run --raw "cat /workspace/one /workspace/two" --session-id $SID
k8e sandbox subagent $ONE"""
MANIFEST = """cat > workspace.yaml <<'EOF'
entries:
  - dir: {path: out}
  - file: {path: run.sh, content: "echo from the manifest", mode: "0755"}
EOF
SID=$(k8e sandbox create --manifest workspace.yaml | jq -r .session_id)
k8e sandbox run --raw "/workspace/run.sh; ls -d /workspace/out" --session-id $SID"""
MCP = """printf '%s\\n' '{"jsonrpc":"2.0","id":1,"method":"tools/list"}' | k8e sandbox-mcp | jq -r '.result.tools[].name' | wc -l
printf '%s\\n' '{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"sandbox_run","arguments":{"code":"echo tool"}}}' |
    k8e sandbox-mcp | jq -r '.result.content[0].text' | jq -r .stdout"""

ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "P01 hello": (
        """k8e sandbox run "print('hello')" --lang python""",
        ('"stdout":"hello\\n"', '"stderr":""', '"exit_code":0', '"session_id":"sess-'),
    ),
    "P02 bash": ("k8e sandbox run 'echo $0'", ("bash", '"language":"bash"')),
    "P02 node": ("k8e sandbox run 'console.log(6 * 7)' --lang node", ('"stdout":"42\\n"',)),
    "P02 js": ("k8e sandbox run 'console.log(6 * 7)' --lang js", ('"stdout":"42\\n"',)),
    "P03 batch": (BATCH, ('"stdout":"0\\n1\\n2\\n3\\n4\\n5\\n6\\n7\\n8\\n9\\n"',)),
    "P05 jq": ("k8e sandbox run 'echo plain' | jq -r .stdout", ("plain\n",)),
    "P05 code": ("k8e sandbox run 'exit 7'", ('"exit_code":7', "[exit 7]")),
    "P06 raw": ("k8e sandbox run --raw 'echo one; echo two >&2; exit 3'", ("one\n", "[exit 3]")),
    "P07 timeout": (
        "k8e sandbox run 'echo so far; sleep 100' --timeout 1",
        ("so far", '"status":"timed_out"', "[exit 1]"),
    ),
    "P08 stays": ("k8e sandbox run 'echo kept > k'\nk8e sandbox run --raw 'cat k'", ("kept\n",)),
    "P09 auto": (
        "k8e sandbox run true | jq -r .session_id\njq -r .session_id ~/.k8e/sandbox/default/state.json",
        ("sess-", "sess-"),
    ),
    "P10 tenant": (
        "k8e sandbox run 'echo here > t' --tenant my-project > /dev/null\n"
        "k8e sandbox run --raw 'cat t' --tenant my-project\njq -r .tenant_id ~/.k8e/sandbox/my-project/state.json",
        ("here\n", "my-project\n"),
    ),
    "P11 manual": (f"{SID}k8e sandbox run --raw 'echo mine' --session-id $SID{GONE}", ("mine\n", '"ok":true')),
    "P12 status": ("k8e sandbox status", ('"available":true', '"session_id":"')),
    "P14 files": (
        f"{SID}echo one | k8e sandbox write $SID /workspace/notes.txt\n"
        "echo two | k8e sandbox write $SID /workspace/notes.txt --mode a\nk8e sandbox read $SID /workspace/notes.txt\n"
        "k8e sandbox read $SID /workspace/notes.txt --raw\nk8e sandbox list $SID --since 1700000000\n"
        f"k8e sandbox list $SID --since 9999999999{GONE}",
        ('"ok":true', '"ok":true', '"content":"one\\ntwo\\n"', "one\ntwo\n", "/workspace/notes.txt", '"files":[]'),
    ),
    "P15 manifest": (f"{MANIFEST}{GONE}", ("from the manifest\n", "/workspace/out\n")),
    "P16 snapshot": (
        f"{SID}echo saved | k8e sandbox write $SID /workspace/s > /dev/null\nk8e sandbox snapshot save $SID my-checkpoint\n"
        f"k8e sandbox snapshot list{GONE}\nSID=$(k8e sandbox snapshot restore my-checkpoint | jq -r .session_id)\n"
        f"k8e sandbox read $SID /workspace/s --raw{GONE}\nk8e sandbox snapshot delete my-checkpoint",
        ('"name":"my-checkpoint"', '"file_count":1', '"snapshots":[{"name":"my-checkpoint"', "saved\n", '"ok":true'),
    ),
    "P18 hosts": (
        "SID=$(k8e sandbox create --allowed-hosts pypi.org,api.example.com | jq -r .session_id)\n"
        f"k8e sandbox get $SID | jq -c .allowed_hosts{GONE}",
        ('["pypi.org","api.example.com"]',),
    ),
    "P18 live": (
        f"{SID}k8e sandbox allow-hosts a.example,b.example --session-id $SID\nk8e sandbox allow-hosts --add c.example --session-id $SID\n"
        f"k8e sandbox allow-hosts --remove a.example --session-id $SID\nk8e sandbox allow-hosts --clear --session-id $SID{GONE}",
        ('["a.example","b.example"]', '"c.example"]', '["b.example","c.example"]', "raw.githubusercontent.com"),
    ),
    "P22 analysis": (f"{SID}{DATA}{GONE}", ("2\n",)),
    "P24 subagents": (f"{SID}{AGENTS}", ("shared\nshared\n", '"error":"permission_denied"', "[exit 1]")),
    "P25 confirm": (
        f'{SID}k8e sandbox confirm $SID "delete the table" --no-wait{GONE}',
        ("k8e sandbox approve approval-", '"approved":false', '"approval_id":"approval-'),
    ),
    "P25 wait": (
        f'{SID}k8e sandbox confirm $SID "delete the table" --timeout 1; echo "said $?"{GONE}',
        ("k8e sandbox approve approval-", '"approved":false', '"status":"pending"', "said 1"),
    ),
    "P26 down": ("K8E_SANDBOX_ENDPOINT=127.0.0.1:1 k8e sandbox run true", ('"ok":false', '"error":', "[exit 2]")),
    "P26 unknown": ("k8e sandbox run true --session-id sess-nope", ('"error":"not_found"', '"detail":', "[exit 1]")),
    "P28 kata": ("k8e sandbox create --runtime kata", ('"error":"unsupported"', "kata needs", "[exit 1]")),
    "P28 firecracker": ("k8e sandbox create --runtime firecracker", ('"error":"unsupported"', "KVM", "[exit 1]")),
    "P33 symlink": (
        "k8e-sandbox sandbox run 'echo linked'\nk8e-sandbox sandbox status",
        ("linked", '"available":true'),
    ),
    "P40 stdio": (MCP, ("12\n", "tool\n")),
    "3.2 background": (
        f"{SID}RUN=$(k8e sandbox run 'sleep 0.2; echo later' --background --session-id $SID | jq -r .run_id)\n"
        f"k8e sandbox poll $RUN --follow\nk8e sandbox poll $RUN | jq -c '[.status, .exit_code]'{GONE}",
        ("later", '["completed",0]'),
    ),
    "3.2 look": (
        f"{SID}k8e sandbox run 'echo logged' --session-id $SID > /dev/null\nk8e sandbox log $SID\nk8e sandbox events $SID --limit 500\n"
        f"k8e sandbox ps $SID\nk8e sandbox sessions --phase all{GONE}",
        ("logged\n", '"events":[', '"processes":[', '"sessions":['),
    ),
    "3.2 ports": (
        f"{SID}k8e sandbox run 'python3 -m http.server 8123' --background --session-id $SID > /dev/null\n"
        "URL=$(k8e sandbox expose 8123 --session-id $SID | jq -r .url)\nk8e sandbox exposed --session-id $SID\n"
        "curl -s --retry 20 --retry-all-errors --retry-delay 1 $URL | grep -o 'Directory listing'\n"
        f"k8e sandbox unexpose 8123 --session-id $SID{GONE}",
        ('"services":[{"port":8123', "Directory listing\n", '"ok":true'),
    ),
    "3.2 create": (
        "SID=$(k8e sandbox create --env GREETING=hi --session-id my-own-id | jq -r .session_id); echo $SID\n"
        f"k8e sandbox run --raw 'echo $GREETING' --session-id $SID{GONE}",
        ("my-own-id\n", "hi\n", '"ok":true'),
    ),
    "3.2 keys": (
        "k8e sandbox api-key create ci --ttl 30d | jq -c '[.name, .ttl_days, (.key | length)]'\nk8e sandbox-apikey list\n"
        "k8e sandbox api-key delete ci",
        ('["ci",30,64]', '"keys":[{"name":"ci"', '"ok":true'),
    ),
    "3.2 catalog": ("k8e sandbox catalog | jq -r '.commands[].name' | grep -x snapshot\\ save", ("snapshot save\n",)),
    "3.2 doctor": ("k8e sandbox doctor --json | jq -c '[.problems >= 0, (.checks | length) > 5]'", ("[true,true]",)),
    "3.7 connect": (
        "k8e sandbox connect --skip-skill --skip-path\nls ~/.k8e/sandbox/config.json ~/.k8e/sandbox/profiles.yaml",
        ("profile `default`", "config.json", "profiles.yaml"),
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_k8e_the_commands_of_the_documents(typed, row: str) -> None:
    typed(*ROWS[row])


@pytest.mark.skipif(not LONG, reason="installs a large package: make test-long")
def test_k8e_P21_the_package_of_the_document(typed) -> None:
    if not reachable(default_hosts()[0]):
        pytest.skip("the package index cannot be reached from this machine")
    script = """k8e sandbox run "pip install pandas" --timeout 600 > /dev/null
k8e sandbox run "import pandas; print(pandas.__version__)" --lang python --timeout 120"""
    typed(script, ('"exit_code":0',))


TARGETS = {
    "claude": ".claude",
    "openclaw": ".openclaw",
    "kiro": ".kiro",
    "gemini": ".gemini",
    "codex": ".codex",
    "pi": ".agents",
}


@pytest.mark.parametrize("target", [*TARGETS, "all"])
def test_k8e_P35_the_skill_is_installed_as_typed(typed, shell, tmp_path: Path, target: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    typed(f"HOME={home} k8e sandbox-install-skill {target}", ("SKILL.md",))
    for name in TARGETS.values() if target == "all" else [TARGETS[target]]:
        assert (home / name / "skills" / "k8e-sandbox" / "SKILL.md").is_file(), name


def test_k8e_P42_entries_with_a_url_as_typed(typed, tmp_path: Path) -> None:
    """Each agent's own file and shape, as its program reads it: Claude Code, Gemini CLI, Codex and OpenCode differ."""
    typed(f"HOME={tmp_path} K8E_SANDBOX_MCP_ADDR=:8811 k8e sandbox-install-skill all", ("SKILL.md",))
    url = "http://127.0.0.1:8811/mcp"
    shapes = {
        ".claude.json": ("mcpServers", {"type": "http", "url": url}),
        ".gemini/settings.json": ("mcpServers", {"type": "http", "url": url}),
        ".config/opencode/opencode.json": ("mcp", {"type": "remote", "url": url, "enabled": True}),
    }
    for name, (key, entry) in shapes.items():
        assert json.loads((tmp_path / name).read_text())[key]["k8e-sandbox"] == entry, name
    codex = tomllib.loads((tmp_path / ".codex/config.toml").read_text())
    assert codex["mcp_servers"]["k8e-sandbox"] == {"url": url}


PYTHON = {
    "P44 hello": (
        """with SandboxClient() as c:
    result = c.run("print('hello')", language="python")
    print(result.stdout, result.exit_code)""",
        ("hello", "0\n"),
    ),
    "P45 numbers": (
        """with SandboxClient() as c:
    code = "import random; n = [random.random() for _ in range(10)]; print(len(n), 0 < sum(n) / 10 < 1)"
    print(c.run(code, "python").stdout)""",
        ("10 True",),
    ),
    "P45 session": (
        """with SandboxClient() as c:
    c.run("echo first > /workspace/f", "bash")
    print(c.run("print(open('/workspace/f').read())", "python").stdout)""",
        ("first",),
    ),
    "P45 kata": (
        """with sandbox_session(runtime_class="container", allowed_hosts=["github.com"]) as (client, sid):
    client.write_file(sid, "/workspace/a.py", "print(6 * 7)")
    print(client.exec(sid, "python3 /workspace/a.py").stdout)""",
        ("42",),
    ),
    "5 stream": (
        """with SandboxClient() as c:
    sid = c.create_session(runtime_class="container")
    print("".join(c.exec_stream(sid, "echo a; echo b")), [f.path for f in c.list_files(sid)])
    c.destroy_session(sid)""",
        ("a\nb\n", "[]"),
    ),
}


@pytest.mark.parametrize("row", PYTHON)
def test_k8e_the_python_of_the_documents(typed, row: str) -> None:
    code, wanted = PYTHON[row]
    typed(f"python3 - <<'EOF'\nfrom sandbox_client import SandboxClient, sandbox_session\n{code}\nEOF", wanted)
