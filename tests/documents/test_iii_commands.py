"""iii's document: each of the sixteen functions as a request, by the command line and over an engine. Details are in tests/iii."""

import json
import subprocess
from collections.abc import Iterator

import pytest
from lab.engine import Engine
from lab.sandboxes import PATIENCE, until

FN = "atoll fn sandbox::"
SID = f"""SID=$({FN}create '{{"image": "python", "memory_mb": 256}}' | jq -r .sandbox_id)\n"""


def call(function: str, **fields: object) -> str:
    """A call about $SID, as somebody types it."""
    return f"{FN}{function} '{json.dumps({'sandbox_id': 0, **fields})}'\n".replace(": 0,", """: "'$SID'",""").replace(
        ": 0}", """: "'$SID'"}"""
    )


STOP = call("stop", wait=True)
FILES = {
    call("fs::mkdir", path="/workspace/d"): '"created":true',
    call("fs::write", path="/workspace/d/a.txt", content="alpha beta"): '"bytes_written":10',
    call("fs::read", path="/workspace/d/a.txt"): '"body":"alpha beta"',
    call("fs::ls", path="/workspace/d"): '"name":"a.txt"',
    call("fs::stat", path="/workspace/d/a.txt"): '"size":10',
    call("fs::grep", path="/workspace", pattern="b.ta"): '"content":"alpha beta"',
    call("fs::sed", files=["/workspace/d/a.txt"], pattern="alpha", replacement="omega"): '"total_replacements":1',
    call("fs::chmod", path="/workspace/d/a.txt", mode="0600"): '"updated":1',
    call("fs::mv", src="/workspace/d/a.txt", dst="/workspace/b.txt"): '"moved":true',
    call("fs::rm", path="/workspace/d", recursive=True): '"removed":true',
}
TRUE = call("exec", cmd="true")
DETACHED = call("exec", argv=["sh", "-c", "nohup sleep 30 > /tmp/log 2>&1 &"]) + call("exec", cmd="echo free again")


def run(**fields: object) -> str:
    return f"{FN}run '{json.dumps(fields)}'"


ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "run python": (run(image="python", lang="python", code="print(6 * 7)"), ('"stdout":"42\\n"',)),
    "run node": (run(image="node", lang="node", code="console.log(6 * 7)"), ('"stdout":"42\\n"',)),
    "run shell": (
        run(image="python", lang="shell", code="echo $A | tr a-z A-Z", env={"A": "pipe"}),
        ('"stdout":"PIPE\\n"', '"success":true'),
    ),
    "run fails": (run(image="python", lang="python", code="raise SystemExit(3)"), ('"exit_code":3',)),
    "run files": (
        run(image="python", lang="shell", code="cat /data/x", files=[{"path": "/data/x", "content": "beside"}]),
        ('"stdout":"beside"',),
    ),
    "exec": (f"{SID}{call('exec', cmd='echo a && b $HOME')}{STOP}", ("a && b $HOME", '"stopped":true')),
    "exec env": (f"{SID}{call('exec', argv=['printenv', 'K'], env=['K=V'])}{STOP}", ('"stdout":"V\\n"',)),
    "exec detached": (f"{SID}{DETACHED}{STOP}", ('"exit_code":0', "free again")),
    "files": (f"{SID}{''.join(FILES)}{STOP}", tuple(FILES.values())),
    "list": (f"{SID}{FN}list '{{}}' | jq -c '.sandboxes | length > 0'\n{STOP}", ("true\n",)),
    "catalog": (f"{FN}catalog::list '{{}}' | jq -r '.images[].name'", ("python\n", "node\n")),
    "after stop": (f"{SID}{STOP}{TRUE}", ("S004", "[exit 1]")),
    "unknown image": (f"""{FN}create '{{"image": "docker.io/library/alpine"}}'""", ("S100", "[exit 1]")),
    "missing parent": (
        f"{SID}{call('fs::write', path='/workspace/no/a', content='x')}",
        ("S211", '"fix": {"parents": true}', "[exit 1]"),
    ),
    "bad body": (f"{SID}{call('fs::write', path='/workspace/a')}", ("S001", "[exit 1]")),
    "config": ("atoll iii config", ("- name: iii-sandbox", "image_allowlist")),
    "curl": (
        "curl -s --unix-socket ~/.atoll/daemon.sock http://atoll/functions/sandbox::list -d '{}' | jq -c 'has(\"sandboxes\")'",
        ("true\n",),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def settings(shell) -> None:
    (shell.home / ".atoll" / "iii.yaml").write_text(
        json.dumps({"isolation": "container", "image_allowlist": ["python", "node"]})
    )


@pytest.mark.parametrize("row", ROWS)
def test_iii_the_calls_of_the_document(typed, row: str) -> None:
    typed(*ROWS[row])


@pytest.fixture(scope="module")
def port(shell) -> Iterator[int]:
    """An engine with atoll's worker on it, started by the words of its page."""
    pytest.importorskip("iii", reason="needs iii-sdk")
    engine = Engine()
    shell("atoll iii config > config.yaml")
    worker = subprocess.Popen(
        ["atoll", "iii", "worker", "--engine", engine.url, "--config", "config.yaml"],
        cwd=shell.project, env=shell.env, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: len(engine.functions) == 16 or worker.poll() is not None, "sixteen functions")
        assert worker.poll() is None
        yield engine.port
    finally:
        worker.terminate()
        worker.wait(PATIENCE)
        engine.close()


VERBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "run": ("atoll iii sandbox run python --port $PORT -- python3 -c 'print(6 * 7)'", ("42\n",)),
    "status": ("atoll iii sandbox run python --port $PORT -- sh -c 'exit 7'", ("[exit 7]",)),
    "life": (
        "ID=$(atoll iii sandbox create python --name mine -e K=V --port $PORT); echo $ID\n"
        "atoll iii sandbox exec $ID --port $PORT -- printenv K\nprintf upload > up\n"
        "atoll iii sandbox upload $ID up /data/up --parents --mode 0644 --port $PORT\n"
        "atoll iii sandbox download $ID /data/up - --port $PORT; echo\natoll iii sandbox list --port $PORT\n"
        "atoll iii sandbox exec $ID --timeout 500ms --port $PORT -- sleep 30; echo said $?\natoll iii sandbox stop $ID --port $PORT",
        ("-", "V\n", "upload\n", "SANDBOX_ID", "mine", "said 124", "stopped "),
    ),
    "error": ("atoll iii sandbox create nope --port $PORT", ("error: [S100]", "[exit 1]")),
    "nobody": ("atoll iii sandbox list --port 1", ("error:", "[exit 1]")),
}


@pytest.mark.parametrize("row", VERBS)
def test_iii_the_verbs_of_the_command_line(typed, port: int, row: str) -> None:
    script, wanted = VERBS[row]
    typed(f"PORT={port}\n{script}", wanted)
